"""Kernels for CUDA (Triton) and CPU. Import as ``kvpass.kernels``; nothing here is loaded by ``import kvpass``."""

if __name__ != "kvpass.kernels":
    raise ImportError(
        f"this is kvpass.kernels, found as {__name__!r} because the kvpass checkout is on sys.path; "
        "set PYTHONSAFEPATH=1 or run from another folder"
    )

"""Accuracy and speed of compressed decoding. Import as ``kvpass.eval``."""

if __name__ != "kvpass.eval":
    raise ImportError(
        f"this is kvpass.eval, found as {__name__!r} because the kvpass checkout is on sys.path; "
        "set PYTHONSAFEPATH=1 or run from another folder"
    )

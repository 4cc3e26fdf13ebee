"""Passes over the traced decoder. Import as ``kvpass.graphs``."""

if __name__ != "kvpass.graphs":
    raise ImportError(
        f"this is kvpass.graphs, found as {__name__!r} because the kvpass checkout is on sys.path; "
        "set PYTHONSAFEPATH=1 or run from another folder"
    )

"""``python -m kvpass``: the ``kvpass`` command."""

from kvpass.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvpass")

"""The command line, also as `python -m specdec`: `accelerate launch -m specdec train ...` needs it."""

import sys


def main() -> None:
    """The commands. Ctrl-C ends them without a traceback while they are still being imported, too."""
    try:
        from specdec.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

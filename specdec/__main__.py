"""Command line, also as `python -m specdec`, which `accelerate launch -m specdec train ...` needs."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C exits without a traceback, also while the commands are being imported."""
    try:
        from specdec.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

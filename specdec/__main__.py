"""`python -m specdec` is the command line: `accelerate launch -m specdec train ...` needs it."""

from specdec.cli import app

if __name__ == "__main__":
    app()

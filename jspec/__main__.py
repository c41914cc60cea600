"""`python -m jspec`, the same as the command `jspec`."""

from jspec.cli import run

if __name__ == "__main__":
    run()

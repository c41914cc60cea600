"""Serves a model pair over HTTP: `python run_server.py --help`. The same as `jspec serve`."""

import sys

from jspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))

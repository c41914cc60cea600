"""Serves a model pair over HTTP: `python run_server.py --help`. The same as `jspec serve`."""

import sys

from jspec.__main__ import run

if __name__ == "__main__":
    run(["serve", *sys.argv[1:]])

"""`python -m jspec`, `jspec` and `run_server.py` begin here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """`jspec.cli.main.run`, whose imports take a moment in which Ctrl-C is to end us as quietly as
    later."""
    try:
        from jspec.engine.interrupts import interruptible

        with interruptible():
            from jspec.cli import main
    except KeyboardInterrupt:
        print("jspec: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    main.run(argv)


if __name__ == "__main__":
    run()

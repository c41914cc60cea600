"""Entry point of `python -m jspec`, `jspec` and `run_server.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `jspec.cli.main.run`; Ctrl-C during its import also ends without a traceback."""
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

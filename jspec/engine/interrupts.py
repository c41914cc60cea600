"""Ctrl-C while an engine starts: it is never lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of the garbage
collector, of a weak reference, or in `__del__`, an exception is only printed, and a start goes on
as if nothing had been said. So while something starts, the handler also remembers the interrupt,
and the start asks between its stages. While a module is imported it only remembers: an exception
in the midst of a native module's initialisation can end the process by a fault (jaxlib's does).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_IMPORTER = "<frozen importlib._bootstrap>"


class InterruptGuard:
    """Handles SIGINT as Python does, and remembers it.

    While installed it is found through the table of signal handlers, which belongs to the process.
    """

    def __init__(self) -> None:
        self.is_interrupted = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.is_interrupted = True
        if not _is_importing(frame):
            signal.default_int_handler(signum, frame)

    def on_unraisable(self, unraisable: sys.UnraisableHookArgs, /) -> None:
        """Says nothing about the interrupt that is raised again later, and passes on the rest."""
        if not (self.is_interrupted and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            self._unraisablehook(unraisable)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Raises KeyboardInterrupt at the end if one came and was lost, or became an Exception."""
        self._unraisablehook: Any = sys.unraisablehook
        sys.unraisablehook = self.on_unraisable
        signal.signal(signal.SIGINT, self)
        try:
            yield
        except Exception as error:
            if self.is_interrupted:
                raise KeyboardInterrupt from error
            raise
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._unraisablehook
        if self.is_interrupted:
            raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the code that this frame runs is a part of an import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


@contextmanager
def interruptible() -> Iterator[None]:
    """While this runs, Ctrl-C is KeyboardInterrupt at the latest at its end, and from `check`.

    Changes nothing off the main thread, where no signal arrives, nor where the process handles
    SIGINT in its own way. May be nested.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with InterruptGuard().installed():
            yield
    else:
        check()
        yield
        check()


def check() -> None:
    """Raises KeyboardInterrupt, on the main thread, if one came since `interruptible` began."""
    guard = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(guard, InterruptGuard) and guard.is_interrupted:
        raise KeyboardInterrupt

"""Ctrl-C handling while an engine starts, so that no interrupt is lost.

Inside a garbage collector or weak reference callback or `__del__`, Python only prints a
KeyboardInterrupt. So the handler also records it, and the start checks for it between its stages.
During an import it only records, because an exception in a native module's initialization can crash
the process (jaxlib's does).
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
    """A SIGINT handler like Python's that also records the interrupt."""

    def __init__(self) -> None:
        self.is_interrupted = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.is_interrupted = True
        if not _is_importing(frame):
            signal.default_int_handler(signum, frame)

    def on_unraisable(self, unraisable: sys.UnraisableHookArgs, /) -> None:
        """Suppress the report of an interrupt that is raised again later; pass on the rest."""
        if not (self.is_interrupted and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            self._unraisablehook(unraisable)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on exit if one was lost or became another exception."""
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
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C from `check`, or at the end of the block. It may be
    nested, and has no effect off the main thread or with the process's own SIGINT handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with InterruptGuard().installed():
            yield
    else:
        check()
        yield
        check()


def check() -> None:
    """Raise KeyboardInterrupt on the main thread if one came within `interruptible`."""
    guard = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(guard, InterruptGuard) and guard.is_interrupted:
        raise KeyboardInterrupt

"""Interrupts the thread that runs a test, at a time of the test's choice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def interruption(wait: Callable[[], object]) -> Iterator[None]:
    """Expect the KeyboardInterrupt that this thread gets soon after `wait` returns.

    It uses a signal of its own, since SIGINT is ignored in tests that a shell runs in the
    background.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def send(main: int = threading.get_ident()) -> None:
        wait()
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)

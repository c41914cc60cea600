"""Ctrl-C while an engine starts: the start ends even where Python loses the exception."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jspec.engine import interrupts
from jspec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _python_handles_the_signal() -> Iterator[None]:
    """Restore SIGINT, which a shell ignores for tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Collected:
    """An object that gets the signal during its own deletion."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def lose_in_a_callback() -> None:
    def callback(phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def lose_in_a_deletion() -> None:
    Collected()


LOSE = [lose_in_a_callback, lose_in_a_deletion]


@pytest.mark.parametrize("lose", LOSE)
def test_an_interrupt_that_python_loses_comes_at_the_next_check(lose: Any) -> None:
    reached = []

    def start() -> None:
        with interrupts.interruptible():
            interrupts.check()
            lose()
            reached.append("lost")
            interrupts.check()
            reached.append("not stopped")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached == ["lost"]


@pytest.mark.parametrize("lose", LOSE)
def test_and_at_the_end_at_the_latest(lose: Any) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
        lose()


def fail() -> None:
    raise ConfigError("a consequence")


def test_what_it_turned_into_is_an_interrupt_all_the_same() -> None:
    def start() -> None:
        with interrupts.interruptible():
            lose_in_a_deletion()
            fail()

    with pytest.raises(KeyboardInterrupt):
        start()
    with pytest.raises(ConfigError), interrupts.interruptible():
        fail()


def test_one_that_is_not_lost_comes_at_once_and_the_hooks_are_put_back() -> None:
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
        signal.raise_signal(signal.SIGINT)
    assert sys.unraisablehook is hook
    interrupts.check()


def test_nested_ones_share_what_came() -> None:
    reached = []

    def start() -> None:
        with interrupts.interruptible():
            with interrupts.interruptible():
                lose_in_a_deletion()
            reached.append("not stopped")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert not reached


def test_a_handler_of_the_callers_is_left_alone() -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _: came.append(signum))
    with interrupts.interruptible():
        signal.raise_signal(signal.SIGINT)
        interrupts.check()
    assert came == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_changes_nothing() -> None:
    found = []

    def run() -> None:
        with interrupts.interruptible():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


# Loses one interrupt in the garbage collector as soon as it reads a path.
PROGRAM = """
import gc, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
import jspec

class Directory:
    def __fspath__(self):
        gc.callbacks.append(interrupt)
        gc.collect()
        return str(Path(jspec.__file__).parent / "bundled" / "target")

def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    signal.raise_signal(signal.SIGINT)

try:
    jspec.Engine(model_path=Directory(), compilation_cache_dir=sys.argv[1], max_running_requests=1)
    print("started")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_start_that_loses_its_interrupt_stops(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "interrupted\n"
    assert "Exception ignored" not in done.stderr
    assert not list(tmp_path.glob("steps/*"))  # no program was compiled after it


def test_an_interrupt_of_an_import_comes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a native module's initialisation it can crash the process."""
    source = "import signal\nsignal.raise_signal(signal.SIGINT)\nis_whole = True\n"
    (tmp_path / "interrupted_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
        importlib.import_module("interrupted_module")
    assert sys.modules.pop("interrupted_module").is_whole

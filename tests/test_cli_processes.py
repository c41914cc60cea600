"""The commands in processes of their own: output, interrupts, exit statuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from tests.support.one_stream import flags_of_one_stream

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="module")
def interruptible() -> None:
    """A shell's background jobs ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of_one_stream(tmp_path_factory.mktemp("pair"))


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a program that can be interrupted."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def read_until(stream: IO[str] | None, text: str) -> str:
    """Read lines up to one that contains `text`."""
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError("".join(seen))


def test_an_interrupt_while_the_commands_are_imported_is_one_line() -> None:
    code = """
import sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == "jspec.cli.bench":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from jspec.__main__ import run
run(["version"])
"""
    process = start("-c", code)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "jspec: interrupted\n")


@pytest.mark.slow
def test_run_server_says_each_stage_answers_and_stops(flags: list[str]) -> None:
    process = start("run_server.py", *flags, "--port", "0", "--enable-metrics")
    try:
        read_until(process.stderr, "--enable-metrics has no effect")
        read_until(process.stderr, "loading ")
        read_until(process.stderr, " 6/6: ")
        ready = read_until(process.stderr, "ready: ")
        found = re.search(r"ready: (http://127\.0\.0\.1:\d+) after \d+\.\d s", ready)
        assert found
        with httpx.Client(base_url=found[1], timeout=120, trust_env=False) as client:
            assert client.get("/health").status_code == 200
            body = {"text": "x", "sampling_params": {"max_new_tokens": 16000, "ignore_eos": True}}
            with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGINT)
                rest = [line for line in lines if line]
                process.send_signal(signal.SIGINT)
        assert '"type": "abort"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        errors = process.communicate(timeout=120)[1]
        assert errors.endswith("stopped\n")
        assert "Traceback" not in errors
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_is_said_before_anything_loads(flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("-m", "jspec.cli.main", "serve", *flags, "--port", port)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert f"cannot listen on host 127.0.0.1, port {port}" in errors
    assert "loading" not in errors


@pytest.mark.slow
def test_generate_reads_a_pipe_and_ctrl_c_ends_it_cleanly(flags: list[str]) -> None:
    words = ["-m", "jspec.cli.main", "generate", *flags]
    process = start(*words, "--max-new-tokens", "8", "--plain-marks", stdin=subprocess.PIPE)
    out, errors = process.communicate("def fib(\n", timeout=120)
    assert process.returncode == 0, errors
    assert out.startswith("def fib(")
    found = re.search(r"^\d+ tokens? in .* temperature 1, seed (\d+)$", errors, re.M)
    assert found, errors
    again = ("--max-new-tokens", "8", "--plain-marks", "--seed", found[1])
    assert start(*words, "def fib(", *again).communicate(timeout=120)[0] == out
    process = start(*words, "def fib(", "--max-new-tokens", "16000", "--seed", "2")
    try:
        assert process.stdout is not None
        assert process.stdout.read(8) == "def fib("
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "temperature 1, seed 2\n" in errors
        assert "interrupted" in errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_inside_exec_has_the_status_of_every_other(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "from jspec.cli import main as cli\n"
        "cli.run_generate = lambda words: exec('raise KeyboardInterrupt')\n"
        "cli.run(['generate'])\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (process.returncode, process.stderr) == (130, "jspec: interrupted\n")


COMPILING = """
import os, signal, threading
import jax
import jax.numpy as jnp
from jspec.cli import main as cli

def slow(x):
    for i in range(150):
        x = jnp.sort(x + i)
    return x

def compile(words):
    lowered = jax.jit(slow).lower(jnp.ones(64))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    lowered.compile()

cli.run_generate = compile
cli.run(["generate"])
"""


def test_an_interrupt_while_xla_compiles_ends_without_a_crash() -> None:
    """The compiler goes on in its own thread, which must not outlive jax."""
    process = start("-c", COMPILING)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, ""), errors
    assert "jspec: interrupted" in errors


@pytest.mark.slow_cases("words1")
@pytest.mark.parametrize(
    ("words", "moment"),
    [
        (["run_server.py", "--port", "0", "--trust-remote-code"], "--trust-remote-code has no"),
        (["run_server.py", "--port", "0"], "loading "),
        pytest.param(
            ["run_server.py", "--port", "0", "--engine-process"], "loading ", marks=pytest.mark.slow
        ),
    ],
)
def test_ctrl_c_ends_a_start_at_any_moment(flags: list[str], words: list[str], moment: str) -> None:
    process = start(*words, *flags)
    try:
        read_until(process.stderr, moment)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, out) == (130, "")
        assert errors.endswith("jspec: interrupted\n")
        assert "Traceback" not in errors
        assert "ready: " not in errors
    finally:
        process.kill()
        process.communicate()

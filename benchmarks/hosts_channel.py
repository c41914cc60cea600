"""Measure what the channel between two hosts adds to a step, without devices.

    python -m benchmarks.hosts_channel --output benchmarks/results/hosts_channel_cpu.json

A step starts on all hosts once the last runner process has its packed array. Measured is how much
later that is with a second host than with one: host 0 encodes the array, sends it over TCP to the
follower, whose process sends it over a pipe to its runner process; meanwhile host 0 sends it to
its own. CPU times are those of the thread that sends, on host 0, and of the follower's thread that
passes on. All are processes of this machine (loopback), so a network's own latency comes on top.
The runner processes only note when an array arrived, and answer what is read.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.environment import write_result
from jspec.config.hosts import HostPlace
from jspec.engine.hosts.follower import _Following
from jspec.engine.hosts.frames import FrameSocket, encoded, frame_of
from jspec.engine.process.child_process import EngineProcess
from jspec.engine.process.process_messages import Enqueue, Output, Read

MODULE = "benchmarks.hosts_channel"
SIZES = {"8 rows": 200, "256 rows": 1800}  # i32 of a packed decode
REALTIME = "JSPEC_CHANNEL_REALTIME"  # of the processes that are started
RESULT = np.zeros((8, 5), np.int32)


def take_turns_first() -> None:
    """Run before ordinary processes, so that a busy machine does not delay what is measured."""
    if os.environ.get(REALTIME):
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(10))


class Runner:
    """A runner process that notes when each array arrived."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.steps = Connection(here.detach())
        with there:
            words = [sys.executable, "-m", MODULE, "--runner", str(there.fileno())]
            self._process = subprocess.Popen(words, pass_fds=(there.fileno(),))
        self.send(Read(0))
        self.steps.recv()  # it runs

    def send(self, message: Enqueue | Read) -> None:
        self.steps.send(message)

    def arrivals(self) -> np.ndarray:
        self.steps.send(None)
        found = self.steps.recv()
        while isinstance(found, Output):
            found = self.steps.recv()
        self._process.wait()
        return np.array(found)


def run_runner(number: int) -> None:
    steps, arrived = Connection(number), []
    take_turns_first()
    while (message := steps.recv()) is not None:
        if isinstance(message, Enqueue):
            arrived.append(time.monotonic_ns())
        else:
            steps.send(Output(RESULT, None))
    steps.send(arrived)


def run_follower(port: int) -> None:
    channel = FrameSocket(socket.create_connection(("127.0.0.1", port)))
    place = HostPlace(count=2, rank=1, host="127.0.0.1", port=port, timeout=60)
    following = _Following(channel, cast(Any, None), place)
    runner = Runner()
    following._process = cast(EngineProcess, runner)
    channel.send("started")
    read_all = threading.Event()

    def drain() -> None:
        while not read_all.is_set():
            if runner.steps.poll(0.01):
                runner.steps.recv()

    draining = threading.Thread(target=drain)
    draining.start()
    take_turns_first()
    started = time.thread_time_ns()
    following.run()
    used = time.thread_time_ns() - started
    read_all.set()
    draining.join()
    arrivals = runner.arrivals()
    print(used // len(arrivals), *arrivals, flush=True)


def measure(size: int, *, num_steps: int, pause: float, has_follower: bool) -> dict[str, float]:
    """Return medians in microseconds from the start of a step's dispatch."""
    array = np.arange(size, dtype=np.int32)[None]
    own, channel, follower = Runner(), None, None
    if has_follower:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        words = [sys.executable, "-m", MODULE, "--follower", str(port)]
        follower = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        channel = FrameSocket(listening.accept()[0])
        listening.close()
        channel.receive()  # it has started
    begun, used = [], []
    take_turns_first()
    for number in range(num_steps):
        time.sleep(pause)
        begun.append(time.monotonic_ns())
        started = time.thread_time_ns()
        step = Enqueue(number, "decode=8", (array,), is_read=True)
        if channel is not None:
            channel.send_bytes(encoded(frame_of(step)))
        own.send(step)
        own.send(Read(number))
        used.append(time.thread_time_ns() - started)
        own.steps.recv()
    last = own.arrivals()
    found = {"host_0_cpu_us": np.array(used)}
    if channel is not None and follower is not None:
        channel.send("end")
        lines, _ = follower.communicate()
        of_follower, *theirs = map(int, lines.split())
        found["follower_cpu_us"] = np.full(num_steps, of_follower)
        channel.close()
        last = np.maximum(last, np.array(theirs))
    found["last_arrival_us"] = last - begun
    kept = num_steps // 5  # the first steps warm up
    return {name: round(float(np.median(x[kept:])) / 1e3, 1) for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=3.0, help="between two steps")
    parser.add_argument("--realtime", action="store_true", help="for a busy machine; as root")
    parser.add_argument("--output")
    parser.add_argument("--runner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--follower", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.runner is not None:
        run_runner(options.runner)
    elif options.follower is not None:
        run_follower(options.follower)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    if options.realtime:
        os.environ[REALTIME] = "1"
    points: dict[str, Any] = {}
    for name, size in SIZES.items():
        how: dict[str, Any] = {"num_steps": options.steps, "pause": options.pause_ms / 1e3}
        one, two = [], []
        for _ in range(options.repeats):  # alternating
            one.append(measure(size, has_follower=False, **how))
            two.append(measure(size, has_follower=True, **how))
        pairs = zip(one, two, strict=True)
        added = [round(b["last_arrival_us"] - a["last_arrival_us"], 1) for a, b in pairs]
        points[name] = {"one_host": one, "two_hosts": two, "added_us": sorted(added)}
        print(name, points[name], flush=True)
    if options.output is not None:
        load = round(os.getloadavg()[0], 1)
        write_result(Path(options.output), {"load_average": load, "points": points})


if __name__ == "__main__":
    main()

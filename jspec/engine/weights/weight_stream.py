"""Streams weights from files to devices, several at once, with bounded host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from jspec.device import hosts
from jspec.device.weights import Weight
from jspec.engine import interrupts
from jspec.models.files.stored import ParamRead
from jspec.models.params import ParamPath, ParamSpec
from jspec.models.placement import place_of

NUM_WORKERS = 4
MAX_BYTES = 2**30  # on the host, of all weights in progress
_ASK_SECONDS = 0.5  # interval of the check for Ctrl-C in a wait

# Returns once the weight is on its devices, or returns the host's own if that is wanted.
Put = Callable[[ParamSpec, Weight], Weight]


def put_on(mesh: Mesh, *, column_major: bool) -> Put:
    """Return a Put that places a weight by its declaration; each device gets only its shard.

    On a CPU the result may alias the host array, which is made read-only.
    """

    def put(spec: ParamSpec, value: Weight) -> Weight:
        for array in jax.tree.leaves(value):
            array.setflags(write=False)
        place = place_of(mesh, spec, column_major=column_major)
        return jax.block_until_ready(hosts.put(value, place))

    return put


def stream(
    reads: Sequence[ParamRead],
    put: Put,
    *,
    own: range | None = None,
    num_workers: int = NUM_WORKERS,
    max_bytes: int = MAX_BYTES,
) -> dict[ParamPath, Any]:
    """Read and put all weights, at most `num_workers` at once.

    own: the shards that this host reads (`device.hosts.own_shards`); None: all.
    max_bytes: bound of the summed `host_bytes` in progress; a larger weight runs alone. The first
    error or interrupt of a thread is raised, an error with a note naming the weight, and the arrays
    placed by then are deleted.
    """
    flow = _Flow(put, max_bytes, own)
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="jspec-weights")
    try:
        for each in reads:
            if not flow.admit(each):
                break
            pool.submit(flow.run, each)
        flow.wait_until_idle()
        if flow.error is not None:
            raise flow.error
        return flow.placed
    except BaseException:
        flow.stop()
        pool.shutdown(cancel_futures=True)
        for array in jax.tree.leaves(list(flow.placed.values())):
            if isinstance(array, jax.Array):
                array.delete()
        raise
    finally:
        pool.shutdown()


class _Flow:
    def __init__(self, put: Put, max_bytes: int, own: range | None) -> None:
        self.placed: dict[ParamPath, Any] = {}
        self.error: BaseException | None = None
        self._put = put
        self._max_bytes, self._own = max_bytes, own
        self._bytes = 0
        self._num_open = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def admit(self, each: ParamRead) -> bool:
        """Wait until `each` fits within the bound; False if something failed first."""
        self._wait(lambda: self._bytes == 0 or self._bytes + each.host_bytes <= self._max_bytes)
        with self._changed:
            if self._is_stopped:
                return False
            self._bytes += each.host_bytes
            self._num_open += 1
            return True

    def wait_until_idle(self) -> None:
        self._wait(lambda: self._num_open == 0)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def run(self, each: ParamRead) -> None:
        try:
            if not self._is_stopped:
                self._place(each)
        except BaseException as error:  # raised again in the caller's thread
            error.add_note(f"while loading the weight {'.'.join(map(str, each.spec.path))}")
            with self._changed:
                self.error = self.error or error
            self.stop()
        finally:
            with self._changed:
                self._bytes -= each.host_bytes
                self._num_open -= 1
                self._changed.notify_all()

    def _place(self, each: ParamRead) -> None:
        own, read_own = self._own, each.read_own
        value = each.read() if own is None or read_own is None else read_own(own)
        self.placed[each.spec.path] = self._put(each.spec, value)
        if each.tied is not None:
            self.placed[each.tied.path] = self._put(each.tied, each.tied_value(value))

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done` or stopped. Raises KeyboardInterrupt, also one that was lost."""
        with self._changed:
            while not (self._is_stopped or is_done()):
                self._changed.wait(_ASK_SECONDS)
                interrupts.check()

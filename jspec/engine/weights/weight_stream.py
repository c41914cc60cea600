"""Weights from files to their places on the devices: several at once, never the model on the host.

A few threads each read one weight, put it where it lives, wait until it is there, and drop the
host's copy. A weight starts only when what it holds on the host fits the bound beside those that
are under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from jspec.engine import interrupts
from jspec.models.files.stored import ParamRead
from jspec.models.files.tensor_files import HostArray
from jspec.models.params import ParamSpec, Path
from jspec.models.placement import place_of

NUM_WORKERS = 4
MAX_BYTES = 2**30  # on the host, of all weights under way
_ASK_SECONDS = 0.5  # how often a wait asks whether Ctrl-C came

# Returns when the array is on its devices; or the host's own, for whom wants it there.
Put = Callable[[ParamSpec, HostArray], Any]


def put_on(mesh: Mesh, *, by_columns: bool) -> Put:
    """Puts a weight where its declaration says; each device gets its own shard only.

    On a CPU the array may lie in the host array's very memory, so nobody writes that again.
    """

    def put(spec: ParamSpec, value: HostArray) -> jax.Array:
        value.setflags(write=False)
        place = place_of(mesh, spec, by_columns=by_columns)
        placed: jax.Array = jax.block_until_ready(jax.device_put(value, place))
        return placed

    return put


def stream(
    reads: Sequence[ParamRead],
    put: Put,
    *,
    num_workers: int = NUM_WORKERS,
    max_bytes: int = MAX_BYTES,
) -> dict[Path, Any]:
    """Reads and puts all weights. At most `num_workers` at once, and `max_bytes` (of `host_bytes`)
    on the host; a weight larger than that has the host to itself.

    The first error of a thread ends the rest and is raised, with a note that names the weight;
    so does an interrupt. What was placed by then is deleted from the devices.
    """
    flow = _Flow(put, max_bytes)
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
        for array in flow.placed.values():
            if isinstance(array, jax.Array):
                array.delete()
        raise
    finally:
        pool.shutdown()


class _Flow:
    """Which weights are under way, what they hold, and what became of them."""

    def __init__(self, put: Put, max_bytes: int) -> None:
        self.placed: dict[Path, Any] = {}
        self.error: BaseException | None = None
        self._put = put
        self._max_bytes = max_bytes
        self._held = 0
        self._num_open = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def admit(self, each: ParamRead) -> bool:
        """Waits until `each` fits beside what is under way; False if something failed first."""
        self._wait(lambda: self._held == 0 or self._held + each.host_bytes <= self._max_bytes)
        with self._changed:
            if self._is_stopped:
                return False
            self._held += each.host_bytes
            self._num_open += 1
            return True

    def wait_until_idle(self) -> None:
        """Until every admitted weight is placed, or something failed."""
        self._wait(lambda: self._num_open == 0)

    def stop(self) -> None:
        """Nothing more is begun."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def run(self, each: ParamRead) -> None:
        """A thread's part: reads and puts one weight, and the one that is its transpose."""
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
                self._held -= each.host_bytes
                self._num_open -= 1
                self._changed.notify_all()

    def _place(self, each: ParamRead) -> None:
        """Its host array lives no longer than this call."""
        value = each.read()
        self.placed[each.spec.path] = self._put(each.spec, value)
        if each.tied is not None:
            self.placed[each.tied.path] = self._put(each.tied, value.T)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Until `is_done` or stopped. Raises KeyboardInterrupt, also one that was lost."""
        with self._changed:
            while not (self._is_stopped or is_done()):
                self._changed.wait(_ASK_SECONDS)
                interrupts.check()

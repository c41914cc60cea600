"""Streams weights from files to devices, several at once, with bounded host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jspec.device import hosts
from jspec.device.parallel import Parallel, partition_spec
from jspec.device.weights import Weight
from jspec.engine import interrupts
from jspec.models.files.stored.param_reads import ParamRead
from jspec.models.files.tensor_files import HostArray, Shape
from jspec.models.params import ParamPath, ParamSpec
from jspec.models.placement import place_of

NUM_WORKERS = 4
MAX_BYTES = 2**30  # on the host, of all weights in progress
_ASK_SECONDS = 0.5  # interval of the check for Ctrl-C in a wait

# Returns once the weight is on its devices, or returns the host's array unchanged.
Put = Callable[[ParamSpec, Weight], Weight]
# Like Put, for a weight that is split along its first dimension and read part by part.
ReadPart = Callable[[range], Weight]
PutParts = Callable[[ParamSpec, ReadPart], Weight]


def put_on(mesh: Mesh, *, column_major: bool) -> Put:
    """Return a Put that places a weight by its declaration; each device gets only its shard. On a
    CPU the result may alias the host array, which is made read-only."""

    def put(spec: ParamSpec, value: Weight) -> Weight:
        for array in jax.tree.leaves(value):
            array.setflags(write=False)
        place = place_of(mesh, spec, column_major=column_major)
        return jax.block_until_ready(hosts.put(value, place))

    return put


def put_parts_on(mesh: Mesh) -> PutParts:
    """Return a PutParts that reads each part once, and frees it before reading the next."""
    shards = Parallel.of(mesh).model

    def put(spec: ParamSpec, read: ReadPart) -> Weight:
        place = place_of(mesh, spec, column_major=False)
        devices: dict[range, list[jax.Device]] = {}
        whole = NamedSharding(mesh, partition_spec(spec.axes))
        for device, index in _own_indices(whole, spec.physical_shape(shards)).items():
            devices.setdefault(range(*index[0].indices(spec.shape[0])), []).append(device)
        placed = [_put_part(read(part), place, spec, own) for part, own in devices.items()]
        return jax.tree.map(partial(_joined, spec), *placed, is_leaf=_is_part)

    return put


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a weight's array: its shape on the host, and its shards on its devices."""

    shape: Shape
    place: NamedSharding
    arrays: list[jax.Array]


def _is_part(value: Any) -> bool:
    return isinstance(value, _Part)


def _put_part(part: Weight, place: Any, spec: ParamSpec, devices: Sequence[jax.Device]) -> Any:
    """Return the weight with _Parts as its arrays, once they are on the devices. place: as of
    `place_of`."""

    def put(place: Any, leaf: HostArray) -> _Part:
        split: Any = place.sharding if isinstance(place, Format) else place
        where = _own_indices(split, (spec.shape[0], *leaf.shape[1:]))
        arrays = [
            jax.device_put(leaf[(slice(None), *where[x][1:])], _on(x, place)) for x in devices
        ]
        return _Part(leaf.shape, split, jax.block_until_ready(arrays))

    return jax.tree.map(lambda place, array: jax.tree.map(partial(put, place), array), place, part)


def _on(device: jax.Device, place: Any) -> Format | jax.Device:
    if isinstance(place, Format):
        return Format(place.layout, SingleDeviceSharding(device))
    return device


def _own_indices(place: NamedSharding, shape: Shape) -> dict[jax.Device, tuple[Any, ...]]:
    found = place.addressable_devices_indices_map(shape)
    return {device: index for device, index in found.items() if index is not None}


def _joined(spec: ParamSpec, *parts: _Part) -> jax.Array:
    arrays = [array for part in parts for array in part.arrays]
    shape = (spec.shape[0], *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, parts[0].place, arrays)


def stream(
    reads: Sequence[ParamRead],
    put: Put,
    *,
    put_parts: PutParts | None = None,  # for weights that can be read in parts; None: read whole
    own: range | None = None,  # shards that this host reads (`device.hosts.own_shards`); None: all
    num_workers: int = NUM_WORKERS,
    max_bytes: int = MAX_BYTES,  # of the summed `host_bytes` in progress; a larger one runs alone
) -> dict[ParamPath, Any]:
    """Read and put all weights, at most `num_workers` at once. After the first error (with a note
    naming the weight) or interrupt, which is raised, the arrays placed by then are deleted."""
    flow = _Flow(put, put_parts, max_bytes, own)
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
    def __init__(
        self, put: Put, put_parts: PutParts | None, max_bytes: int, own: range | None
    ) -> None:
        self.placed: dict[ParamPath, Any] = {}
        self.error: BaseException | None = None
        self._put, self._put_parts = put, put_parts
        self._max_bytes, self._own = max_bytes, own
        self._bytes = 0
        self._num_open = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def admit(self, each: ParamRead) -> bool:
        """Wait until `each` fits within the bound. Return False if something failed first."""
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
        if self._put_parts is not None and each.read_part is not None:
            self.placed[each.spec.path] = self._put_parts(each.spec, each.read_part)
            return
        own, read_own = self._own, each.read_own
        value = each.read() if own is None or read_own is None else read_own(own)
        self.placed[each.spec.path] = self._put(each.spec, value)
        if each.tied is not None:
            self.placed[each.tied.path] = self._put(each.tied, each.tied_value(value))

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done` or stopped. Raises KeyboardInterrupt, even one that was lost."""
        with self._changed:
            while not (self._is_stopped or is_done()):
                self._changed.wait(_ASK_SECONDS)
                interrupts.check()

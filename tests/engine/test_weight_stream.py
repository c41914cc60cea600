"""Weights streamed to the devices: bounded host memory, and all weights or none."""

from __future__ import annotations

import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import BUNDLED, load_models, resolve_paths
from jspec.engine.weights.weight_stream import put_on, stream
from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.checkpoint import load_model_spec, load_target, save_target
from jspec.models.files.stored.param_reads import ParamRead, param_reads
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import HostArray, open_tensors, write_checkpoint
from jspec.models.layer_params import dense_params, expert_params
from jspec.models.params import ParamSpec, ParamTable
from jspec.models.placement import place_of
from jspec.models.registry import table_of
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import Mixer, uniform_decoder
from tests.models.random_params import assert_same, random_params, value_at

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINTS = sorted(
    path.parent.relative_to(GOLDEN)
    for room in ("llama", "families")
    for path in (GOLDEN / room).glob("*/config.json")
)
KIB = 1024


def heads_of(mixer: Mixer) -> tuple[int, ...]:
    """Return the counts of heads that shards must divide."""
    if isinstance(mixer, DeltaNetSpec):
        return mixer.num_heads, mixer.num_key_heads
    return (mixer.num_heads,)


@pytest.mark.parametrize("shards", [1, 2, 4])  # 4 shards repeat the two kv heads of most of them
@pytest.mark.parametrize("name", CHECKPOINTS, ids=str)
def test_every_shard_holds_its_columns_of_the_host_form(name: Path, shards: int) -> None:
    spec = load_model_spec(GOLDEN / name)
    if any(each % shards for layer in spec.layers for each in heads_of(layer.attention)):
        with pytest.raises(ConfigError, match=f"tp_size is {shards}; expected a divisor of"):
            load_target(GOLDEN / name, spec, dtype=np.float32, shards=shards)
        return
    expected = load_target(GOLDEN / name, spec, dtype=np.float32, shards=shards)
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    put = put_on(mesh, column_major=False)
    found = load_target(
        GOLDEN / name,
        spec,
        dtype=np.float32,
        shards=shards,
        place=lambda reads: stream(reads, put),
    )
    assert_same(jax.tree.map(np.asarray, found), expected)
    for weight in table_of(spec):
        array, host = value_at(found, weight.path), value_at(expected, weight.path)
        at = place_of(mesh, weight, column_major=False)
        assert array.sharding == (at.sharding if isinstance(at, Format) else at)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])


def test_some_of_them_have_fewer_kv_heads_than_shards() -> None:
    specs = [load_model_spec(GOLDEN / name) for name in CHECKPOINTS]
    assert len(specs) >= 10
    mixers = [layer.attention for spec in specs for layer in spec.layers]
    assert min(own.num_kv_heads for own in mixers if isinstance(own, AttentionSpec)) < 4


def test_a_head_shares_the_placed_embedding_of_its_target() -> None:
    args = EngineArgs()
    mesh = Parallel(tensor=2).mesh(jax.devices("cpu")[:2])
    params = load_models(args, resolve_paths(args), mesh=mesh).params
    assert params["draft"]["embed"]["table"] is params["target"]["embed"]["table"]
    assert params["draft"]["draft_ids"].dtype == jnp.int32
    assert not params["draft"]["draft_ids"].sharding.is_fully_replicated


class Watched:
    """Reads and puts that count the bytes on the host and the weights in progress."""

    def __init__(self, before_put: Callable[[], Any] = lambda: None) -> None:
        self.held = self.most_held = self.open = self.most_open = 0
        self.alone: list[int] = []  # bytes on the host while a large weight was
        self.arrays: list[jax.Array] = []
        self._before_put = before_put
        self._lock = threading.Lock()

    def reads(self, sizes: list[int]) -> list[ParamRead]:
        return [
            ParamRead(
                spec=ParamSpec(path=("w", i), shape=(size,)),
                host_bytes=size,
                read=lambda size=size: self._read(size),
            )
            for i, size in enumerate(sizes)
        ]

    def _read(self, size: int) -> HostArray:
        with self._lock:
            self.held += size
            self.open += 1
            self.most_held = max(self.most_held, self.held)
            self.most_open = max(self.most_open, self.open)
        return np.zeros(size, np.int8)

    def put(self, spec: ParamSpec, _: HostArray) -> jax.Array:
        self._before_put()
        time.sleep(0.001)
        with self._lock:
            if spec.shape[0] > 10 * KIB:
                self.alone.append(self.held - spec.shape[0])
            self.held -= spec.shape[0]
            self.open -= 1
            self.arrays.append(jnp.zeros(1, jnp.int8))
            return self.arrays[-1]


def test_bytes_under_way_stay_below_the_bound() -> None:
    watched = Watched()
    sizes = [KIB, 3 * KIB, 2 * KIB, KIB, 4 * KIB, 11 * KIB, KIB, 2 * KIB] * 10
    placed = stream(watched.reads(sizes), watched.put, num_workers=4, max_bytes=5 * KIB)
    assert set(placed) == {("w", i) for i in range(len(sizes))}
    assert watched.alone == [0] * 10  # larger than the bound: by itself
    assert watched.most_held == 11 * KIB
    watched = Watched()
    small = [size for size in sizes if size < 11 * KIB]
    stream(watched.reads(small), watched.put, num_workers=4, max_bytes=5 * KIB)
    assert watched.most_held <= 5 * KIB


@pytest.mark.parametrize("num_workers", [2, 3])
def test_several_are_under_way_at_once(num_workers: int) -> None:
    """Each waits for the others before it is put: one after the other would never end."""
    together = threading.Barrier(num_workers, timeout=60)
    watched = Watched(before_put=together.wait)
    reads = watched.reads([KIB] * (4 * num_workers))
    stream(reads, watched.put, num_workers=num_workers, max_bytes=100 * KIB)
    assert watched.most_open == num_workers


SPEC = uniform_decoder(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=512,
    eos_token_ids=(1,),
)


def traced_peak(run: Callable[[], Any]) -> int:
    """Return the most bytes that Python and numpy allocated while `run` ran."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_host_holds_a_few_weights_of_a_model_many_times_as_large(tmp_path: Path) -> None:
    save_target(tmp_path, SPEC, random_params(table_of(SPEC)), dtype=np.float32)
    bound = 10 * 2**20

    def put(*_: Any) -> jax.Array:
        return jnp.zeros(1)  # like another device: no host memory stays

    def place(reads: Any) -> Any:
        assert max(each.host_bytes for each in reads) < bound / 2
        return stream(reads, put, max_bytes=bound)

    peak = traced_peak(lambda: load_target(tmp_path, SPEC, dtype=np.float32, place=place))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert peak < bound + 2**20 < size / 3


def tables() -> dict[str, ParamTable]:
    moe = expert_params(MoESpec(num_experts=8, top_k=2, inner=256), size=512)
    return {"dense": dense_params(SPEC.one_layer.ffn, size=2048), "experts": moe}


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_read_holds_no_more_than_it_says(name: str, stored: Any, tmp_path: Path) -> None:
    table = tables()[name]
    write_checkpoint(tmp_path, {}, stored_tensors(table, random_params(table), dtype=stored))
    with open_tensors(tmp_path) as tensors:
        for each in param_reads(tensors, table, dtype=np.float32, shards=2):
            assert traced_peak(each.read) <= each.host_bytes + 64 * KIB
            weight = 4 * int(np.prod(each.spec.shape))
            assert weight < each.host_bytes <= weight + 2 * 2**20  # no second copy


class Recorded:
    """A put on one device that records its arguments."""

    def __init__(self, fail: Callable[[ParamSpec], Any] = bool) -> None:
        self.arrays: list[jax.Array] = []
        self._fail = fail
        self._put = put_on(Parallel().mesh(jax.devices("cpu")[:1]), column_major=False)

    def __call__(self, spec: ParamSpec, value: HostArray) -> jax.Array:
        self._fail(spec)
        self.arrays.append(self._put(spec, value))
        return self.arrays[-1]


def test_a_tensor_that_cannot_be_read_ends_the_load_and_leaves_nothing(tmp_path: Path) -> None:
    """The file is truncated after its header was read."""
    save_target(tmp_path, SPEC, random_params(table_of(SPEC)), dtype=np.float32)
    file = tmp_path / "model.safetensors"
    put = Recorded()

    def place(reads: Any) -> Any:
        os.truncate(file, file.stat().st_size // 2)
        return stream(reads, put, num_workers=1)  # so that some come before it

    message = r"model\.safetensors: cannot read model\.\S+: the file ends at byte \d+; expected"
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(tmp_path, SPEC, dtype=np.float32, place=place)
    assert caught.value.__notes__[0].startswith("while loading the weight ")
    assert 0 < len(put.arrays) < len(table_of(SPEC))
    assert all(array.is_deleted() for array in put.arrays)


def test_a_device_that_takes_no_more_is_named_with_the_weight() -> None:
    def fail(spec: ParamSpec) -> None:
        if spec.path == ("w", 20):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    put = Recorded(fail)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        stream(Watched().reads([KIB] * 100), put)
    assert caught.value.__notes__ == ["while loading the weight w.20"]
    assert 0 < len(put.arrays) < 100
    assert all(array.is_deleted() for array in put.arrays)


def test_an_interrupt_ends_the_load() -> None:
    put = Recorded(
        lambda spec: signal.raise_signal(signal.SIGINT) if spec.path[1] == 9 else time.sleep(0.01)
    )
    # Where a shell runs tests in the background, SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream(Watched().reads([KIB] * 1000), put, num_workers=2, max_bytes=4 * KIB)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < len(put.arrays) < 500
    assert all(array.is_deleted() for array in put.arrays)


def test_a_placed_weight_is_not_written_again() -> None:
    """A CPU device may share the host array's memory."""
    mesh = Parallel().mesh(jax.devices("cpu")[:1])
    value = np.ones((64, 64), np.float32)
    spec = ParamSpec(path=("w",), shape=(64, 64))
    placed = put_on(mesh, column_major=False)(spec, value)
    with pytest.raises(ValueError, match="read-only"):
        value[0, 0] = 2
    np.testing.assert_array_equal(placed, np.ones((64, 64)))


def test_the_bundled_target_is_read_into_both_forms_alike() -> None:
    spec = load_model_spec(BUNDLED / "target")
    expected = load_target(BUNDLED / "target", spec, dtype=ml_dtypes.bfloat16)
    put = put_on(Parallel().mesh(jax.devices("cpu")[:1]), column_major=True)
    found = load_target(
        BUNDLED / "target",
        spec,
        dtype=ml_dtypes.bfloat16,
        place=lambda reads: stream(reads, put),
    )
    assert_same(jax.tree.map(np.asarray, found), expected)

"""Experts of an MoE in fp8: when they stay packed, their numbers, and their updates."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.config.engine_args import EngineArgs
from jspec.device.fp8 import FP8Weight
from jspec.device.parallel import Parallel
from jspec.device.weights import abstract_weight, dense
from jspec.engine.memory.memory_report import held_bytes
from jspec.engine.weights.checkpoint_info import describe
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.messages.weight_update import ArrayUpdate, DiskUpdate
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.hopper import has_mosaic_gpu
from jspec.spec.layers.feed_forward import Gate
from jspec.spec.weight_format import FP8, Dense, Op, num_bytes
from tests.engine.test_served_weights import Params, load, same, serving
from tests.models.dense_forward import dense_forward
from tests.models.fp8_checkpoints import (
    fuse_experts,
    moe_spec,
    per_block,
    per_row,
    values_of,
    write_fp8,
    write_plain,
)

SPEC = moe_spec()
TOKENS = np.arange(40) * 7 % 320
EXPERTS = ".experts."
LAYOUTS = ("blocks", "compressed channel", "fused blocks", "fused channel")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "target", SPEC)


def write(plain: Path, path: Path, layout: str) -> Path:
    """Write the experts alone in fp8; return a directory with them as float32."""
    stored = {"fused blocks": "blocks", "fused channel": "compressed channel"}.get(layout, layout)
    numbers = write_fp8(plain, path, stored, only=EXPERTS)
    if layout.startswith("fused"):
        fuse_experts(path)
    return numbers


def loaded(path: Path, **arguments: Any) -> LoadedModels:
    return load(model_path=str(path), skip_tokenizer_init=True, **arguments)


def on_mesh(path: Path, parallel: Parallel) -> LoadedModels:
    args = EngineArgs(
        model_path=str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        tp_size=parallel.model,
        ep_size=parallel.expert,
    )
    mesh = parallel.mesh(jax.devices("cpu")[: parallel.model])
    return load_models(args, resolve_paths(args), mesh=mesh)


def experts_of(params: Any) -> list[Any]:
    layers = params["target"]["layers"].values()
    return [layer["moe"]["experts"][name] for layer in layers for name in ("gate_up", "down")]


def logits(models: LoadedModels) -> np.ndarray:
    params = jax.device_get(models.params["target"])
    return np.asarray(dense_forward(models.target.spec, params, TOKENS, aux_layer_ids=())[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_stored_form_stays_packed_and_gives_its_numbers(
    layout: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = loaded(write(plain, tmp_path / "packed", layout))
    with caplog.at_level(logging.INFO, "jspec"):
        models = loaded(tmp_path / "packed")
    assert "experts: fp8, kept packed (2 weights)" in caplog.text
    assert "unpacked" not in caplog.text
    format = FP8(has_blocks="blocks" in layout)
    pairs = zip(experts_of(models.params), experts_of(exact.params), strict=True)
    for weight, numbers in pairs:
        assert isinstance(weight, FP8Weight)
        assert weight.codes.format.layout.major_to_minor == (0, 2, 1)
        assert sum(x.nbytes for x in jax.tree.leaves(weight)) == num_bytes(format, weight.shape)
        np.testing.assert_array_equal(dense(weight, jnp.float32), numbers)
    np.testing.assert_array_equal(logits(models), logits(exact))
    same(loaded(tmp_path / "packed", quantization="none").params, exact.params)


def test_random_weights_and_info_have_the_bytes_of_the_packed_ones(
    plain: Path, tmp_path: Path
) -> None:
    write_fp8(plain, tmp_path / "packed", "blocks")
    models, dummy = (loaded(tmp_path / "packed", load_format=x) for x in ("auto", "dummy"))
    assert dummy.target == models.target
    shapes = [(x.shape, x.dtype, x.format) for x in jax.tree.leaves(models.params)]
    assert [(x.shape, x.dtype, x.format) for x in jax.tree.leaves(dummy.params)] == shapes
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(dummy.params))
    whole = sum(num_bytes(s.format_in("float32"), s.shape) for s in models.target.table)
    assert held_bytes(models.params, shares=())["the target's weights"] == whole
    assert describe(tmp_path / "packed", dtype="float32").weight_bytes == whole


@pytest.mark.parametrize(
    ("inner", "mesh"),
    [
        (384, Parallel(tensor=2)),
        (384, Parallel(expert=2)),
        (512, Parallel(expert=2, tensor=2)),
    ],
    ids=["cut", "whole experts", "whole blocks"],
)
def test_whole_experts_and_whole_blocks_stay_packed_on_a_mesh(
    inner: int, mesh: Parallel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """384 inner columns are three blocks: one and a half per shard of two."""
    path = tmp_path / "packed"
    numbers = write(write_plain(tmp_path / "plain", moe_spec(inner=inner)), path, "blocks")
    is_cut = inner % (mesh.tensor * 128) > 0
    with caplog.at_level(logging.INFO, "jspec"):
        models = on_mesh(path, mesh)
    cut = "experts: fp8, unpacked to float32: a block of 128 x 128 would be cut between parts or s"
    assert (cut in caplog.text) is is_cut
    found = [isinstance(weight, FP8Weight) for weight in experts_of(models.params)]
    assert found == [not is_cut] * 2
    exact = on_mesh(numbers, mesh)
    for weight, expected in zip(experts_of(models.params), experts_of(exact.params), strict=True):
        np.testing.assert_array_equal(dense(weight, jnp.float32), expected)
        for shard in jax.tree.leaves(weight)[0].addressable_shards:
            assert shard.data.shape[0] == 4 // mesh.expert


def serving_on(models: LoadedModels, mesh: Parallel) -> tuple[ServedWeights, Params]:
    runner = Params(models.params)
    devices = jax.devices("cpu")[: mesh.model]
    return ServedWeights(models, runner, mesh=mesh.mesh(devices)), runner


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("blocks", Parallel()),
        ("blocks", Parallel(expert=2)),
        ("fused channel", Parallel(expert=2)),
    ],
    ids=["blocks", "blocks, split", "fused channel, split"],
)
def test_an_update_of_one_expert_quantizes_it_and_no_other(
    layout: str, mesh: Parallel, plain: Path, tmp_path: Path
) -> None:
    numbers = write(plain, tmp_path / "packed", layout)
    weights, runner = serving_on(on_mesh(tmp_path / "packed", mesh), mesh)
    before = load_file(numbers / "model.safetensors")
    for name in (name for name in before if EXPERTS in name):
        np.testing.assert_array_equal(weights.tensor(name, None), before[name], strict=True)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    change = np.random.default_rng(0).standard_normal(before[name].shape).astype(np.float32)
    weights.switch(weights.prepare(ArrayUpdate(arrays={name: change})))
    changed = values_of(*(per_block if "blocks" in layout else per_row)(change))
    np.testing.assert_allclose(weights.tensor(name, None), changed, rtol=1e-6, atol=1e-9)
    for each in before.keys() - {name}:
        np.testing.assert_array_equal(weights.tensor(each, None), before[each])
    assert all(isinstance(weight, FP8Weight) for weight in experts_of(runner.params))


@pytest.mark.parametrize("has_room", [True, False], ids=["beside", "in_place"])
def test_an_update_from_disk_keeps_the_format(has_room: bool, plain: Path, tmp_path: Path) -> None:
    """Files in the served form are read packed, others are quantized expert by expert."""
    other = write_plain(tmp_path / "plain", SPEC, seed=1)
    write(plain, tmp_path / "served", "compressed channel")
    write(other, tmp_path / "packed", "compressed channel")
    weights, runner = serving(loaded(tmp_path / "served"), has_room=lambda _: has_room)
    weights.switch(weights.prepare(DiskUpdate(target=str(tmp_path / "packed"))))
    expected = loaded(tmp_path / "packed").params
    same(runner.params, expected)
    weights.switch(weights.prepare(DiskUpdate(target=str(other))))
    for found, wanted in zip(experts_of(runner.params), experts_of(expected), strict=True):
        np.testing.assert_allclose(found.scales, wanted.scales, rtol=1e-6)
        codes = np.asarray(found.codes) != np.asarray(wanted.codes)
        assert codes.mean() < 1e-3  # a scale may differ in its last bit


def test_the_flag_leaves_experts_of_a_plain_checkpoint_as_they_are(plain: Path) -> None:
    models = loaded(plain, quantization="fp8")
    assert not any(isinstance(weight, FP8Weight) for weight in experts_of(models.params))
    assert any(isinstance(s.format, FP8) and s.op is Op.LINEAR for s in models.target.table)


def test_experts_stored_in_several_forms_are_unpacked(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_fp8(plain, tmp_path / "packed", "blocks", only="experts.0.")
    with caplog.at_level(logging.INFO, "jspec"):
        models = loaded(tmp_path / "packed")
    assert re.search("experts: fp8, unpacked to float32: its parts are stored in", caplog.text)
    assert not any(isinstance(weight, FP8Weight) for weight in experts_of(models.params))


@pytest.mark.law  # so it runs in CI, whose newest jax keeps the barrier
@pytest.mark.skipif(not has_mosaic_gpu(), reason="XLA of jax 0.10 ignores the barrier on a CPU")
def test_a_step_unpacks_one_layer_at_a_time() -> None:
    """Temporaries of six layers are less than a second layer's unpacked weights above two's."""
    X, E, inner = 8, 256, 256
    shapes = {"gate_up": (X, E, 2 * inner), "down": (X, inner, E)}
    layer = {name: abstract_weight(FP8(), shape) for name, shape in shapes.items()}

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, layers: Any) -> jax.Array:
        for each in layers:
            x = x + OPS["xla"].experts(x, ids, weights, each, gate=Gate.SILU)
        return x

    x, ids, weights = (
        jax.ShapeDtypeStruct((8, width), dtype)
        for width, dtype in ((E, jnp.float32), (2, jnp.int32), (2, jnp.float32))
    )
    few, many = (
        jax.jit(run).lower(x, ids, weights, [layer] * n).compile().memory_analysis() for n in (2, 6)
    )
    unpacked = sum(num_bytes(Dense("float32"), shape) for shape in shapes.values())
    assert few.temp_size_in_bytes > unpacked / 2
    assert many.temp_size_in_bytes - few.temp_size_in_bytes < unpacked / 2

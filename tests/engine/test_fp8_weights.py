"""Weights in fp8 and int8 in a model: which stay packed, their results, and their updates."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.device.fp8 import FP8Weight
from jspec.device.int8 import INT8Weight
from jspec.device.weights import W8A8Weight, dense
from jspec.engine.memory.memory_report import held_bytes
from jspec.engine.weights.checkpoint_info import describe
from jspec.engine.weights.loading import LoadedModels
from jspec.errors import CheckpointError, ConfigError
from jspec.messages.weight_update import ArrayUpdate, DiskUpdate
from jspec.models.files.stored.tensors import value_at
from jspec.spec.layers.attention import HeadGate
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.weight_format import Op, num_bytes
from tests.models.dense_forward import dense_forward
from tests.models.fp8_checkpoints import (
    LAYOUTS,
    per_block,
    per_row,
    values_of,
    wide_spec,
    write_fp8,
    write_plain,
)
from tests.speculative.mtp_checkpoints import CONFIGS, write_checkpoint
from tests.support.tiny_models import write_tiny_pair

from .test_served_weights import load, same, serving

SPEC = wide_spec()
TOKENS = np.arange(40) * 7 % 320


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "target", SPEC)


@pytest.fixture(scope="module")
def blocks(plain: Path) -> Path:
    write_fp8(plain, plain.with_name("blocks"), "blocks")
    return plain.with_name("blocks")


@pytest.fixture(scope="module")
def int8(plain: Path) -> Path:
    write_fp8(plain, plain.with_name("int8"), "int8")
    return plain.with_name("int8")


def loaded(path: Path, *, shards: int = 1, **arguments: Any) -> LoadedModels:
    return load(shards, model_path=str(path), skip_tokenizer_init=True, **arguments)


def packed_in(models: LoadedModels) -> dict[tuple[str | int, ...], W8A8Weight]:
    target = models.params["target"]
    each = {spec.path: value_at(target, spec.path) for spec in models.target.table}
    return {path: weight for path, weight in each.items() if isinstance(weight, W8A8Weight)}


def logits(models: LoadedModels) -> np.ndarray:
    params = jax.device_get(models.params["target"])
    return np.asarray(dense_forward(models.target.spec, params, TOKENS, aux_layer_ids=())[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_stays_packed(
    layout: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = write_fp8(plain, tmp_path / "packed", layout)
    with caplog.at_level(logging.INFO, "jspec"):
        models = loaded(tmp_path / "packed")
    kind = "int8" if layout == "int8" else "fp8"
    assert f"linear: {kind}, kept packed ({3 * 2} weights)" in caplog.text
    assert f"gated: {kind}, kept packed ({2} weights)" in caplog.text
    assert ("input_scale) are ignored" in caplog.text) is ("modelopt" in layout)
    assert "unpacked" not in caplog.text
    exact = loaded(numbers)
    found = packed_in(models)
    assert len(found) == 4 * 2
    for path, weight in found.items():
        assert (weight.block is not None) is ("block" in layout)
        assert isinstance(weight, FP8Weight) is (kind == "fp8")
        assert weight.codes.format.layout.major_to_minor == (1, 0)
        expected = value_at(exact.params["target"], path)
        np.testing.assert_array_equal(dense(weight, jnp.float32), expected)
    if layout in ("blocks", "fbgemm", "int8"):
        said, wanted = logits(models), logits(exact)
        assert 1e-4 < np.abs(said - wanted).max() < 0.15 * np.abs(wanted).max()
        same(loaded(tmp_path / "packed", quantization="none").params, exact.params)


@pytest.mark.parametrize("layout", ["blocks", "int8"])
def test_random_weights_and_info_have_the_bytes_of_the_packed_ones(
    layout: str, plain: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    write_fp8(plain, packed, layout)
    models, dummy = loaded(packed), loaded(packed, load_format="dummy")
    assert dummy.target == models.target
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(models.params)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(dummy.params)] == shapes
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(dummy.params))
    whole = sum(num_bytes(s.format_in("float32"), s.shape) for s in models.target.table)
    assert held_bytes(models.params, shares=())["the target's weights"] == whole
    assert describe(packed, dtype="float32").weight_bytes == whole


@pytest.mark.parametrize("shards", [1, 2])
def test_by_name_are_the_numbers_also_of_weights_whose_blocks_the_shards_would_cut(
    shards: int, blocks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """384 inner columns are three blocks: one and a half per shard."""
    with caplog.at_level(logging.INFO, "jspec"):
        models = loaded(blocks, shards=shards)
    cut = "fp8, unpacked to float32: a block of 128 x 128 would be cut between parts or shards"
    assert (f"gated: {cut} (2 weights)" in caplog.text) is (shards == 2)
    assert len(packed_in(models)) == (8 if shards == 1 else 4)
    weights, _ = serving(models)
    for name, value in load_file(numbers_beside(blocks)).items():
        np.testing.assert_array_equal(weights.tensor(name, None), value, strict=True)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_delta_net_s_fused_projections_stay_packed(shards: int, tmp_path: Path) -> None:
    """Parts of each key head, of whole blocks; the steps' product is never packed."""
    delta_net = DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=128, value_dim=128)
    attention = replace(SPEC.one_layer.softmax_attention, gate=HeadGate.OF_NUMBERS, qk_norm=True)
    layers = (replace(SPEC.layers[0], attention=own) for own in (delta_net, attention))
    wide = replace(wide_spec(inner=512), layers=tuple(layers), family="qwen3_next")
    write_fp8(write_plain(tmp_path / "plain", wide), tmp_path / "packed", "blocks")
    models = loaded(tmp_path / "packed", shards=shards)
    found = {(path[1], path[3]) for path in packed_in(models) if path[2] == "attention"}
    assert found == {(layer, name) for layer in (0, 1) for name in ("qkv", "gate", "out")}
    weights, _ = serving(models)
    for name, value in load_file(numbers_beside(tmp_path / "packed")).items():
        np.testing.assert_array_equal(weights.tensor(name, None), value, strict=True)


def numbers_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}_numbers") / "model.safetensors"


@pytest.mark.parametrize(("flag", "largest"), [("fp8", 448), ("w8a8_int8", 127)])
def test_the_flag_quantizes_each_channel_of_a_plain_checkpoint(
    flag: str, largest: int, plain: Path
) -> None:
    models, exact = loaded(plain, quantization=flag), loaded(plain)
    found = packed_in(models)
    assert len(found) == 4 * 2
    for path, weight in found.items():
        numbers = np.asarray(value_at(exact.params["target"], path))
        np.testing.assert_allclose(
            weight.scales, np.abs(numbers).max(axis=0) / np.float32(largest), rtol=1e-6
        )
        error = np.abs(np.asarray(dense(weight, jnp.float32)) - numbers)
        of_code = np.abs(numbers) / 16 + np.asarray(weight.scales) * 2.0**-10
        assert (error <= (of_code if flag == "fp8" else np.asarray(weight.scales) * 0.5001)).all()
    assert isinstance(models.params["target"]["lm_head"]["kernel"], jax.Array)


@pytest.mark.parametrize(
    ("path", "method", "message"),
    [
        (
            "plain",
            "modelopt",
            "quantization is 'modelopt', but .* is not quantized; expected 'fp8' or 'w8a8",
        ),
        ("blocks", "w8a8_int8", "is 'w8a8_int8', but .* by 'fp8'; expected that"),
        ("int8", "fp8", "is 'fp8', but .* by 'compressed-tensors'; expected that"),
        ("blocks", "fbgemm_fp8", "quantization is 'fbgemm_fp8', but .* by 'fp8'; expected that"),
        ("blocks", "awq", "quantization is 'awq'; expected one of fp8, w8a8_int8, none"),
    ],
)
def test_a_method_that_is_not_the_checkpoint_s_is_refused(
    path: str, method: str, message: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(request.getfixturevalue(path), quantization=method)


@pytest.mark.parametrize("has_room", [True, False], ids=["beside", "in_place"])
@pytest.mark.parametrize(("served", "flag"), [("blocks", "fp8"), ("int8", "w8a8_int8")])
def test_an_update_from_disk_keeps_the_format(
    has_room: bool,
    served: str,
    flag: str,
    plain: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    other = write_plain(tmp_path / "plain", SPEC, seed=1)
    write_fp8(other, tmp_path / "packed", served)
    before = loaded(request.getfixturevalue(served))
    weights, runner = serving(before, has_room=lambda _: has_room)
    weights.switch(weights.prepare(DiskUpdate(target=str(tmp_path / "packed"))))
    same(runner.params, loaded(tmp_path / "packed").params)
    weights, runner = serving(loaded(plain, quantization=flag), has_room=lambda _: has_room)
    weights.switch(weights.prepare(DiskUpdate(target=str(other))))
    same(runner.params, loaded(other, quantization=flag).params)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("layout", ["blocks", "compressed tensor", "int8"])
def test_an_update_of_a_part_quantizes_it_and_no_other(
    layout: str, shards: int, plain: Path, tmp_path: Path
) -> None:
    write_fp8(plain, tmp_path / "packed", layout)
    weights, runner = serving(loaded(tmp_path / "packed", shards=shards))
    name = "model.layers.0.self_attn.k_proj.weight"
    before = load_file(numbers_beside(tmp_path / "packed"))
    change = np.random.default_rng(0).standard_normal(before[name].shape).astype(np.float32)
    weights.switch(weights.prepare(ArrayUpdate(arrays={name: change})))
    assert isinstance(
        runner.params["target"]["layers"][0]["attention"]["qkv"]["kernel"], W8A8Weight
    )
    if layout == "int8":
        changed, step = change, np.abs(change).max(axis=1, keepdims=True) / 127
        assert (np.abs(np.asarray(weights.tensor(name, None)) - changed) <= 0.5001 * step).all()
    else:
        changed = values_of(*(per_block if layout == "blocks" else per_row)(change))
        np.testing.assert_allclose(weights.tensor(name, None), changed, rtol=1e-6, atol=1e-9)
    for each in before.keys() - {name}:
        np.testing.assert_array_equal(weights.tensor(each, None), before[each])
    with pytest.raises(CheckpointError, match="values that are not finite"):
        weights.prepare(ArrayUpdate(arrays={name: np.full_like(change, np.nan)}))


@pytest.mark.parametrize(("flag", "kind"), [("fp8", FP8Weight), ("w8a8_int8", INT8Weight)])
def test_a_draft_is_quantized_by_a_flag_of_its_own(flag: str, kind: type, tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path)
    models = load(
        model_path=str(pair.target_path),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(pair.draft_path),
        speculative_draft_model_quantization=flag,
    )
    kernels = {spec.path for spec in models.drafter.table if spec.op in (Op.LINEAR, Op.GATED)}
    found = {path for path in kernels if isinstance(value_at(models.params["draft"], path), kind)}
    assert found == kernels
    assert not packed_in(models)
    weights, runner = serving(models)
    weights.switch(weights.prepare(DiskUpdate(draft=str(pair.draft_path))))
    same(runner.params["draft"], models.params["draft"])


def test_layers_for_multi_token_prediction_stay_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path / "plain", CONFIGS["mimo_v2"])
    write_fp8(tmp_path / "plain", tmp_path / "packed", "fbgemm")
    with caplog.at_level(logging.INFO, "jspec"):
        models = loaded(tmp_path / "packed", speculative_algorithm="NEXTN", speculative_num_steps=2)
    assert "experts: fp8, kept packed (4 weights)" in caplog.text
    specs = [spec for spec in models.drafter.table if spec.op in (Op.LINEAR, Op.GATED)]
    found = [value_at(models.params["draft"], spec.path) for spec in specs]
    assert [type(weight) for weight in found] == [FP8Weight] * len(specs)
    assert packed_in(models)

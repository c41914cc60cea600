"""Weights in fp8: each form of scales, against transformers, a formula and unpacked files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jspec.engine.weights.checkpoint_info import describe
from jspec.errors import CheckpointError, ConfigError, JspecError
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.files.convert import Format, convert
from jspec.models.files.tensor_files import HostArray
from jspec.models.files.tensor_files import open_tensors as open_stored
from jspec.models.files.w8a8 import declared_forms, open_tensors
from tests.models.dense_forward import dense_forward
from tests.models.random_params import assert_same
from tests.models.test_families import GOLDEN, assert_equals_transformers, attend_of, loaded
from tests.speculative.mtp_checkpoints import CONFIGS, load, write_checkpoint
from tests.support.golden_arrays import arrays_of

E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = 448.0
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def expanded(scales: HostArray, shape: tuple[int, ...], block: tuple[int, int]) -> HostArray:
    """Return a scale for each number of a weight [.., O, I]."""
    for axis, size in zip((-2, -1), block, strict=True):
        scales = np.repeat(scales, size, axis=axis)
    return np.asarray(scales[..., : shape[-2], : shape[-1]])


def in_blocks(weight: HostArray, block: tuple[int, int]) -> tuple[HostArray, HostArray]:
    """Return (fp8 [.., O, I], scales), one scale a block."""
    length, width = weight.shape[-2:]
    counts = tuple(-(-size // of) for size, of in zip((length, width), block, strict=True))
    scales = np.zeros((*weight.shape[:-2], *counts), np.float32)
    for i in range(counts[0]):
        for j in range(counts[1]):
            rows, columns = (
                slice(at * of, (at + 1) * of) for at, of in zip((i, j), block, strict=True)
            )
            scales[..., i, j] = np.abs(weight[..., rows, columns]).max(axis=(-2, -1)) / LARGEST
    scales = np.maximum(scales, np.float32(1e-6))
    return (weight / expanded(scales, weight.shape, block)).astype(E4M3), scales


def to_fp8(path: Path, block: tuple[int, int], *, is_packed: Callable[[str], bool]) -> None:
    """Rewrite the checkpoint with its products in fp8."""
    file = path / "model.safetensors"
    tensors: dict[str, HostArray] = {}
    for name, value in load_file(file).items():
        tensors[name] = value
        if is_packed(name) and value.ndim > 1:
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(value, block)
    save_file(tensors, file)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = FP8_CONFIG | {"weight_block_size": list(block)}
    (path / "config.json").write_text(json.dumps(config))


def unpack(path: Path, block: tuple[int, int]) -> None:
    """Rewrite the checkpoint in float32, by the formula."""
    file = path / "model.safetensors"
    with open_stored(path) as opened:
        stored = {name: opened.read(name) for name in opened.sources}
    tensors = {name: value for name, value in stored.items() if not name.endswith("_scale_inv")}
    for name, value in tensors.items():
        if value.dtype == E4M3:
            scales = expanded(stored[f"{name}_scale_inv"], value.shape, block)
            tensors[name] = value.astype(np.float32) * scales
    save_file(tensors, file)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("variant", ["qwen3_moe_fp8", "mistral_fp8"])
def test_the_forward_equals_transformers(variant: str) -> None:
    """DeepSeek's blocks, experts and all, and compressed-tensors' rows."""
    spec, params = loaded(variant)
    outputs = dense_forward(
        spec,
        params,
        arrays_of(GOLDEN / variant / "outputs.npz")["token_ids"],
        aux_layer_ids=tuple(range(spec.num_layers)),
        attend_of=attend_of,
    )
    assert_equals_transformers(variant, *outputs)
    plain = arrays_of(GOLDEN / variant.removesuffix("_fp8") / "outputs.npz")["logits"]
    assert np.abs(np.asarray(outputs[0]) - plain).max() > 1e-3  # it is another model


def write_one(path: Path, tensors: dict[str, HostArray], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    quantization = {"quantization_config": FP8_CONFIG | config}
    (path / "config.json").write_text(json.dumps(quantization))
    return path


FORMS = ("blocks", "rows", "rows, flat", "all")


def scales_of(
    form: str, shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return (shape of the scales, rows and columns that share one) of a weight [.., O, I]."""
    *stack, length, width = shape
    counts = tuple(-(-size // of) for size, of in zip((length, width), block, strict=True))
    return {
        "blocks": ((*stack, *counts), block),
        "rows": ((*stack, length, 1), (1, width)),
        "rows, flat": ((*stack, length), (1, width)),
        "all": ((*stack, 1), (length, width)),
    }[form]


@given(data=st.data())
def test_a_weight_is_its_codes_times_their_scales(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    length, width = data.draw(st.integers(2, 40)), data.draw(st.integers(2, 40))
    stack = data.draw(st.sampled_from([(), (3,)]))
    block = data.draw(st.sampled_from([(8, 8), (16, 4), (128, 128)]))
    form = data.draw(st.sampled_from(FORMS))
    dtype = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (*stack, length, width)
    codes = rng.standard_normal(shape).astype(E4M3)
    scale_shape, own = scales_of(form, shape, block)
    scales = rng.uniform(0.5, 2.0, scale_shape).astype(dtype)
    end = "_scale_inv" if form == "blocks" else "_scale"
    path = write_one(
        tmp_path_factory.mktemp("one"),
        {"x.weight": codes, f"x.weight{end}": scales, "x.input_scale": np.ones(1, np.float32)},
        weight_block_size=list(block),
    )
    of_matrix = scale_shape if form in ("blocks", "rows") else (*scale_shape, 1)
    square = scales.astype(np.float32).reshape(of_matrix)
    expected = codes.astype(np.float32) * expanded(square, shape, own)
    with open_tensors(path) as tensors:
        assert set(tensors.sources) == {"x.weight"}
        assert (tensors.shape("x.weight"), tensors.dtype("x.weight")) == (shape, "F32")
        np.testing.assert_array_equal(tensors.weight("x.weight"), expected, strict=True)
        flat = expected.reshape(-1, width)
        first = data.draw(st.integers(0, len(flat) - 1))
        for at, rows_read in tensors.row_blocks("x.weight", range(first, len(flat))):
            np.testing.assert_array_equal(rows_read, flat[at : at + len(rows_read)])


def test_a_block_may_be_larger_than_the_weight(tmp_path: Path) -> None:
    """An array of the block's size could not be allocated."""
    codes = np.ones((3, 5), E4M3)
    config = {"weight_block_size": [2, 10**15]}
    write_one(tmp_path, {"x": codes, "x_scale_inv": np.full((2, 1), 0.5, np.float32)}, **config)
    with open_tensors(tmp_path) as tensors:
        np.testing.assert_array_equal(tensors.weight("x"), np.full((3, 5), 0.5, np.float32))


def test_every_code_is_the_number_that_ml_dtypes_makes_of_it(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).view(E4M3).reshape(2, 128)
    write_one(tmp_path, {"x": codes, "x_scale": np.full(1, 0.25, np.float32)})
    with open_tensors(tmp_path) as tensors:
        np.testing.assert_array_equal(tensors.weight("x"), codes.astype(np.float32) / 4)


@pytest.mark.slow_cases("mimo_v2]", "step3p5]")
@pytest.mark.parametrize("family", ["mimo_v2", "step3p5", "deepseek_v32", "qwen3_next", "qwen3_5"])
def test_a_target_and_its_own_layers_are_those_of_the_unpacked_file(
    family: str, tmp_path: Path
) -> None:
    """With MTP layers; attention's `o_proj` stays unpacked, as in the published files, and so do an
    indexer's weights of heads.
    """
    block, unpacked = (8, 8), ("o_proj", "weights_proj")

    def is_packed(name: str) -> bool:
        is_product = any(part in name for part in ("proj", "indexer.wq_b", "indexer.wk"))
        return is_product and not any(part in name for part in unpacked)

    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_checkpoint(packed, CONFIGS[family])
    to_fp8(packed, block, is_packed=is_packed)
    shutil.copytree(packed, plain)
    unpack(plain, block)
    assert load_model_spec(packed) == load_model_spec(plain)
    for shards in (1, 2):
        found, expected = (load(path, shards=shards).params for path in (packed, plain))
        assert_same(found, expected)


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    spec = load_model_spec(GOLDEN / "qwen3_moe_fp8")
    exact = load_target(GOLDEN / "qwen3_moe_fp8", spec, dtype=np.float32)
    shutil.copytree(GOLDEN / "qwen3_moe_fp8", tmp_path / "plain")
    unpack(tmp_path / "plain", (8, 8))
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    rounded = load_target(GOLDEN / "qwen3_moe_fp8", spec, dtype=bfloat16)
    assert_same(rounded, load_target(tmp_path / "plain", spec, dtype=bfloat16))
    assert_same(exact, load_target(tmp_path / "plain", spec, dtype=np.float32))


def test_the_log_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    path = GOLDEN / "qwen3_moe_fp8"
    with caplog.at_level("INFO", "jspec"):
        load_target(path, load_model_spec(path), dtype=np.float32)
    assert re.search(r"weights in fp8 of .* GiB are unpacked to float32 and take", caplog.text)


def test_converting_keeps_fp8(tmp_path: Path) -> None:
    source = GOLDEN / "qwen3_moe_fp8"
    convert(source, tmp_path / "out", Format.ORBAX)
    spec = load_model_spec(source)
    found = load_target(tmp_path / "out", spec, dtype=np.float32)
    assert_same(found, load_target(source, spec, dtype=np.float32))
    stored = describe(tmp_path / "out").stored_bytes
    assert stored == describe(source).stored_bytes
    assert stored["F8_E4M3"] > 0


def some_codes(*shape: int) -> HostArray:
    return np.ones(shape, E4M3)


def scale(value: float, *shape: int) -> HostArray:
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": some_codes(4, 4)}, "x has dtype F8_E4M3 but no scales; expected x_scale_inv or x_"),
        (
            {"x": some_codes(4, 4), "x_scale": scale(1, 3)},
            r"x_scale has shape \(3,\); expected \(1, 1\), one per block of 128 x 128, \(4, 1\)",
        ),
        ({"x": some_codes(4), "x_scale": scale(1, 1)}, r"x has .* shape \(4,\); expected a matrix"),
        ({"x": some_codes(4, 4), "x_scale": scale(np.nan, 1)}, "x_scale has a scale of nan; exp"),
        ({"x": some_codes(4, 4), "x_scale": scale(-1, 1)}, "a scale of -1.0; expected finite"),
        ({"x": some_codes(4, 4), "x_scale": np.ones(1, np.int8)}, "x_scale has dtype I8"),
    ],
)
def test_scales_that_do_not_fit(
    tensors: dict[str, HostArray], message: str, tmp_path: Path
) -> None:
    write_one(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message), open_tensors(tmp_path) as opened:
        opened.weight("x")


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quant_method 'gptq'; expected 'fp8' or",
        ),
        (FP8_CONFIG | {"fmt": "e5m2"}, "fmt is 'e5m2'; expected 'e4m3'"),
        (FP8_CONFIG | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; expected two"),
        (
            FP8_CONFIG | {"weight_block_size": [0, 1]},
            r"weight_block_size is \[0, 1\]; expected p",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "format is 'pack-quantized'; expected 'float-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": WEIGHTS | {"num_bits": 4}}},
            },
            "num_bits is 4; expected 8",
        ),
    ],
)
def test_other_quantizations_are_refused(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = json.loads((GOLDEN / "mistral" / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JspecError, match=message) as caught:
        load_model_spec(tmp_path)
    assert isinstance(caught.value, ConfigError | CheckpointError)
    assert str(tmp_path) in str(caught.value)


def test_a_list_of_what_is_not_quantized_has_modules_globs_and_patterns(tmp_path: Path) -> None:
    names = ["model.layers.0.mlp*", "*.router", "re:.*k_proj", "model.layers.3.self_attn"]
    config = {"quant_method": "modelopt_fp8", "quant_algo": "FP8", "exclude_modules": names}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    form_of = declared_forms(tmp_path)
    dense = ("0.mlp.up_proj", "7.mlp.router", "2.self_attn.k_proj", "3.self_attn.o_proj")
    for module in (*dense, "10.mlp.up_proj", "7.mlp.router.up"):
        assert (form_of(f"model.layers.{module}.weight") is None) == (module in dense), module

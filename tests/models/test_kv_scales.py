"""FP8 caches in checkpoints: their scheme, their scales, and their use in serving."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError
from jspec.messages.weight_update import DiskUpdate, Model
from jspec.models.files.kv_scales import cached_dtype
from jspec.spec.cache_entry import FP8, CacheLayout
from jspec.spec.cache_groups import cache_bytes
from tests.engine.test_served_weights import serving
from tests.support.tiny_models import TinyPair, write_tiny_pair

SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
}
FORMS: dict[str, Callable[[str], str]] = {
    "compressed-tensors": "self_attn.{}_scale".format,
    "vLLM": "self_attn.attn.{}_scale".format,
    "ModelOpt": lambda which: f"self_attn.{which}_proj.{which}_scale",
    "compressed-tensors, older": "self_attn.{}_proj.output_scale".format,
}


def with_config(path: Path, **quantization: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = COMPRESSED | quantization
    (path / "config.json").write_text(json.dumps(config))


def with_scales(
    pair: TinyPair, form: str, *, first: float = 0.5, shape: tuple[int, ...] = ()
) -> None:
    """Write scales: none for layer 1, first / (i + 1) for layer i, and twice that for V."""
    file = pair.target_path / "model.safetensors"
    tensors = load_file(file)
    for i in (0, 2):
        for which, factor in (("k", 1), ("v", 2)):
            value = np.full(shape, factor * first / (i + 1), np.float32)
            tensors[f"model.layers.{i}.{FORMS[form](which)}"] = value
    save_file(tensors, file)


def load(pair: TinyPair, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        **{
            "model_path": str(pair.target_path),
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(pair.draft_path),
            "dtype": "float32",
            **arguments,
        }
    )
    mesh = Parallel(tensor=1).mesh(jax.devices("cpu")[:1])
    return load_models(args, resolve_paths(args), mesh=mesh)


def scales_of(params: Any) -> list[tuple[float, float]]:
    attentions = [params["layers"][i]["attention"] for i in sorted(params["layers"])]
    return [(float(each["k_scale"][0]), float(each["v_scale"][0])) for each in attentions]


WANTED = [(0.5, 1.0), (1.0, 1.0), (0.5 / 3, 1.0 / 3)]


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, num_layers=3)
    with_scales(pair, form, shape=() if form == "ModelOpt" else (1,))
    with_config(pair.target_path, **SCHEME)
    models = load(pair)
    assert models.config.kv_cache_dtype == "fp8_e4m3"
    np.testing.assert_allclose(scales_of(models.params["target"]), WANTED)
    assert scales_of(models.params["draft"]) == [(1.0, 1.0)]
    groups = models.target.cache_groups + models.drafter.cache_groups
    plain = load(pair, kv_cache_dtype="bfloat16")
    layout = CacheLayout(page_size=16, dtype="float32")
    both = plain.target.cache_groups + plain.drafter.cache_groups
    assert 2 * cache_bytes(groups, layout) == cache_bytes(both, layout)
    assert "k_scale" not in plain.params["target"]["layers"][0]["attention"]


def test_the_flag_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = write_tiny_pair(tmp_path, num_layers=3)
    with caplog.at_level(logging.INFO):
        assert load(pair).config.kv_cache_dtype == "float32"
        assert load(pair, kv_cache_dtype="fp8_e4m3").config.kv_cache_dtype == "fp8_e4m3"
    assert "FP8" not in caplog.text  # XLA has no kernels that could miss
    assert scales_of(load(pair, kv_cache_dtype="fp8_e4m3").params["target"]) == [(1.0, 1.0)] * 3


def test_an_update_brings_its_own_scales(tmp_path: Path) -> None:
    ours, theirs, bare = (
        write_tiny_pair(tmp_path / name, num_layers=3) for name in ("a", "b", "c")
    )
    with_scales(ours, "compressed-tensors")
    with_scales(theirs, "ModelOpt", first=0.25)
    weights, runner = serving(load(ours, kv_cache_dtype="fp8_e4m3"))
    name = "model.layers.2.self_attn.v_scale"
    for pair, factor in ((theirs, 0.5), (ours, 1.0)):
        weights.switch(weights.prepare(DiskUpdate(target=str(pair.target_path))))
        found = scales_of(runner.params["target"])
        np.testing.assert_allclose(found[2], factor * np.asarray(WANTED[2]))
        np.testing.assert_allclose(weights.tensor(name, Model.TARGET), [found[2][1]])
    weights.switch(weights.prepare(DiskUpdate(target=str(bare.target_path))))
    assert scales_of(runner.params["target"]) == [(1.0, 1.0)] * 3


@pytest.mark.parametrize(
    ("value", "shape", "message"),
    [
        (0.0, (1,), r"[kv]_scale is 0.0; expected a finite number above 0"),
        (np.nan, (), r"[kv]_scale is nan; expected a finite number above 0"),
        (0.5, (2,), r"[kv]_scale has shape \(2,\); expected \(1,\)"),
    ],
)
def test_scales_that_do_not_fit(
    value: float, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    pair = write_tiny_pair(tmp_path, num_layers=3)
    with_scales(pair, "compressed-tensors", first=value, shape=shape)
    # Layers are read side by side, so either scale may be the first that is found.
    with pytest.raises(CheckpointError, match=message):
        load(pair, kv_cache_dtype="fp8_e4m3")
    load(pair)  # not read


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({}, None),
        (SCHEME, FP8),
        ({"kv_cache_quant_algo": "FP8"}, FP8),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme is .*'int'"),
        ({"kv_cache_scheme": {**SCHEME["kv_cache_scheme"], "dynamic": True}}, "'dynamic': True"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'; expected FP8"),
    ],
)
def test_schemes(quantization: dict[str, Any], found: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert cached_dtype("bfloat16", tmp_path) == "bfloat16"
    assert cached_dtype("fp8_e4m3", tmp_path) == FP8
    if found not in (None, FP8):
        with pytest.raises(ConfigError, match=found):
            cached_dtype("auto", tmp_path)
        return
    assert cached_dtype("auto", tmp_path) == found
    of_modelopt = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(of_modelopt))
    assert cached_dtype("auto", tmp_path) == FP8


def test_other_values_of_the_flag_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8_e5m2'; expected .*fp8_e4m3"):
        EngineArgs(kv_cache_dtype="fp8_e5m2")
    assert jnp.dtype(FP8).itemsize == 1

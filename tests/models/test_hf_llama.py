"""Llama checkpoints: arithmetic against transformers, and reading and writing files."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError
from jspec.models.files.checkpoint import load_model_spec, load_target, save_target
from jspec.models.registry import table_of
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.spec.rope import RopeConfig
from tests.models.dense_forward import dense_forward
from tests.models.random_params import assert_same, random_params
from tests.support.golden_arrays import arrays_of

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"
VARIANTS = ["plain", "llama3_tied", "bias", "mistral"]
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope": RopeConfig(theta=500000.0, factor=8.0, original_max_position=32),
    "max_position": 64,
    "eos_token_ids": (3, 4),
}
TINY = uniform_decoder(**SIZES)


def decoder(**changes: Any) -> ModelSpec:
    return uniform_decoder(**(SIZES | changes))


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def rewrite(path: Path, **changes: Any) -> None:
    """Replace, add or (None) remove tensors of a written checkpoint."""
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_aux_hidden_equal_transformers(variant: str) -> None:
    config = load_model_spec(GOLDEN / variant)
    params = load_target(GOLDEN / variant, config, dtype=np.float32)
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
    ids = tuple(range(config.num_layers))
    logits, hidden, aux = dense_forward(config, params, golden["token_ids"], aux_layer_ids=ids)
    assert_close(logits, golden["logits"])
    # transformers' hidden_states[i] is the input of layer i; its last one is after the final norm
    assert_close(hidden, golden["hidden_states"][-1])
    for i, captured in zip(ids, jnp.split(aux, len(ids), axis=-1), strict=True):
        assert_close(captured, golden["hidden_states"][i])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_save_then_load_is_exact(dtype: Any, tied: bool, bias: bool, tmp_path: Path) -> None:
    config = decoder(tie_word_embeddings=tied, attention_bias=bias)
    params = random_params(table_of(config), dtype=dtype)
    save_target(tmp_path, config, params, dtype=dtype)
    assert load_model_spec(tmp_path) == config
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert_same(load_target(tmp_path, config, dtype=dtype), params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_load_then_save_keeps_every_tensor(variant: str, tmp_path: Path) -> None:
    config = load_model_spec(GOLDEN / variant)
    save_target(
        tmp_path, config, load_target(GOLDEN / variant, config, dtype=np.float32), dtype=np.float32
    )
    expected: dict[str, Any] = {}
    for file in (GOLDEN / variant).glob("*.safetensors"):
        expected |= load_file(file)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_tied_lm_head_is_a_view_of_the_table(tmp_path: Path) -> None:
    config = decoder(tie_word_embeddings=True)
    save_target(tmp_path, config, random_params(table_of(config)), dtype=np.float32)
    params = load_target(tmp_path, config, dtype=np.float32)
    assert np.shares_memory(params["lm_head"]["kernel"], params["embed"]["table"])


def test_a_load_holds_one_model_and_a_few_tensors(tmp_path: Path) -> None:
    config = decoder(num_layers=24, hidden_size=64, intermediate_size=256)
    save_target(tmp_path, config, random_params(table_of(config)), dtype=np.float32)
    tracemalloc.start()
    try:
        params = load_target(tmp_path, config, dtype=np.float32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    assert peak < sum(sizes) + 4 * max(sizes)
    assert 8 * max(sizes) < sum(sizes)  # so that a second copy could not hide in the allowance


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"no tensor model\.norm\.weight.*\(16,\)"),
        (
            {"lm_head.weight": np.zeros((40, 16), ml_dtypes.float8_e4m3fn)},
            r"lm_head\.weight has dtype F8_E4M3 but no scales; expected lm_head",
        ),
        (
            {"model.layers.0.self_attn.o_proj.bias": np.ones(16, np.float32)},
            r"unknown tensor model\.layers\.0\.self_attn\.o_proj\.bias",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_target(tmp_path, TINY, random_params(table_of(TINY)), dtype=np.float32)
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path, TINY, dtype=np.float32)


def test_stored_rope_tables_are_ignored(tmp_path: Path) -> None:
    params = random_params(table_of(TINY))
    save_target(tmp_path, TINY, params, dtype=np.float32)
    rewrite(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    assert_same(load_target(tmp_path, TINY, dtype=np.float32), params)


@pytest.mark.parametrize("part", ["self_attn.o_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_a_bias_is_read_and_added(part: str, tmp_path: Path) -> None:
    config = decoder(attention_bias=True)
    layer = replace(config.one_layer, ffn=DenseSpec(inner=24, bias=True))
    config = replace(config, layers=(layer,) * 2)
    params = random_params(table_of(config))
    save_target(tmp_path, config, params, dtype=np.float32)
    assert load_model_spec(tmp_path) == config
    assert_same(load_target(tmp_path, config, dtype=np.float32), params)
    logits = dense_forward(config, params, [3, 4, 5], aux_layer_ids=())[0]
    name = f"model.layers.1.{part}.bias"
    stored = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, **{name: stored[name] + np.arange(len(stored[name]), dtype=np.float32) / 9})
    changed = load_target(tmp_path, config, dtype=np.float32)
    found = dense_forward(config, changed, [3, 4, 5], aux_layer_ids=())[0]
    assert not np.allclose(found, logits, atol=1e-2)
    rewrite(tmp_path, **{name: None})
    if part == "self_attn.o_proj":  # some files have none there
        bias = load_target(tmp_path, config, dtype=np.float32)["layers"][1]["attention"]["out"]
        np.testing.assert_array_equal(bias["bias"], np.zeros(16))
        return
    with pytest.raises(CheckpointError, match=rf"no tensor model\.layers\.1\.{part}\.bias"):
        load_target(tmp_path, config, dtype=np.float32)


def test_a_tied_checkpoint_with_another_lm_head_is_refused(tmp_path: Path) -> None:
    config = decoder(tie_word_embeddings=True)
    params = random_params(table_of(config))
    save_target(tmp_path, config, params, dtype=np.float32)
    rewrite(tmp_path, **{"lm_head.weight": np.asarray(params["embed"]["table"])})
    assert_same(load_target(tmp_path, config, dtype=np.float32), params)
    rewrite(tmp_path, **{"lm_head.weight": np.zeros((40, 16), np.float32)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_target(tmp_path, config, dtype=np.float32)


def test_saving_refuses_what_the_file_could_not_hold(tmp_path: Path) -> None:
    params = random_params(table_of(TINY))
    with pytest.raises(CheckpointError, match=r"lm_head\.kernel differs from the embedding table"):
        save_target(tmp_path, decoder(tie_word_embeddings=True), params, dtype=np.float32)
    save_target(tmp_path, TINY, params, dtype=np.float32)
    sharded = load_target(tmp_path, TINY, dtype=np.float32, shards=4)
    with pytest.raises(CheckpointError, match="only unsharded params can be saved"):
        save_target(tmp_path, TINY, sharded, dtype=np.float32)

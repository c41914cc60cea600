"""Llama checkpoints: the arithmetic against transformers, and files there and back."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jspec.core.config import RopeConfig, TransformerConfig
from jspec.core.config_io import load_transformer_config
from jspec.core.errors import CheckpointError, ConfigError
from jspec.layers.attention import causal_attention
from jspec.layers.linear import Shard, logits_of
from jspec.models.hf_llama import load_llama, save_llama
from jspec.models.llama import Llama, LlamaLayer, Params, bind, split, trunk

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"
VARIANTS = ["plain", "llama3_tied", "bias", "mistral"]
TINY = TransformerConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(theta=500000.0, factor=8.0, original_max_position=32),
    max_position=64,
    eos_token_ids=(3, 4),
)


def random_params(config: TransformerConfig, *, dtype: Any = np.float32) -> Params:
    """Numbers in the tree that jspec's own module has, norms away from 1, biases from 0."""
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params: Params = jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) / 4).astype(leaf.dtype), split(abstract)[1]
    )
    if config.tie_word_embeddings:
        params["lm_head"]["kernel"] = params["embed"]["table"].T
    return params


def assert_same(found: Params, expected: Params) -> None:
    same = jax.tree.structure(found) == jax.tree.structure(expected)  # type: ignore[operator]
    assert same
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), found, expected)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def rewrite(path: Path, **changes: Any) -> None:
    """Replaces, adds or (None) removes tensors of a written checkpoint."""
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors")


def dense_forward(
    config: TransformerConfig, params: Params, token_ids: Any, *, aux_layer_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits[T, V], normed hidden[T, E], aux_hidden[T, A]) by dense causal attention."""
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    definition, _ = split(abstract)

    @jax.jit
    def run(params: Params, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        model = bind(definition, params)
        positions = jnp.arange(ids.shape[1])[None]
        layers = [
            partial(layer, positions=positions, attend=causal_attention) for layer in model.layers
        ]
        stream, aux = trunk(layers, model.embed(ids), aux_layer_ids=aux_layer_ids)
        hidden = model.norm(stream.sum())
        return logits_of(hidden, model.lm_head.kernel[...]), hidden, aux

    with jax.default_matmul_precision("highest"):
        logits, hidden, aux = run(params, jnp.asarray(token_ids)[None])
    return logits[0], hidden[0], aux[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_aux_hidden_equal_transformers(variant: str) -> None:
    config = load_transformer_config(GOLDEN / variant)
    params = load_llama(GOLDEN / variant, config, dtype=np.float32)
    golden = np.load(GOLDEN / variant / "outputs.npz")
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
    config = replace(TINY, tie_word_embeddings=tied, attention_bias=bias)
    params = random_params(config, dtype=dtype)
    save_llama(tmp_path, config, params, dtype=dtype)
    assert load_transformer_config(tmp_path) == config
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert_same(load_llama(tmp_path, config, dtype=dtype), params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_load_then_save_keeps_every_tensor(variant: str, tmp_path: Path) -> None:
    config = load_transformer_config(GOLDEN / variant)
    save_llama(
        tmp_path, config, load_llama(GOLDEN / variant, config, dtype=np.float32), dtype=np.float32
    )
    expected: dict[str, Any] = {}
    for file in (GOLDEN / variant).glob("*.safetensors"):
        expected |= load_file(file)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_float32_checkpoint_loads_as_rounded_bfloat16(tmp_path: Path) -> None:
    params = random_params(TINY)
    save_llama(tmp_path, TINY, params, dtype=np.float32)
    rounded = jax.tree.map(lambda a: np.asarray(a).astype(ml_dtypes.bfloat16), params)
    assert_same(load_llama(tmp_path, TINY, dtype=ml_dtypes.bfloat16), rounded)


def test_tied_lm_head_is_a_view_of_the_table(tmp_path: Path) -> None:
    config = replace(TINY, tie_word_embeddings=True)
    save_llama(tmp_path, config, random_params(config), dtype=np.float32)
    params = load_llama(tmp_path, config, dtype=np.float32)
    assert np.shares_memory(params["lm_head"]["kernel"], params["embed"]["table"])


@pytest.mark.parametrize("shards", [2, 4])  # 4 shards: 2 kv heads, each on two shards
def test_shards_add_up_to_the_whole_layer(shards: int, tmp_path: Path) -> None:
    save_llama(tmp_path, TINY, random_params(TINY), dtype=np.float32)
    whole = load_llama(tmp_path, TINY, dtype=np.float32)["layers"][0]
    fused = load_llama(tmp_path, TINY, dtype=np.float32, shards=shards)["layers"][0]
    x = jax.random.normal(jax.random.key(1), (1, 5, TINY.hidden_size))
    positions = jnp.arange(5)[None]

    def halves(params: Params, size: int) -> tuple[jax.Array, jax.Array]:
        abstract = nnx.eval_shape(
            lambda: LlamaLayer(TINY, shard=Shard(size), dtype=jnp.float32, rngs=nnx.Rngs(0))
        )
        layer = bind(split(abstract)[0], params)
        return layer.attention(x, positions, causal_attention), layer.mlp(x)

    def part(kernel: Any, index: int, axis: int) -> Any:
        return np.split(kernel, shards, axis=axis)[index]

    def one_shard(index: int) -> Params:
        attention, mlp = fused["attention"], fused["mlp"]
        sharded: Params = {
            "attention": {
                "qkv": {"kernel": part(attention["qkv"]["kernel"], index, 1)},
                "out": {"kernel": part(attention["out"]["kernel"], index, 0)},
            },
            "mlp": {
                "gate_up": {"kernel": part(mlp["gate_up"]["kernel"], index, 1)},
                "down": {"kernel": part(mlp["down"]["kernel"], index, 0)},
            },
        }
        merged: Params = fused | sharded
        return merged

    parts = [halves(one_shard(i), shards) for i in range(shards)]
    for j, expected in enumerate(halves(whole, 1)):
        found = sum(np.asarray(outs[j]) for outs in parts)
        assert_close(found, expected)


@pytest.mark.parametrize(("shards", "named"), [(3, "4 heads"), (8, "4 heads")])
def test_shards_that_do_not_divide_are_refused(shards: int, named: str, tmp_path: Path) -> None:
    save_llama(tmp_path, TINY, random_params(TINY), dtype=np.float32)
    with pytest.raises(ConfigError, match=f"tensor parallel size is {shards}.*{named}"):
        load_llama(tmp_path, TINY, dtype=np.float32, shards=shards)


def test_a_load_holds_one_model_and_a_few_tensors(tmp_path: Path) -> None:
    config = replace(TINY, num_layers=24, hidden_size=64, intermediate_size=256)
    save_llama(tmp_path, config, random_params(config), dtype=np.float32)
    tracemalloc.start()
    try:
        params = load_llama(tmp_path, config, dtype=np.float32)
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
            {"model.layers.1.mlp.up_proj.weight": np.zeros((24, 15), np.float32)},
            r"model\.layers\.1\.mlp\.up_proj\.weight has shape \(24, 15\); expected \(24, 16\)",
        ),
        (
            {"model.layers.2.mlp.up_proj.weight": np.zeros((24, 16), np.float32)},
            r"unknown tensor model\.layers\.2\.mlp\.up_proj\.weight of shape \(24, 16\)",
        ),
        (
            {"lm_head.weight": np.zeros((40, 16), np.int8)},
            r"lm_head\.weight has dtype I8; expected one of F16, BF16, F32, F64",
        ),
        (
            {"lm_head.weight": np.zeros((40, 16), ml_dtypes.float8_e4m3fn)},
            r"lm_head\.weight has dtype F8_E4M3; expected one of",
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
    save_llama(tmp_path, TINY, random_params(TINY), dtype=np.float32)
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_llama(tmp_path, TINY, dtype=np.float32)


def test_stored_rope_tables_are_ignored(tmp_path: Path) -> None:
    params = random_params(TINY)
    save_llama(tmp_path, TINY, params, dtype=np.float32)
    rewrite(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    assert_same(load_llama(tmp_path, TINY, dtype=np.float32), params)


def test_an_output_bias_other_than_zero_is_refused(tmp_path: Path) -> None:
    config = replace(TINY, attention_bias=True)
    save_llama(tmp_path, config, random_params(config), dtype=np.float32)
    rewrite(tmp_path, **{"model.layers.1.self_attn.o_proj.bias": np.ones(16, np.float32)})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.bias is not zero"):
        load_llama(tmp_path, config, dtype=np.float32)


def test_a_tied_checkpoint_with_another_lm_head_is_refused(tmp_path: Path) -> None:
    config = replace(TINY, tie_word_embeddings=True)
    params = random_params(config)
    save_llama(tmp_path, config, params, dtype=np.float32)
    rewrite(tmp_path, **{"lm_head.weight": np.asarray(params["embed"]["table"])})
    assert_same(load_llama(tmp_path, config, dtype=np.float32), params)
    rewrite(tmp_path, **{"lm_head.weight": np.zeros((40, 16), np.float32)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_llama(tmp_path, config, dtype=np.float32)


def test_saving_refuses_what_the_file_could_not_hold(tmp_path: Path) -> None:
    params = random_params(TINY)
    with pytest.raises(CheckpointError, match="lm_head's kernel differs"):
        save_llama(tmp_path, replace(TINY, tie_word_embeddings=True), params, dtype=np.float32)
    save_llama(tmp_path, TINY, params, dtype=np.float32)
    sharded = load_llama(tmp_path, TINY, dtype=np.float32, shards=4)
    with pytest.raises(CheckpointError, match="only unsharded params can be saved"):
        save_llama(tmp_path, TINY, sharded, dtype=np.float32)

"""Every family beside Llama: config.json as it is published, and the arithmetic of transformers.

tests/golden/make_families_golden.py wrote the checkpoints; 24 tokens, windows of 8.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.core.config import RopeConfig
from jspec.core.errors import CheckpointError, ConfigError
from jspec.core.model_spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    Routing,
    cache_groups,
)
from jspec.engine.runner import empty_pools
from jspec.layers.attention import Attend
from jspec.models.checkpoint import load_model_spec, load_target, save_target
from jspec.models.decoder import Decoder, Params
from jspec.models.registry import FAMILIES, family_named
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.choose import OPS
from jspec.pallas_kernels.kv_write.rotation import Rotation, rotate_and_split
from tests.golden_arrays import arrays_of
from tests.models.dense_forward import dense_forward
from tests.models.random_params import assert_same

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
VARIANTS = [
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_fused",
    "qwen3_moe_mixed",
    "mistral",
    "gpt_oss",
    "step3p5",
    "glm4_moe",
]
SLOW, LATER = pytest.mark.slow, ("step3p5", "glm4_moe")
PAGE, FIRST_CHUNK, QUERIES = 4, 12, 4


@cache
def loaded(variant: str) -> tuple[ModelSpec, Params]:
    """The spec, and the params on the device."""
    spec = load_model_spec(GOLDEN / variant)
    params = load_target(GOLDEN / variant, spec, dtype=np.float32)
    return spec, jax.tree.map(jnp.asarray, params)


def attend_of(spec: AttentionSpec) -> Attend:
    """Dense causal attention of one layer: its window a mask, its sinks one more column."""

    def attend(heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
        assert (sinks is not None) == spec.sinks
        q, k, v = rotate_and_split(heads, rotation)
        length = q.shape[1]
        after = np.arange(length)[:, None] - np.arange(length)[None, :]
        visible = (after >= 0) & (after < (spec.window or length))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * spec.head_dim**-0.5
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate((scores, column), axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return attend


def assert_equals_transformers(variant: str, logits: Any, hidden: Any, aux: Any) -> None:
    """aux holds the input of every layer, first to last."""
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
    *inputs, last = golden["hidden_states"]  # the last one is after the final norm
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for i, (mine, expected) in enumerate(
        zip(np.split(np.asarray(aux), len(inputs), axis=-1), inputs, strict=True)
    ):
        close(mine, expected, err_msg=f"the input of layer {i}")
    close(hidden, last)
    close(logits, golden["logits"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_dense_forward_equals_transformers(variant: str) -> None:
    spec, params = loaded(variant)
    token_ids = arrays_of(GOLDEN / variant / "outputs.npz")["token_ids"]
    outputs = dense_forward(
        spec,
        params,
        token_ids,
        aux_layer_ids=tuple(range(spec.num_layers)),
        attend_of=attend_of,
    )
    assert_equals_transformers(variant, *outputs)


@SLOW
def test_step_writes_what_transformers_writes() -> None:
    """200 ids, each the best one after all before it, far beyond the windows."""
    spec, params = loaded("step3p5")
    ids = arrays_of(GOLDEN / "step3p5" / "outputs.npz")["greedy"]
    logits, _, _ = dense_forward(spec, params, ids[:-1], aux_layer_ids=(), attend_of=attend_of)
    assert np.asarray(logits).argmax(axis=-1).tolist() == ids[1:].tolist()
    assert len(ids) == 201


def attend_to_all(spec: AttentionSpec) -> Attend:
    return attend_of(dataclasses.replace(spec, window=None))


@pytest.mark.parametrize(
    "variant", ["qwen2", "mistral", "gpt_oss", pytest.param("step3p5", marks=SLOW)]
)
def test_the_texts_are_longer_than_the_windows(variant: str) -> None:
    """So that a window left out is seen, from the ninth token on."""
    spec, params = loaded(variant)
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
    ids = golden["token_ids"]
    logits, _, _ = dense_forward(spec, params, ids, aux_layer_ids=(), attend_of=attend_to_all)
    apart = np.abs(np.asarray(logits) - golden["logits"]).max(axis=-1)
    assert apart[:8].max() < 1e-4
    assert apart[8:].min() > 1e-3


@pytest.mark.parametrize(
    ("variant", "ops"),
    [
        pytest.param(name, ops, marks=SLOW if ops == "reference" and name in LATER else ())
        for name in VARIANTS
        for ops in ("reference", "xla")
        if "fused" not in name
    ],
)
def test_chunks_over_pages_equal_transformers(variant: str, ops: str) -> None:
    """A prompt's chunk, then a few tokens at a time, as a verification has them."""
    spec, params = loaded(variant)
    token_ids = arrays_of(GOLDEN / variant / "outputs.npz")["token_ids"]
    decoder = Decoder(spec, OPS[ops], aux_layer_ids=tuple(range(spec.num_layers)))
    pools = empty_pools(
        cache_groups(spec, name="target"),
        num_pages=8,
        page_size=PAGE,
        shards=1,
        dtype=jnp.float32,
        ops=OPS[ops],
    )
    kv = tuple(jnp.full_like(pages, jnp.nan) for pages in pools)  # none of it may be read
    step = jax.jit(decoder.forward, static_argnames="queries_per_row")
    starts = [0, *range(FIRST_CHUNK, len(token_ids), QUERIES)]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        rows = AttentionRows(
            page_table=jnp.asarray([[3, 1, 6, 2, 7, 5]], jnp.int32),
            prefix_lens=jnp.asarray([start], jnp.int32),
            cu_q_lens=jnp.asarray([0, stop - start], jnp.int32),
            q_positions=jnp.arange(start, stop, dtype=jnp.int32),
        )
        ids = jnp.asarray(token_ids[start:stop], jnp.int32)
        with jax.default_matmul_precision("highest"):
            hidden, aux, kv = step(
                params, ids, kv, rows, queries_per_row=QUERIES if start else None
            )
            found.append((decoder.logits(params, hidden), hidden, aux))
    assert_equals_transformers(
        variant, *(np.concatenate(parts) for parts in zip(*found, strict=True))
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_then_load_is_exact(variant: str, tmp_path: Path) -> None:
    """And load then save keeps every tensor, but that experts are stored one by one."""
    spec, params = loaded(variant)
    save_target(tmp_path, spec, params, dtype=np.float32)
    assert load_model_spec(tmp_path) == spec
    host = jax.tree.map(np.asarray, params)
    assert_same(load_target(tmp_path, spec, dtype=np.float32), host)
    found = load_file(tmp_path / "model.safetensors")
    stored = load_file(GOLDEN / variant.removesuffix("_fused") / "model.safetensors")
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_fused_experts_are_the_same_model() -> None:
    (spec, params), (fused_spec, fused) = (loaded(f"qwen3_moe{end}") for end in ("", "_fused"))
    assert fused_spec == spec
    assert_same(fused, params)


def test_every_family_is_tested() -> None:
    elsewhere = {"llama", "mimo", "mimo_v2"}  # test_hf_llama.py, test_mtp_families.py
    served = {family.name for family in FAMILIES} - elsewhere
    assert {loaded(variant)[0].family for variant in VARIANTS} == served


# What config.json says, as published.

QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = QWEN2_7B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def windows_of(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_qwen2(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN2_7B)
    attention = AttentionSpec(
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rope=RopeConfig(theta=1e6),
        qkv_bias=True,
    )
    layer = LayerSpec(attention=attention, ffn=DenseSpec(inner=18944), eps=1e-6)
    assert spec == ModelSpec(
        vocab_size=152064,
        hidden_size=3584,
        layers=(layer,) * 28,
        rms_norm_eps=1e-6,
        max_position=32768,
        eos_token_ids=(151645,),
        bos_token_id=151643,
        family="qwen2",
    )


def test_qwen3(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_8B)
    assert spec.one_layer.attention == AttentionSpec(
        num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6), qk_norm=True
    )
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("qwen3", 36, 4096)
    narrow = {key: value for key, value in QWEN3_8B.items() if key != "head_dim"}
    narrow["hidden_size"] = 1024
    assert read(tmp_path, narrow).one_layer.attention.head_dim == 128  # not 1024 / 32
    biased = read(tmp_path, QWEN3_8B | {"attention_bias": True}).one_layer.attention
    assert (biased.qkv_bias, biased.out_bias) == (True, True)


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B])
def test_qwen_s_windows_begin_at_a_layer(config: dict[str, Any], tmp_path: Path) -> None:
    short = config | {"num_hidden_layers": 3, "sliding_window": 512, "max_window_layers": 1}
    assert windows_of(read(tmp_path, short)) == [None] * 3  # use_sliding_window is false
    windowed = short | {"use_sliding_window": True}
    assert windows_of(read(tmp_path, windowed)) == [None, 512, 512]
    every = windowed | {"max_window_layers": 0}
    assert windows_of(read(tmp_path, every)) == [512] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    listed = windowed | {"layer_types": kinds}
    assert windows_of(read(tmp_path, listed)) == [512, None, 512]
    with pytest.raises(CheckpointError, match="there is no sliding_window; expected one"):
        read(tmp_path, short | {"layer_types": kinds})


def test_qwen3_moe(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_30B_A3B)
    mixture = MoESpec(num_experts=128, top_k=8, inner=768)
    assert mixture.routing is Routing.SOFTMAX_THEN_TOP_NORMALIZED
    assert spec.one_layer.ffn == mixture
    assert spec.one_layer.attention.qk_norm
    other = read(tmp_path, QWEN3_30B_A3B | {"norm_topk_prob": False})
    assert other.one_layer.ffn == dataclasses.replace(mixture, routing=Routing.SOFTMAX_THEN_TOP)
    renamed = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    assert read(tmp_path, renamed | {"num_local_experts": 64}).one_layer.ffn == dataclasses.replace(
        mixture, num_experts=64
    )
    some = read(
        tmp_path,
        QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    )
    dense = DenseSpec(inner=6144)
    assert [layer.ffn for layer in some.layers] == [dense, mixture, dense, dense, dense, mixture]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 129}, ConfigError, "num_experts_per_tok is 129; expected 1 to"),
        ({"mlp_only_layers": 3}, CheckpointError, "mlp_only_layers is 3; expected a list"),
        ({"mlp_only_layers": ["3"]}, CheckpointError, "mlp_only_layers is"),
        ({"num_experts": "many"}, CheckpointError, "num_experts is 'many'"),
        ({"norm_topk_prob": 1}, CheckpointError, "norm_topk_prob is 1; expected true or false"),
    ],
)
def test_a_malformed_mixture_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, QWEN3_30B_A3B | changes)


def test_mistral_s_window_is_4096_where_it_says_nothing(tmp_path: Path) -> None:
    assert windows_of(read(tmp_path, MISTRAL_7B)) == [4096] * 32
    assert windows_of(read(tmp_path, MISTRAL_7B | {"sliding_window": 512})) == [512] * 32
    assert windows_of(read(tmp_path, MISTRAL_7B | {"sliding_window": None})) == [None] * 32
    silent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert windows_of(read(tmp_path, silent)) == [4096] * 32


def test_mistral_is_llama_but_for_the_window(tmp_path: Path) -> None:
    mistral = read(tmp_path, MISTRAL_7B | {"sliding_window": None})
    llama = read(tmp_path, MISTRAL_7B | {"architectures": ["LlamaForCausalLM"]})
    assert dataclasses.replace(mistral, family="llama") == llama


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B, MISTRAL_7B])
def test_written_configs_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = read(tmp_path, config | {"rope_scaling": scaling, "tie_word_embeddings": True})
    assert spec.one_layer.attention.rope.factor == 4.0
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B, MISTRAL_7B])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope type is 'linear'"),
    ],
)
def test_what_is_not_served_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config | changes)

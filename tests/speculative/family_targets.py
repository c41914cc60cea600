"""A tiny target of each family: as wide as TARGET, two layers, of the kinds that the family has.

Two layers, because compiling dominates the tests' cost; if a family has two kinds, one of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.files.stored.tensors import value_at
from jspec.models.layer import Params
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.models.registry import table_of
from jspec.spec.layers.attention import AttentionSpec, HeadGate, IndexerSpec, LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, Gate, MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, Mixer, ModelSpec
from jspec.spec.rope import QueryGrowth, RopeConfig, YarnConfig
from jspec.spec.sandwich import SandwichSpec
from tests.speculative.engines import TARGET

WINDOW = 8  # shorter than most prompts, and than every text
# Families of the same layers: MiMo-7B's target is Qwen2's.
ALIKE = {"mimo": "qwen2"}
ATTENTION = TARGET.one_layer.attention
DENSE = DenseSpec(inner=48)
MIXTURE = MoESpec(num_experts=4, top_k=2, inner=16)
SIGMOIDS = dataclasses.replace(MIXTURE, routing=Routing.SIGMOID_THEN_TOP_NORMALIZED)
SHARED = dataclasses.replace(SIGMOIDS, weight_scale=2.5, shared=DenseSpec(inner=16))
YARN = RopeConfig(
    theta=150000.0,
    factor=32.0,
    original_max_position=16,
    yarn=YarnConfig(attention_factor=1.3, truncate=False),
)
SCALED = RopeConfig(
    theta=500.0,
    factor=2.0,
    low_freq_factor=1.0,
    high_freq_factor=32.0,
    original_max_position=32,
)
DELTA_NET = DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=8, value_dim=6)
Layers = tuple[tuple[Mixer, FeedForward], ...]


def attention(window: int | None = None, **settings: Any) -> AttentionSpec:
    return dataclasses.replace(ATTENTION, window=window, **settings)


def llama() -> Layers:
    return ((ATTENTION, DENSE),) * 2


def mistral() -> Layers:
    return ((attention(WINDOW), DENSE),) * 2


def qwen2() -> Layers:
    return tuple((attention(window, qkv_bias=True), DENSE) for window in (None, WINDOW))


def qwen3() -> Layers:
    return ((attention(qk_norm=True), DENSE),) * 2


def qwen3_moe() -> Layers:
    return ((attention(qk_norm=True), MIXTURE),) * 2


def qwen3_next() -> Layers:
    """A delta net before a gated shared expert, and attention with a gate and partial RoPE."""
    moe = dataclasses.replace(MIXTURE, shared=DenseSpec(inner=12), shared_gate=True)
    own = attention(qk_norm=True, rotary_dim=4, gate=HeadGate.OF_NUMBERS)
    return ((DELTA_NET, moe), (own, DENSE))


def qwen3_5() -> Layers:
    """Return the same mixers with three value heads for each key head, and dense MLPs."""
    (_, _), (own, _) = qwen3_next()
    return ((dataclasses.replace(DELTA_NET, num_heads=6), DENSE), (own, DENSE))


def gpt_oss() -> Layers:
    own: dict[str, Any] = {"rope": YARN, "sinks": True, "qkv_bias": True, "out_bias": True}
    ffn = dataclasses.replace(
        MIXTURE, routing=Routing.TOP_THEN_SOFTMAX, gate=Gate.CLAMPED, bias=True
    )
    return tuple((attention(window, **own), ffn) for window in (WINDOW, None))


def mimo_v2() -> Layers:
    """Values narrower than keys; sliding layers have sinks, their own theta and kv heads."""
    own: dict[str, Any] = {"head_dim": 12, "v_dim": 8, "value_scale": 0.707, "rotary_dim": 4}
    full = attention(num_kv_heads=1, rope=RopeConfig(theta=5e6), **own)
    return ((full, DENSE), (attention(WINDOW, sinks=True, **own), SIGMOIDS))


def step3p5() -> Layers:
    """Sliding layers have more heads, and RoPE on whole heads."""
    own: dict[str, Any] = {"qk_norm": True, "gate": HeadGate.OF_HEADS}
    full = attention(rope=SCALED, rotary_dim=4, **own)
    sliding = attention(WINDOW, num_heads=6, rope=RopeConfig(theta=100.0), **own)
    moe = dataclasses.replace(
        SIGMOIDS, gate=Gate.SILU_WITHIN_7, weight_scale=3.0, shared=DenseSpec(inner=12, limit=0.5)
    )
    return ((full, DenseSpec(inner=48, limit=0.5)), (sliding, moe))


def glm4_moe() -> Layers:
    own = attention(qk_norm=True, qkv_bias=True, rotary_dim=4)
    return ((own, DENSE), (own, SHARED))


def latent(**settings: Any) -> LatentAttentionSpec:
    own: dict[str, Any] = {"head_dim": 12, "v_dim": 6, "rotary_dim": 4, "kv_rank": 10}
    own |= {"num_heads": 4, "num_kv_heads": 4, "interleaved": True, **settings}
    return LatentAttentionSpec(**own)


def deepseek_v2() -> Layers:
    moe = dataclasses.replace(
        MIXTURE, routing=Routing.SOFTMAX_THEN_TOP, weight_scale=3.0, num_groups=2, top_groups=1
    )
    return ((latent(), DENSE), (latent(), moe))


def deepseek_v3() -> Layers:
    """With YaRN's factor on scores; experts of the best group beside a shared one."""
    own = latent(q_rank=14, rope=YARN, scale=0.4)
    moe = dataclasses.replace(SHARED, num_groups=2, top_groups=1)
    return ((own, DENSE), (own, moe))


def deepseek_v32() -> Layers:
    """A few tokens are selected, also with equal scores: one index head of either sign."""
    own = latent(q_rank=14, indexer=IndexerSpec(num_heads=1, head_dim=6, top_k=5))
    moe = dataclasses.replace(SHARED, num_groups=2, top_groups=1)
    return ((own, DENSE), (own, moe))


def glm_moe_dsa() -> Layers:
    """The second layer attends to what the first selected."""
    indexer = IndexerSpec(num_heads=4, head_dim=8, top_k=6, interleaved=True)
    own = latent(q_rank=14, v_dim=12, indexer=indexer)
    reader = latent(q_rank=14, v_dim=12, reuses_selection=True)
    return ((own, DENSE), (reader, SHARED))


def glm4_moe_lite() -> Layers:
    own = latent(q_rank=14, v_dim=12)
    return ((own, DENSE), (own, SHARED))


def mistral4() -> Layers:
    """Queries grow several times within a text; softmax routers beside a shared expert."""
    own = latent(q_rank=14, rope=YARN, scale=0.4, growth=QueryGrowth(beta=0.3, period=7))
    moe = dataclasses.replace(MIXTURE, shared=DenseSpec(inner=16))
    return ((own, DENSE), (own, moe))


def minimax_m2() -> Layers:
    own = attention(qk_norm=True, norms_span_heads=True, rotary_dim=4)
    return ((own, SIGMOIDS),) * 2


def gemma4() -> Layers:
    """A window, full attention with wider heads whose K is V, and a reader of the first's cache."""
    own: dict[str, Any] = {"qk_norm": True, "v_norm": True, "scale": 1.0}
    dense = dataclasses.replace(DENSE, gelu=True)
    rope = RopeConfig(theta=1000.0, turned=0.5)
    sliding = attention(WINDOW, **own)
    full = attention(head_dim=24, num_kv_heads=1, k_is_v=True, rope=rope, **own)
    return tuple((each, dense) for each in (sliding, full, dataclasses.replace(sliding, kv_of=0)))


LAYERS: dict[str, Callable[[], Layers]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "gpt_oss": gpt_oss,
    "mimo": qwen2,
    "mimo_v2": mimo_v2,
    "step3p5": step3p5,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
    "minimax_m2": minimax_m2,
    "mistral4": mistral4,
    "gemma4": gemma4,
}


def target_of(family: str) -> ModelSpec:
    if family == "gemma4":
        moe = dataclasses.replace(MIXTURE, gate=Gate.GELU)
        sandwiches = tuple(
            SandwichSpec(attention=own, ffn=ffn, experts=moe, token_size=6)
            for own, ffn in LAYERS[family]()
        )
        scales: dict[str, Any] = {"embed_scale": 3.0, "logit_cap": 5.0}
        return dataclasses.replace(TARGET, layers=sandwiches, family=family, **scales)
    layers = (LayerSpec(attention=own, ffn=ffn) for own, ffn in LAYERS[family]())
    return dataclasses.replace(TARGET, layers=tuple(layers), family=family)


def drawn(spec: ModelSpec) -> Params:
    """Draw weights; biases and sinks away from 0, states that remember tens of tokens."""
    table = table_of(spec)
    params = init_params(table, seed=3)
    values = {own.path: value_at(params, own.path) for own in table}
    for i, own in enumerate(table):
        if own.init is Init.ZEROS:
            values[own.path] = jax.random.normal(jax.random.key(i), own.shape, jnp.float32) / 2
        if own.path[-2:] == ("decay", "log"):
            values[own.path] -= 3.0
    return nested(values.items())

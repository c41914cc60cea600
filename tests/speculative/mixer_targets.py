"""Tiny targets whose layers cache something else than K and V: latents, and recurrent states."""

from __future__ import annotations

import dataclasses

from jspec.spec.cache_entry import FP8
from jspec.spec.layers.attention import IndexerSpec, LatentAttentionSpec
from jspec.spec.model_spec import LayerSpec, Mixer, ModelSpec, cached_in
from jspec.spec.rope import RopeConfig, YarnConfig
from tests.speculative.engines import TARGET
from tests.speculative.family_targets import DELTA_NET, DENSE, MIXTURE, WINDOW, attention, target_of

LATENT = LatentAttentionSpec(
    num_heads=4,
    num_kv_heads=4,
    head_dim=12,
    v_dim=6,
    rotary_dim=4,
    kv_rank=10,
    q_rank=14,
    rope=RopeConfig(
        theta=1000.0, factor=4.0, original_max_position=64, yarn=YarnConfig(attention_factor=1.1)
    ),
)
SPARSE = dataclasses.replace(LATENT, indexer=IndexerSpec(num_heads=3, head_dim=6, top_k=9))
READER = dataclasses.replace(LATENT, reuses_selection=True)


def target_with(*mixers: Mixer) -> ModelSpec:
    layers = tuple(
        LayerSpec(attention=own, ffn=MIXTURE if i == 1 else DENSE) for i, own in enumerate(mixers)
    )
    return dataclasses.replace(TARGET, layers=layers)


MIXER_TARGETS: dict[str, ModelSpec] = {
    "latent": target_with(LATENT, dataclasses.replace(LATENT, q_rank=None)),
    "sparse": target_with(SPARSE, READER, SPARSE),
    "hybrid": target_of("qwen3_next"),
    "all_kinds": target_with(LATENT, DELTA_NET, attention(WINDOW), DELTA_NET),
}
MIXER_TARGETS["sparse_fp8"] = cached_in(MIXER_TARGETS["sparse"], FP8)
MIXER_TARGETS["all_kinds_fp8"] = cached_in(MIXER_TARGETS["all_kinds"], FP8)

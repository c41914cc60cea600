"""DeepSeek-V3's layer for multi-token prediction in numpy float64, off the published names.

In expanded form: K and V of every head are made of the latent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.models.glm_reference import GlmLayers
from tests.models.mtp_reference import F64

LOW_RANK_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeepseekLayers(GlmLayers):
    """config: config.json, for the sizes, YaRN and the groups of experts."""

    config: Mapping[str, Any]

    def low_rank(self, layer: int, x: F64, name: str) -> F64:
        scaled: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + LOW_RANK_EPS)
        return scaled * self.weight(layer, f"self_attn.{name}")

    def turned(self, x: F64) -> F64:
        """Turn pairs of neighbours of x [.., T, D]; row t by position t."""
        scaling, half = self.config["rope_scaling"], x.shape[-1] // 2
        inverse = self.theta ** (-np.arange(half) / half)
        first, last = (
            half
            * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns))
            / math.log(self.theta)
            for turns in (scaling["beta_fast"], scaling["beta_slow"])
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        slowed = np.clip((np.arange(half) - first) / (last - first), 0, 1)
        inverse = inverse * (1 - slowed) + inverse / scaling["factor"] * slowed
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
        pairs = pairs * np.exp(1j * np.arange(x.shape[-2])[:, None] * inverse)
        pairs *= self.mscale("mscale") / self.mscale("mscale_all_dim")
        return np.concatenate([pairs.real, pairs.imag], -1)

    def mscale(self, name: str) -> float:
        scaling = self.config["rope_scaling"]
        return float(0.1 * scaling[name] * math.log(scaling["factor"]) + 1)

    def mixed(self, layer: int, x: F64) -> F64:
        H, plain, rank = (
            self.config[name]
            for name in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
        )
        normed = self.norm(x, self.weight(layer, "input_layernorm"))

        def product(given: F64, name: str) -> F64:
            return given @ self.weight(layer, f"self_attn.{name}").T

        def heads(given: F64, name: str) -> F64:
            return product(given, name).reshape(len(x), H, -1).swapaxes(0, 1)

        q = heads(self.low_rank(layer, product(normed, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
        q = np.concatenate([q[..., :plain], self.turned(q[..., plain:])], -1)
        latent, shared = np.split(product(normed, "kv_a_proj_with_mqa"), (rank,), axis=-1)
        k, v = np.split(
            heads(self.low_rank(layer, latent, "kv_a_layernorm"), "kv_b_proj"), (plain,), axis=-1
        )
        k = np.concatenate([k, np.broadcast_to(self.turned(shared), (H, *shared.shape))], -1)
        scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5 * self.mscale("mscale_all_dim") ** 2
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out: F64 = weights / weights.sum(-1, keepdims=True) @ v
        return out

    def best(self, heights: F64) -> list[int]:
        """The experts of one token, among those of its best groups."""
        groups = heights.reshape(self.config["n_group"], -1)
        ranked = np.argsort(-np.sort(groups, axis=-1)[:, -2:].sum(-1))
        among = np.full(groups.shape, -np.inf)
        for group in ranked[: self.config["topk_group"]]:
            among[group] = groups[group]
        return super().best(among.reshape(-1))

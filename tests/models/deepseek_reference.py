"""DeepSeek-V3's layer for multi-token prediction in numpy float64, off the published names.

In expanded form: K and V of every head are made of the latent. With the indexer of DeepSeek-V3.2
and of GLM-5, which has no YaRN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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

    def turned(self, x: F64, *, halves: bool = False) -> F64:
        """Turn pairs of neighbours of x [.., T, D], or of its halves; row t by position t."""
        half = x.shape[-1] // 2
        inverse = self.slowed(self.theta ** (-np.arange(half) / half))
        parts = np.split(x, 2, axis=-1) if halves else (x[..., 0::2], x[..., 1::2])
        pairs = parts[0] + 1j * parts[1]
        pairs = pairs * np.exp(1j * np.arange(x.shape[-2])[:, None] * inverse)
        pairs *= self.mscale("mscale") / self.mscale("mscale_all_dim")
        return np.concatenate([pairs.real, pairs.imag], -1)

    def slowed(self, inverse: F64) -> F64:
        """Apply YaRN to the frequencies."""
        scaling, half = self.config["rope_scaling"], len(inverse)
        if scaling is None:
            return inverse
        first, last = (
            half
            * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns))
            / math.log(self.theta)
            for turns in (scaling["beta_fast"], scaling["beta_slow"])
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        slowed = np.clip((np.arange(half) - first) / (last - first), 0, 1)
        mixed: F64 = inverse * (1 - slowed) + inverse / scaling["factor"] * slowed
        return mixed

    def mscale(self, name: str) -> float:
        scaling = self.config["rope_scaling"]
        if scaling is None:
            return 1.0
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

        low_rank = self.low_rank(layer, product(normed, "q_a_proj"), "q_a_layernorm")
        q = heads(low_rank, "q_b_proj")
        q = np.concatenate([q[..., :plain], self.turned(q[..., plain:])], -1)
        latent, shared = np.split(product(normed, "kv_a_proj_with_mqa"), (rank,), axis=-1)
        k, v = np.split(
            heads(self.low_rank(layer, latent, "kv_a_layernorm"), "kv_b_proj"), (plain,), axis=-1
        )
        k = np.concatenate([k, np.broadcast_to(self.turned(shared), (H, *shared.shape))], -1)
        scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5 * self.mscale("mscale_all_dim") ** 2
        scores = np.where(self.attended(layer, normed, low_rank), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out: F64 = weights / weights.sum(-1, keepdims=True) @ v
        return out

    def attended(self, layer: int, normed: F64, low_rank: F64) -> npt.NDArray[np.bool_]:
        """Return bool[T, T], by query and key: all tokens so far, or those of the best scores."""
        count, most = len(normed), self.config.get("index_topk")
        attended = np.tril(np.ones((count, count), bool))
        if most is None:
            return attended
        rope, own = self.config["qk_rope_head_dim"], "self_attn.indexer."
        halves = not self.config.get("indexer_rope_interleave", False)

        def rotated(x: F64) -> F64:
            return np.concatenate([self.turned(x[..., :rope], halves=halves), x[..., rope:]], -1)

        q = (low_rank @ self.weight(layer, f"{own}wq_b").T).reshape(
            count, self.config["index_n_heads"], -1
        )
        k = normed @ self.weight(layer, f"{own}wk").T
        k = k - k.mean(-1, keepdims=True)
        k = k / np.sqrt((k * k).mean(-1, keepdims=True) + LOW_RANK_EPS)
        k = k * self.weight(layer, f"{own}k_norm") + self.bias(layer, f"{own}k_norm")
        heights = np.maximum(rotated(q.swapaxes(0, 1)) @ rotated(k).T, 0)
        scores = np.einsum(
            "hqk,qh->qk", heights, normed @ self.weight(layer, f"{own}weights_proj").T
        )
        for t in range(count):
            attended[t, np.argsort(-scores[t, : t + 1], kind="stable")[most:]] = False
        return attended

    def best(self, heights: F64) -> list[int]:
        """The experts of one token, among those of its best groups."""
        groups = heights.reshape(self.config["n_group"], -1)
        ranked = np.argsort(-np.sort(groups, axis=-1)[:, -2:].sum(-1))
        among = np.full(groups.shape, -np.inf)
        for group in ranked[: self.config["topk_group"]]:
            among[group] = groups[group]
        return super().best(among.reshape(-1))

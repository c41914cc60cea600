"""Qwen3-Next's and Qwen3.5's layer for multi-token prediction in numpy float64, off its names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.models.glm_reference import GlmLayers
from tests.models.mtp_reference import F64


@dataclass(frozen=True, kw_only=True)
class Qwen3NextLayers(GlmLayers):
    """Norms stored less one; of each head q_proj has its query's rows, then its gate's."""

    def norm(self, x: F64, scale: F64) -> F64:
        return super().norm(x, 1 + scale)

    def weight(self, layer: int, name: str) -> F64:
        whole = super().weight(layer, "self_attn.q_proj")
        by_head = whole.reshape(-1, 2, self.head_dim, whole.shape[1])
        if name == "self_attn.q_proj":
            return by_head[:, 0].reshape(-1, whole.shape[1])
        if name == "gate":
            return by_head[:, 1].reshape(-1, whole.shape[1])
        return super().weight(layer, name)

    def mixed(self, layer: int, x: F64) -> F64:
        heads = super().mixed(layer, x)
        normed = self.norm(x, self.weight(layer, "input_layernorm"))
        gate = (normed @ self.weight(layer, "gate").T).reshape(len(x), -1, self.head_dim)
        return heads / (1 + np.exp(-gate.swapaxes(0, 1)))

"""Step-3.5-Flash's layers for multi-token prediction in numpy float64, from the published names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.models.mtp_reference import F64, MtpReference


@dataclass(frozen=True, kw_only=True)
class StepLayers(MtpReference):
    """Sliding, dense, every head gated; norms stored less one. limit: of the MLP's gate."""

    limit: float

    def norm(self, x: F64, scale: F64) -> F64:
        return super().norm(x, 1 + scale)

    def heads(self, layer: int, x: F64, name: str, *, rotate: bool) -> F64:
        if not rotate:
            return super().heads(layer, x, name, rotate=False)
        y = super().heads(layer, x, name, rotate=False)
        y = self.norm(y, self.weight(layer, f"self_attn.{name[0]}_norm"))
        half = self.head_dim // 2
        angle = np.arange(len(x))[:, None] * self.theta ** (-np.arange(half) / half)
        a, b = y[..., :half], y[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def mixed(self, layer: int, x: F64) -> F64:
        normed = self.norm(x, self.weight(layer, "input_layernorm"))
        heads = super().mixed(layer, x)
        gate = normed @ self.weight(layer, "self_attn.g_proj").T
        return heads / (1 + np.exp(-gate.T[..., None]))

    def inner(self, gate: F64, up: F64) -> F64:
        silu = gate / (1 + np.exp(-gate))
        return np.minimum(silu, self.limit) * np.clip(up, -self.limit, self.limit)

"""GLM-4.5's layer for multi-token prediction in numpy float64, from the published names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.models.mtp_reference import F64, MtpReference


@dataclass(frozen=True, kw_only=True)
class GlmLayers(MtpReference):
    """RoPE on the first `rotary` dimensions of each head, and MoE with a shared expert if there is
    one.

    The `top_k` best experts by sigmoid and bias get weights that sum to one, times `scale`.
    """

    rotary: int
    top_k: int
    scale: float

    def heads(self, layer: int, x: F64, name: str, *, rotate: bool) -> F64:
        y = super().heads(layer, x, name, rotate=False)
        if not rotate:
            return y
        if f"{self.prefix.format(layer)}self_attn.{name[0]}_norm.weight" in self.tensors:
            y = self.norm(y, self.weight(layer, f"self_attn.{name[0]}_norm"))
        half = self.rotary // 2
        angle = np.arange(len(x))[:, None] * self.theta ** (-np.arange(half) / half)
        a, b, rest = np.split(y, (half, self.rotary), axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def feed_forward(self, layer: int, normed: F64) -> F64:
        correction = f"{self.prefix.format(layer)}mlp.gate.e_score_correction_bias"
        if correction not in self.tensors:
            return super().feed_forward(layer, normed)
        out = self.gated(layer, "mlp.shared_experts.", normed)
        scores = 1 / (1 + np.exp(-normed @ self.weight(layer, "mlp.gate").T))
        for t, token in enumerate(normed):
            best = self.best(scores[t] + self.tensors[correction])
            for e in best:
                share = self.scale * scores[t, e] / scores[t, best].sum()
                out[t] += share * self.gated(layer, f"mlp.experts.{e}.", token[None])[0]
        return out

    def best(self, heights: F64) -> list[int]:
        """The experts of one token."""
        chosen: list[int] = np.argsort(-heights)[: self.top_k].tolist()
        return chosen

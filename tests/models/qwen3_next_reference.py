"""Qwen3-Next's and Qwen3.5's layer for multi-token prediction in numpy float64, off its names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.models.glm_reference import GlmLayers
from tests.models.mtp_reference import F64


@dataclass(frozen=True, kw_only=True)
class Qwen3NextLayers(GlmLayers):
    """Norms stored less one; of each head q_proj has its query's rows, then its gate's. Experts, if
    there are some: the `top_k` best by softmax, weighted to one, beside a gated shared one.
    """

    def norm(self, x: F64, scale: F64) -> F64:
        return super().norm(x, 1 + scale)

    def weight(self, layer: int, name: str) -> F64:
        if name not in ("self_attn.q_proj", "gate"):
            return super().weight(layer, name)
        return self._half(super().weight(layer, "self_attn.q_proj"), name)

    def bias(self, layer: int, name: str) -> F64:
        if name not in ("self_attn.q_proj", "gate"):
            return super().bias(layer, name)
        whole = super().bias(layer, "self_attn.q_proj")
        return self._half(whole, name) if whole.ndim else whole

    def _half(self, whole: F64, name: str) -> F64:
        by_head = whole.reshape(-1, 2, self.head_dim, *whole.shape[1:])
        own: F64 = by_head[:, int(name == "gate")].reshape(-1, *whole.shape[1:])
        return own

    def mixed(self, layer: int, x: F64) -> F64:
        heads = super().mixed(layer, x)
        normed = self.norm(x, self.weight(layer, "input_layernorm"))
        gate = normed @ self.weight(layer, "gate").T + self.bias(layer, "gate")
        return heads * sigmoid(gate.reshape(len(x), -1, self.head_dim).swapaxes(0, 1))

    def feed_forward(self, layer: int, normed: F64) -> F64:
        if f"{self.prefix.format(layer)}mlp.gate.weight" not in self.tensors:
            return super().feed_forward(layer, normed)
        share = sigmoid(normed @ self.weight(layer, "mlp.shared_expert_gate").T)
        out = share * self.gated(layer, "mlp.shared_expert.", normed)
        scores = np.exp(normed @ self.weight(layer, "mlp.gate").T)
        for t, token in enumerate(normed):
            best = np.argsort(-scores[t])[: self.top_k]
            for e in best:
                weight = scores[t, e] / scores[t, best].sum()
                out[t] += weight * self.gated(layer, f"mlp.experts.{e}.", token[None])[0]
        return out


def sigmoid(x: F64) -> F64:
    found: F64 = 1 / (1 + np.exp(-x))
    return found

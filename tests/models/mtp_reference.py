"""Layers for multi-token prediction in numpy float64: the specification, from the published names.

Independent of jspec: it takes tensors as they are stored ([out, in]) and recomputes every row of a
layer from the row's start, so there is no cache, lag or state. Layer s is a function of the whole
sequence: its row i reads the feature i and the token i + s + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.models.eagle3_reference import HeadReference

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MtpReference:
    """tensors: of the layers, after `prefix` with a number, and embed.weight, head.weight.

    names: a checkpoint's names for enorm, hnorm, eh_proj and the like, where they differ.
    """

    tensors: Mapping[str, npt.NDArray[Any]]
    prefix: str
    head_dim: int
    theta: float
    eps: float
    chained: bool
    hidden_first: bool
    feeds_normed: bool
    own_heads: bool = False
    zeroes_first: bool = False
    window: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def weight(self, layer: int, name: str) -> F64:
        name = self.names.get(name, name)
        return self.tensors[f"{self.prefix.format(layer)}{name}.weight"].astype(np.float64)

    def bias(self, layer: int, name: str) -> F64:
        """Zero without one."""
        found = self.tensors.get(f"{self.prefix.format(layer)}{name}.bias", np.zeros(()))
        return found.astype(np.float64)

    def norm(self, x: F64, scale: F64) -> F64:
        root_mean_square: F64 = np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x / root_mean_square * scale

    def heads(self, layer: int, x: F64, name: str, *, rotate: bool) -> F64:
        """Return [heads, T, D]; row t is rotated by position t."""
        y = x @ self.weight(layer, f"self_attn.{name}").T
        y = y + self.bias(layer, f"self_attn.{name}")
        y = y.reshape(len(x), y.shape[1] // self.head_dim, self.head_dim).swapaxes(0, 1)
        if not rotate:
            return y
        half = self.head_dim // 2
        inverse = self.theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(x))[:, None] * inverse)
        turned = (y[..., :half] + 1j * y[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def keys_and_values(self, layer: int, x: F64) -> tuple[F64, F64]:
        """Return what the layer caches: [heads, T, D] each, of the normed stream."""
        normed = self.norm(x, self.weight(layer, "input_layernorm"))
        return (
            self.heads(layer, normed, "k_proj", rotate=True),
            self.heads(layer, normed, "v_proj", rotate=False),
        )

    def fused(self, layer: int, tokens: list[int], hidden: F64) -> F64:
        embedded = self.tensors["embed.weight"].astype(np.float64)[np.asarray(tokens, np.int64)]
        if self.zeroes_first:
            embedded[:1] = 0
        pair = [
            self.norm(embedded, self.weight(layer, "enorm")),
            self.norm(hidden, self.weight(layer, "hnorm")),
        ]
        wide = np.concatenate(pair[::-1] if self.hidden_first else pair, -1)
        return wide @ self.weight(layer, "eh_proj").T

    def mixed(self, layer: int, x: F64) -> F64:
        """Return attention's output over the stream x: [heads, T, D]."""
        normed = self.norm(x, self.weight(layer, "input_layernorm"))
        q = self.heads(layer, normed, "q_proj", rotate=True)
        k, v = self.keys_and_values(layer, x)
        mixed = np.zeros_like(q)
        for h in range(len(q)):
            g = h * len(k) // len(q)
            for t in range(len(x)):
                first = 0 if self.window is None else max(t + 1 - self.window, 0)
                scores = k[g, first : t + 1] @ q[h, t] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[h, t] = weights / weights.sum() @ v[g, first : t + 1]
        return mixed

    def inner(self, gate: F64, up: F64) -> F64:
        """Return the MLP's gate and up columns, concatenated."""
        silu: F64 = gate / (1 + np.exp(-gate))
        return silu * up

    def block(self, layer: int, x: F64) -> F64:
        mixed = self.mixed(layer, x)
        flat = mixed.swapaxes(0, 1).reshape(len(x), mixed.shape[0] * mixed.shape[2])
        x = x + flat @ self.weight(layer, "self_attn.o_proj").T
        x = x + self.bias(layer, "self_attn.o_proj")
        normed = self.norm(x, self.weight(layer, "post_attention_layernorm"))
        return x + self.feed_forward(layer, normed)

    def feed_forward(self, layer: int, normed: F64) -> F64:
        return self.gated(layer, "mlp.", normed)

    def gated(self, layer: int, name: str, x: F64) -> F64:
        """Run one MLP."""
        gate, up = (x @ self.weight(layer, f"{name}{part}_proj").T for part in ("gate", "up"))
        return self.inner(gate, up) @ self.weight(layer, f"{name}down_proj").T

    def outputs(self, tokens: list[int], features: F64, *, num_layers: int) -> list[F64]:
        """Return each layer's output over all rows of the tokens t0.. and features f0...

        Layer s has a row i for each token i + s + 1 and feature i that exist.
        """
        outs: list[F64] = []
        hidden = features.astype(np.float64)
        for layer in range(num_layers):
            own = tokens[layer + 1 :]
            count = min(len(own), len(hidden))
            out = self.block(layer, self.fused(layer, own[:count], hidden[:count]))
            outs.append(out)
            if self.chained:
                hidden = (
                    self.norm(out, self.weight(layer, "final_layernorm"))
                    if (self.feeds_normed)
                    else out
                )
        return outs

    def logits(self, layer: int, out: F64) -> F64:
        return self.norm(out, self.weight(layer, "final_layernorm")) @ self.head(layer).T

    def head(self, layer: int) -> F64:
        if self.own_heads:
            return self.weight(layer, "shared_head.output")
        return self.tensors["head.weight"].astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class RecurrentReference(HeadReference):
    """Layer 0 run again for every level, on its own output; every row is recomputed from the
    start."""

    inner: MtpReference

    @classmethod
    def of(cls, inner: MtpReference) -> RecurrentReference:
        return cls(
            tensors=inner.tensors,
            head_dim=inner.head_dim,
            eps=inner.eps,
            theta=inner.theta,
            inner=inner,
        )

    def fuse(self, given: npt.NDArray[Any]) -> F64:
        return given.astype(np.float64)

    def run(self, tokens: list[int], hidden: F64) -> F64:
        out = self.inner.block(0, self.inner.fused(0, tokens, hidden))
        if not self.inner.feeds_normed:
            return out
        return self.inner.norm(out, self.inner.weight(0, "final_layernorm"))

    def logits(self, carried: F64) -> F64:
        if not self.inner.feeds_normed:
            return self.inner.logits(0, carried)
        return carried @ self.inner.head(0).T

"""EAGLE heads and a decoder in numpy float64: the specification, from papers and stored names.

Independent of jspec: it takes a checkpoint's tensors as they are stored ([out, in], d2t an offset)
and recomputes every row of a chain from the beginning, so a cache error cannot hide. Tensors that
are present (biases, norms of q and k, fused products) are used; settings are arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayersReference:
    """A decoder's attention and MLP, row t rotated by position t."""

    tensors: Mapping[str, npt.NDArray[Any]]  # "fc.weight", "{layer}self_attn.q_proj.weight", ...
    head_dim: int
    eps: float
    theta: float
    layer: str = "layers.0."  # or "midlayer."
    num_layers: int = 1
    num_kv_heads: int = 0  # for fused q, k and v alone

    def weight(self, name: str) -> F64:
        return self.tensors[name].astype(np.float64)

    def norm(self, x: F64, name: str) -> F64:
        root_mean_square: F64 = np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x / root_mean_square * self.weight(name)

    def product(self, x: F64, name: str) -> F64:
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def heads(self, x: F64, layer: str) -> tuple[F64, F64, F64]:
        """Return q, k and v as [heads, T, D], not yet rotated."""
        attention = f"{layer}self_attn."
        if f"{attention}qkv_proj.weight" in self.tensors:
            y = self.product(x, f"{attention}qkv_proj")
            kv = self.num_kv_heads * self.head_dim
            parts = [y[:, : -2 * kv], y[:, -2 * kv : -kv], y[:, -kv:]]
        else:
            parts = [self.product(x, f"{attention}{name}_proj") for name in "qkv"]
        q, k, v = (y.reshape(len(x), -1, self.head_dim).swapaxes(0, 1) for y in parts)
        if f"{attention}q_norm.weight" in self.tensors:
            q, k = (
                self.norm(q, f"{attention}q_norm.weight"),
                self.norm(k, f"{attention}k_norm.weight"),
            )
        return q, k, v

    def rotated(self, y: F64) -> F64:
        half = self.head_dim // 2
        inverse = self.theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(y.shape[1])[:, None] * inverse)  # complex, not cos and sin
        turned = (y[..., :half] + 1j * y[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(self, x: F64, layer: str) -> F64:
        q, k, v = self.heads(x, layer)
        q, k = self.rotated(q), self.rotated(k)
        mixed = np.zeros_like(q)
        for h in range(len(q)):
            g = h * len(k) // len(q)
            for t in range(len(x)):
                scores = k[g, : t + 1] @ q[h, t] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[h, t] = weights / weights.sum() @ v[g, : t + 1]
        flat = mixed.swapaxes(0, 1).reshape(len(x), -1)
        return self.product(flat, f"{layer}self_attn.o_proj")

    def mlp(self, x: F64, layer: str) -> F64:
        if f"{layer}mlp.gate_up_proj.weight" in self.tensors:
            gate, up = np.split(self.product(x, f"{layer}mlp.gate_up_proj"), 2, axis=-1)
        else:
            gate, up = (self.product(x, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
        silu: F64 = gate / (1 + np.exp(-gate))
        return self.product(silu * up, f"{layer}mlp.down_proj")

    def after(self, h: F64, layer: str) -> F64:
        """Return h plus the MLP of its norm."""
        return h + self.mlp(self.norm(h, f"{layer}post_attention_layernorm.weight"), layer)

    def further(self, h: F64, *, first: int = 1) -> F64:
        """Run the layers from `first` on, as a decoder does."""
        for i in range(first, self.num_layers):
            layer = f"layers.{i}."
            normed = self.norm(h, f"{layer}input_layernorm.weight")
            h = self.after(h + self.attention(normed, layer), layer)
        return h


@dataclass(frozen=True, kw_only=True)
class DecoderReference(LayersReference):
    """A language model's layers and final norm: row t is tokens[t] at position t."""

    def run(self, tokens: list[int]) -> F64:
        """Return the normed hidden [T, E]."""
        h = self.weight("embed_tokens.weight")[tokens]
        return self.norm(self.further(h, first=0), "norm.weight")

    def logits(self, normed: F64) -> F64:
        return normed @ self.weight("lm_head.weight").T


@dataclass(frozen=True, kw_only=True)
class HeadReference(LayersReference, ABC):
    """The common part of all heads."""

    @abstractmethod
    def fuse(self, given: npt.NDArray[Any]) -> F64:
        """Return the target's features as the head's rows read them."""

    @abstractmethod
    def run(self, tokens: list[int], hidden: F64) -> F64:
        """Return the fed-back features [T, E] of rows 0..T-1, each a pair (tokens[t],
        hidden[t])."""

    @abstractmethod
    def logits(self, carried: F64) -> F64:
        """Return [T, U] of the fed-back features."""

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id

    def chain(
        self, tokens: list[int], given: npt.NDArray[Any], *, num_steps: int
    ) -> tuple[list[int], F64]:
        """Return greedy drafts (target ids) and the logits [num_steps, U] that chose them."""
        tokens, hidden = list(tokens), self.fuse(given)
        drafts, chosen_from = [], []
        for _ in range(num_steps):
            last = self.run(tokens, hidden)[-1:]
            chosen_from.append(self.logits(last)[0])
            drafts.append(self.target_id(int(chosen_from[-1].argmax())))
            tokens, hidden = [*tokens, drafts[-1]], np.vstack([hidden, last])
        return drafts, np.stack(chosen_from)


@dataclass(frozen=True, kw_only=True)
class Eagle3Reference(HeadReference):
    """An EAGLE-3 head. num_features: captured layers; 0 for a head that reads the last hidden.

    normed: "whole" or "each" for a norm of the features before fc. norm_head: a norm before
    lm_head. feeds_back_normed: the fed-back feature is taken after that norm.
    """

    norm_before_residual: bool = False
    num_features: int = 3
    normed: str = ""
    norm_head: bool = True
    feeds_back_normed: bool = False
    logit_scale: float = 1.0

    def fuse(self, given: npt.NDArray[Any]) -> F64:
        x = given.astype(np.float64)
        if not self.num_features:
            return x
        if self.normed == "whole":
            x = self.norm(x, "input_norm.weight")
        elif self.normed == "each":
            parts = np.split(x, self.num_features, axis=-1)
            x = np.hstack([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
        return self.product(x, "fc")

    def run(self, tokens: list[int], hidden: F64) -> F64:
        embedded = self.weight("embed_tokens.weight")[tokens]
        normed = self.norm(hidden, f"{self.layer}hidden_norm.weight")
        wide = [self.norm(embedded, f"{self.layer}input_layernorm.weight"), normed]
        h1 = normed if self.norm_before_residual else hidden
        h1 = h1 + self.attention(np.concatenate(wide, -1), self.layer)
        h2 = self.further(self.after(h1, self.layer))
        return self.norm(h2, "norm.weight") if self.feeds_back_normed else h2

    def logits(self, carried: F64) -> F64:
        if self.norm_head and not self.feeds_back_normed:
            carried = self.norm(carried, "norm.weight")
        return carried @ self.weight("lm_head.weight").T * self.logit_scale


@dataclass(frozen=True, kw_only=True)
class Eagle1Reference(HeadReference):
    """lm_head: the target's, of the draft vocabulary [U, E]. hot_ids: its target ids."""

    lm_head: npt.NDArray[Any]
    hot_ids: npt.NDArray[Any]
    norms_inputs: bool = False

    def fuse(self, given: npt.NDArray[Any]) -> F64:
        return given.astype(np.float64)

    def run(self, tokens: list[int], hidden: F64) -> F64:
        embedded = self.weight("embed_tokens.weight")[tokens]
        if self.norms_inputs:
            embedded = self.norm(embedded, "embedding_layernorm.weight")
            hidden = self.norm(hidden, "hidden_states_layernorm.weight")
        h = self.product(np.concatenate([embedded, hidden], -1), "fc")
        return self.further(self.after(h + self.attention(h, self.layer), self.layer))

    def logits(self, carried: F64) -> F64:
        return carried @ self.lm_head.astype(np.float64).T

    def target_id(self, draft_id: int) -> int:
        return int(self.hot_ids[draft_id])

"""An EAGLE-3 head in numpy float64: the specification, read off the paper and the stored names.

Independent of jspec: takes a checkpoint's tensors as they are stored ([out, in], d2t an offset)
and recomputes every row of a chain from the beginning, so it has no cache to get wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Eagle3Reference:
    tensors: Mapping[str, npt.NDArray[Any]]  # "fc.weight", "{layer}self_attn.q_proj.weight", ...
    layer: str  # "midlayer." or "layers.0."
    head_dim: int
    eps: float
    theta: float
    norm_before_residual: bool

    def weight(self, name: str) -> F64:
        return self.tensors[name].astype(np.float64)

    def norm(self, x: F64, name: str) -> F64:
        root_mean_square: F64 = np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x / root_mean_square * self.weight(name)

    def heads(self, x: F64, name: str, *, rotate: bool) -> F64:
        """[heads, T, D]; row t is rotated by position t."""
        y = x @ self.weight(f"{self.layer}self_attn.{name}.weight").T
        y = y.reshape(len(x), -1, self.head_dim).swapaxes(0, 1)
        if not rotate:
            return y
        half = self.head_dim // 2
        inverse = self.theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(x))[:, None] * inverse)  # complex numbers, not cos and sin
        turned = (y[..., :half] + 1j * y[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(self, x: F64) -> F64:
        q, k = self.heads(x, "q_proj", rotate=True), self.heads(x, "k_proj", rotate=True)
        v = self.heads(x, "v_proj", rotate=False)
        mixed = np.zeros_like(q)
        for h in range(len(q)):
            g = h * len(k) // len(q)
            for t in range(len(x)):
                scores = k[g, : t + 1] @ q[h, t] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[h, t] = weights / weights.sum() @ v[g, : t + 1]
        flat = mixed.swapaxes(0, 1).reshape(len(x), -1)
        return flat @ self.weight(f"{self.layer}self_attn.o_proj.weight").T

    def mlp(self, x: F64) -> F64:
        weights = [
            self.weight(f"{self.layer}mlp.{n}_proj.weight").T for n in ("gate", "up", "down")
        ]
        gate, up = x @ weights[0], x @ weights[1]
        silu: F64 = gate / (1 + np.exp(-gate))
        return (silu * up) @ weights[2]

    def run(self, tokens: list[int], hidden: F64) -> F64:
        """h2[T, E] of rows 0..T-1, each a pair (tokens[t], hidden[t]) at position t."""
        embedded = self.weight("embed_tokens.weight")[tokens]
        normed = self.norm(hidden, f"{self.layer}hidden_norm.weight")
        wide = [self.norm(embedded, f"{self.layer}input_layernorm.weight"), normed]
        h1 = normed if self.norm_before_residual else hidden
        h1 = h1 + self.attention(np.concatenate(wide, -1))
        return h1 + self.mlp(self.norm(h1, f"{self.layer}post_attention_layernorm.weight"))

    def fuse(self, aux_hidden: npt.NDArray[Any]) -> F64:
        return aux_hidden.astype(np.float64) @ self.weight("fc.weight").T

    def logits(self, h2: F64) -> F64:
        return self.norm(h2, "norm.weight") @ self.weight("lm_head.weight").T

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id

    def chain(
        self, tokens: list[int], aux_hidden: npt.NDArray[Any], *, num_steps: int
    ) -> tuple[list[int], F64]:
        """Greedy drafts (target ids) and the logits [num_steps, U] that chose them."""
        tokens, hidden = list(tokens), self.fuse(aux_hidden)
        drafts, chosen_from = [], []
        for _ in range(num_steps):
            last = self.run(tokens, hidden)[-1]
            chosen_from.append(self.logits(last))
            drafts.append(self.target_id(int(chosen_from[-1].argmax())))
            tokens, hidden = [*tokens, drafts[-1]], np.vstack([hidden, last])
        return drafts, np.stack(chosen_from)

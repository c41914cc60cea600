"""Block drafters in numpy float64: the specification, off the papers and stored names.

Independent of jspec: takes a checkpoint's tensors as they are stored ([out, in]) and recomputes
everything from the row's start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.models.eagle3_reference import F64, LayersReference


@dataclass(frozen=True, kw_only=True)
class BlockReference(LayersReference):
    """DFlash, DSpark and DFlash2. windows: of each layer, as config.json gives it; None: none.

    reach: keys before p - window + reach are not seen. from_root: windows count from the root.
    """

    mask_token_id: int
    windows: tuple[int | None, ...]
    reach: int = 1
    windows_from_root: bool = False
    is_causal: bool = True  # in layers with a window
    from_root: bool = False
    markov: str | None = None  # DSpark's kind of head
    num_candidates: int | None = None  # of DFlash2's selector

    def rows(self, num_steps: int) -> int:
        return num_steps + (not self.from_root)

    def run(self, root: int, features: F64, num_rows: int) -> F64:
        """The final norm's output of each row of the block, [R, E]."""
        ctx = self.norm(self.product(features, "fc"), "hidden_norm.weight")
        ids = [root, *[self.mask_token_id] * (num_rows - 1)]
        x = self.weight("embed_tokens.weight")[ids]
        for i, window in enumerate(self.windows):
            x = self.run_layer(x, ctx, f"layers.{i}.", window)
        return self.norm(x, "norm.weight")

    def run_layer(self, x: F64, ctx: F64, layer: str, window: int | None) -> F64:
        read = self.norm(x, f"{layer}input_layernorm.weight")
        x = x + self.convolved(
            f"{layer}attention_conv.", read, lambda y: self.mixed(y, ctx, layer, window)
        )
        read = self.norm(x, f"{layer}post_attention_layernorm.weight")
        return x + self.convolved(f"{layer}mlp_conv.", read, lambda y: self.mlp(y, layer))

    def convolved(self, name: str, x: F64, sublayer: Callable[[F64], F64]) -> F64:
        """A sub-layer between two convolutions, where there are any."""
        if f"{name}base_kernel" not in self.tensors:
            return sublayer(x)
        base = self.weight(f"{name}base_kernel")
        sides, taps, size = base.shape
        dynamic = self.product(x, f"{name}kernel_projection").reshape(len(x), sides, taps, -1)
        kernel = base + np.repeat(dynamic, size // dynamic.shape[-1], axis=-1)

        def convolve(y: F64, side: int) -> F64:
            out = np.zeros_like(y)
            for t in range(len(y)):
                for tap in range(min(taps, t + 1)):
                    out[t] += kernel[t, side, tap] * y[t - tap]
            return out

        return convolve(sublayer(convolve(x, 0)), 1)

    def mixed(self, x: F64, ctx: F64, layer: str, window: int | None) -> F64:
        length, size = len(ctx), len(x)
        q, own_k, own_v = self.heads(x, layer)
        _, k, v = self.heads(ctx, layer)
        k, v = np.concatenate((k, own_k), axis=1), np.concatenate((v, own_v), axis=1)
        before = np.zeros((len(q), length, self.head_dim))
        q, k = self.rotated(np.concatenate((before, q), axis=1)), self.rotated(k)
        mixed = np.zeros((len(q), size, self.head_dim))
        key = np.arange(length + size)
        for row in range(size):
            seen = np.ones(length + size, bool)
            if window is not None:
                start = length if self.windows_from_root else length + row
                seen = key >= start - window + self.reach
                if self.is_causal:
                    seen &= key <= length + row
            for h in range(len(q)):
                g = h * len(k) // len(q)
                scores = k[g, seen] @ q[h, length + row] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[h, row] = weights / weights.sum() @ v[g, seen]
        flat = mixed.swapaxes(0, 1).reshape(size, -1)
        return self.product(flat, f"{layer}self_attn.o_proj")

    def logits(self, hidden: F64) -> F64:
        return hidden @ self.weight("lm_head.weight").T

    def following(self, hidden: F64, root: int, path: list[int], *, num_steps: int) -> F64:
        """The logits of what follows a path of drafts. hidden: of all rows of the block."""
        before = [root] * (len(hidden) - num_steps) + [root, *path]
        row = len(before) - 1
        logits: F64 = self.logits(hidden[row])
        if self.num_candidates is not None:
            selector = "candidate_selector."
            best = np.argsort(-logits, kind="stable")[: self.num_candidates]
            context = self.weight(f"{selector}predecessor_codebook")[before[row]]
            context = context * self.product(hidden[row], f"{selector}hidden_projection")
            scores = np.full_like(logits, -np.inf)
            more = self.weight(f"{selector}successor_codebook")[best] @ context
            scores[best] = logits[best] + more
            return scores
        if self.markov is None:
            return logits
        entry = self.weight("markov_head.markov_w1.weight")[before]
        state = np.zeros(entry.shape[1])
        m = entry[row]
        if self.markov == "gated":
            gate = self.product(np.hstack((hidden[row], m)), "markov_head.gate_proj")
            m = m / (1 + np.exp(-gate))
        if self.markov == "rnn":
            for each, x in zip(entry, hidden[: row + 1], strict=True):
                joint = self.product(np.hstack((state, each, x)), "markov_head.joint_proj")
                gate, new, m = np.split(joint, 3)
                gate = 1 / (1 + np.exp(-gate))
                state, m = gate * state + (1 - gate) * np.tanh(new), np.tanh(m)
        return logits + self.weight("markov_head.markov_w2.weight") @ m

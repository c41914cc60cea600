"""MiMo-V2-Flash in numpy float64, from the published names: the target and its draft layers.

Independent of jspec: one text at a time, no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.models.mtp_reference import F64, MtpReference


@dataclass(frozen=True, kw_only=True)
class MimoV2Reference:
    """config: as published. tensors: as stored."""

    config: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]

    def weight(self, name: str) -> F64:
        return self.tensors[name].astype(np.float64)

    def norm(self, x: F64, name: str) -> F64:
        root: F64 = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / root * self.weight(f"{name}.weight")

    def rotated(self, x: F64, theta: float) -> F64:
        """Rotate the first dimensions of each head of x[T, heads, D]; the others stay."""
        size = int(x.shape[-1] * self.config["partial_rotary_factor"])
        half = size // 2
        inverse = theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(x))[:, None, None] * inverse)
        turned = (x[..., :half] + 1j * x[..., half:size]) * turn
        return np.concatenate([turned.real, turned.imag, x[..., size:]], -1)

    def attention(self, prefix: str, x: F64, *, is_sliding: bool) -> F64:
        config, name = self.config, f"{prefix}self_attn."
        theta = config["swa_rope_theta" if is_sliding else "rope_theta"]
        window = config["sliding_window_size"] + 1 if is_sliding else len(x)
        width, v_width = config["head_dim"], config["v_head_dim"]
        q, k = (
            self.rotated(
                (x @ self.weight(f"{name}{p}_proj.weight").T).reshape(len(x), -1, width), theta
            )
            for p in "qk"
        )
        v = (x @ self.weight(f"{name}v_proj.weight").T).reshape(len(x), -1, v_width)
        v = v * config["attention_value_scale"]
        sinks = self.weight(f"{name}attention_sink_bias") if is_sliding else None
        mixed = np.zeros((len(x), q.shape[1], v_width))
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            for t in range(len(x)):
                seen = slice(max(t + 1 - window, 0), t + 1)
                weights = np.exp(k[seen, g] @ q[t, h] / np.sqrt(width))
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
                mixed[t, h] = weights / total @ v[seen, g]
        return mixed.reshape(len(x), -1) @ self.weight(f"{name}o_proj.weight").T

    def mlp(self, name: str, x: F64) -> F64:
        gate, up, down = (self.weight(f"{name}{p}_proj.weight").T for p in ("gate", "up", "down"))
        gated = x @ gate
        out: F64 = (gated / (1 + np.exp(-gated)) * (x @ up)) @ down
        return out

    def moe(self, prefix: str, x: F64) -> F64:
        """Run each token alone: experts by score plus bias, weighted by scores that sum to one."""
        bias = self.weight(f"{prefix}mlp.gate.e_score_correction_bias")
        out = np.zeros_like(x)
        for t, token in enumerate(x):
            scores = 1 / (1 + np.exp(-self.weight(f"{prefix}mlp.gate.weight") @ token))
            chosen = np.argsort(-(scores + bias))[: self.config["num_experts_per_tok"]]
            for e in chosen:
                expert = self.mlp(f"{prefix}mlp.experts.{e}.", token)
                out[t] += scores[e] / scores[chosen].sum() * expert
        return out

    def layer(self, prefix: str, x: F64, *, is_sliding: bool, is_sparse: bool, post: str) -> F64:
        normed = self.norm(x, f"{prefix}input_layernorm")
        x = x + self.attention(prefix, normed, is_sliding=is_sliding)
        normed = self.norm(x, f"{prefix}{post}")
        return x + (self.moe(prefix, normed) if is_sparse else self.mlp(f"{prefix}mlp.", normed))

    def run(self, tokens: list[int]) -> tuple[F64, F64]:
        """Return (residual after the last layer, logits) of a text."""
        x = self.weight("model.embed_tokens.weight")[tokens]
        kinds = zip(self.config["hybrid_layer_pattern"], self.config["moe_layer_freq"], strict=True)
        for i, (is_sliding, is_sparse) in enumerate(kinds):
            x = self.layer(
                f"model.layers.{i}.",
                x,
                is_sliding=bool(is_sliding),
                is_sparse=bool(is_sparse),
                post="post_attention_layernorm",
            )
        return x, self.norm(x, "model.norm") @ self.weight("lm_head.weight").T


@dataclass(frozen=True, kw_only=True)
class MimoV2Layers(MtpReference):
    """Its layers for multi-token prediction: sliding, dense."""

    target: MimoV2Reference

    def block(self, layer: int, x: F64) -> F64:
        prefix = self.prefix.format(layer)
        return self.target.layer(
            prefix, x, is_sliding=True, is_sparse=False, post="pre_mlp_layernorm"
        )

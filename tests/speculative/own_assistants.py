"""A tiny assistant of TARGET's caches: its weights, and its guesses in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.models.files.stored.tensors import value_at
from jspec.models.heads.assistant import assistant_params
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.spec.assistant_spec import AssistantSpec
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import RopeConfig
from jspec.spec.sandwich import SandwichSpec
from tests.speculative.engines import TARGET

F64 = npt.NDArray[np.float64]
SIZE = TARGET.hidden_size
KV = TARGET.one_layer.softmax_attention
HEADS, GROUPS, DIM = KV.num_heads, KV.num_kv_heads, KV.head_dim
OWN = replace(KV, qk_norm=True, v_norm=True, scale=1.0, rope=RopeConfig(theta=500.0, turned=0.5))
CACHES = (TARGET.num_layers - 1, 0)
WIDTH = len(CACHES) * 2 * GROUPS * DIM  # of a token's K and V in both caches
SPEC = AssistantSpec(
    layer=ModelSpec(
        vocab_size=TARGET.vocab_size,
        hidden_size=SIZE,
        layers=tuple(
            SandwichSpec(
                attention=replace(OWN, kv_of=cache),
                ffn=DenseSpec(inner=24, gelu=True),
                eps=TARGET.rms_norm_eps,
            )
            for cache in CACHES
        ),
        rms_norm_eps=TARGET.rms_norm_eps,
    ),
    target_size=SIZE,
    caches=CACHES,
)


@functools.cache
def own_params() -> Params:
    return init_params(assistant_params(SPEC), seed=5)


@dataclass(frozen=True)
class AssistantGuesses:
    """params: with the target's embedding. A row of features is a hidden, then K and V in pages'
    order, cache after cache."""

    params: Params

    def log_probs(self, tokens: list[int], features: F64, path: list[int]) -> F64:
        hidden, kv = features[-1, :SIZE].astype(np.float64), features[:, SIZE:]
        pools = kv.reshape(len(kv), len(CACHES), GROUPS, 2, DIM).astype(np.float64)
        logits = np.zeros(0)
        for token in (tokens[-1], *path):
            out, hidden = self._run(token, hidden, pools, position=len(tokens) - 1)
            logits = out @ self._weight("lm_head", "kernel")
        shifted: F64 = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    def _weight(self, *path: Any) -> F64:
        return np.asarray(value_at(self.params, path)).astype(np.float64)

    def _run(self, token: int, hidden: F64, pools: F64, *, position: int) -> tuple[F64, F64]:
        pair = np.concatenate((self._weight("embed", "table")[token], hidden))
        x = pair @ self._weight("pre", "kernel")
        for i in range(len(CACHES)):
            x = self._layer(x, i, pools[:, i], position=position)
        out = _norm(x, self._weight("norm", "scale"))
        return out, out @ self._weight("post", "kernel")

    def _layer(self, x: F64, i: int, pool: F64, *, position: int) -> F64:
        def normed(value: F64, name: str) -> F64:
            return _norm(value, self._weight("layers", i, name, "scale"))

        def product(value: F64, *path: str) -> F64:
            return value @ self._weight("layers", i, *path, "kernel")

        q = product(normed(x, "input_norm"), "attention", "qkv").reshape(HEADS, DIM)
        q = _turned(_norm(q, self._weight("layers", i, "attention", "q_norm", "scale")), position)
        mixed = np.zeros_like(q)
        for head in range(HEADS):
            k, v = pool[:, head * GROUPS // HEADS].swapaxes(0, 1)
            scores = k @ q[head]
            weights = np.exp(scores - scores.max())
            mixed[head] = weights / weights.sum() @ v
        x = x + normed(product(mixed.reshape(-1), "attention", "out"), "attention_norm")
        gate, up = np.split(product(normed(x, "post_norm"), "mlp", "gate_up"), 2)
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + normed(product(gelu * up, "mlp", "down"), "ffn_norm")
        return x * self._weight("layers", i, "factor")[0]


def _norm(x: F64, scale: F64) -> F64:
    mean_square = (x * x).mean(-1, keepdims=True)
    normed: F64 = x / np.sqrt(mean_square + TARGET.rms_norm_eps) * scale
    return normed


def _turned(q: F64, position: int) -> F64:
    """Half of the pairs turn."""
    half = DIM // 2
    inverse = 500.0 ** (-np.arange(half) / half)
    inverse[half // 2 :] = 0.0
    turned = (q[:, :half] + 1j * q[:, half:]) * np.exp(1j * position * inverse)
    return np.concatenate([turned.real, turned.imag], -1)

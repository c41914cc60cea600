"""Training of a small language model as a draft (STANDALONE) by distillation from the target
(arXiv:2310.08461). There is one depth: position t + 1 predicts token t + 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.models.files.checkpoint import save_target
from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.training.dense import causal_attend, forward, init_target, lm_logits, with_lm_head
from jspec.training.heads.draft_head import Guess, TargetFeatures


@dataclass(frozen=True, slots=True)
class TrainedLm:
    """A decoder that shares only the vocabulary with its target; all of it is trained."""

    spec: ModelSpec

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return ()

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        del target_params, draft_ids
        return init_target(self.spec, seed=seed)

    def whole(self, params: Params, target_params: Params, draft_ids: Any) -> Params:
        del target_params, draft_ids
        return with_lm_head(params)

    def guesses(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        features: TargetFeatures,
        *,
        num_depths: int,
        dtype: DTypeLike,
        roots: jax.Array | None = None,
    ) -> list[Guess]:
        del features, num_depths, roots
        hidden, _ = forward(self.spec, params, token_ids, dtype=dtype, attend=causal_attend("xla"))
        return [Guess(logits=lm_logits(params, hidden[:, 1:]))]

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        del draft_ids, target
        save_target(folder, self.spec, jax.device_get(with_lm_head(params)), dtype=dtype)


def lm_head_of(
    target: ModelSpec, *, hidden_size: int, intermediate_size: int, num_layers: int, head_dim: int
) -> TrainedLm:
    """Return a Llama with tied embeddings, two query heads per KV head, and the target's ids."""
    num_heads = hidden_size // head_dim
    return TrainedLm(
        uniform_decoder(
            vocab_size=target.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=max(num_heads // 2, 1),
            head_dim=head_dim,
            tie_word_embeddings=True,
            max_position=target.max_position,
            eos_token_ids=target.eos_token_ids,
            bos_token_id=target.bos_token_id,
        )
    )

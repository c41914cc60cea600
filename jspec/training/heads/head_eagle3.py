"""Training of an EAGLE-3 head, unrolled over its own outputs (training-time test)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.errors import ConfigError
from jspec.models.heads.eagle3 import save_eagle3
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec, eagle3_spec
from jspec.spec.model_spec import ModelSpec
from jspec.training.heads.draft_head import Guess, TargetFeatures, layers_over, plain_layer
from jspec.training.heads.unrolled_attention import unroll_head


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """The weights of an EAGLE-3 head in training; the embedding is the target's."""

    spec: HeadSpec

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.spec.aux_layer_ids

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        return init_eagle3(self.spec, target_params, draft_ids, seed=seed)

    def whole(self, params: Params, target_params: Params, draft_ids: Any) -> Params:
        table = target_params["embed"]["table"]
        return {**params, "embed": {"table": table}, "draft_ids": draft_ids}


@dataclass(frozen=True, slots=True)
class TrainedEagle3(Eagle3Weights):
    """An EAGLE-3 head of one layer that feeds back its unnormed output (else ConfigError)."""

    def __post_init__(self) -> None:
        if self.spec.layer.num_layers != 1 or self.spec.feeds_back_normed:
            raise ConfigError(
                f"the head has {self.spec.layer.num_layers} layers and feeds_back_normed is "
                f"{self.spec.feeds_back_normed}; expected 1 and False, which is all that is "
                "trained here"
            )

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
        del roots
        head = FeatureHead(self.spec, Ops())
        given = features.aux if self.spec.aux_layer_ids else features.hidden
        hidden = head.features(params, given.astype(dtype))
        outs = unroll_head(self.spec, params, token_ids, hidden, num_depths=num_depths)
        return [Guess(logits=head.logits(params, out)) for out in outs]

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        del target
        own = {name: x for name, x in params.items() if name != "embed"}
        host = {**jax.device_get(own), "draft_ids": draft_ids}
        save_eagle3(folder, self.spec, host, dtype=dtype)


def init_eagle3(
    spec: HeadSpec, target_params: Params, draft_ids: np.ndarray, *, seed: int
) -> Params:
    """Return random parameters, except that the final norm and lm_head are the target's."""
    params = init_params(head_params(spec), seed=seed)
    del params["embed"], params["draft_ids"]
    if spec.target_hidden_size == spec.layer.hidden_size:
        kernel = jnp.asarray(target_params["lm_head"]["kernel"], jnp.float32)
        params["lm_head"]["kernel"] = kernel[:, draft_ids]
        params["norm"]["scale"] = jnp.asarray(target_params["norm"]["scale"], jnp.float32)
    return params


def eagle3_head(
    target: ModelSpec,
    *,
    draft_vocab_size: int,
    intermediate_size: int,
    aux_layer_ids: tuple[int, ...],
) -> TrainedEagle3:
    return TrainedEagle3(
        eagle3_spec(
            layer=layers_over(target, (plain_layer(target, intermediate_size=intermediate_size),)),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=aux_layer_ids,
        )
    )

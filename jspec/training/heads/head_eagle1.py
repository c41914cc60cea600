"""Training of an EAGLE-1 head (arXiv:2401.15077): it predicts the target's next feature, and from
it the next token. It is unrolled over its own outputs, as in HASS (arXiv:2408.15766)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.models.heads.eagle1 import save_eagle1
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec, eagle1_spec
from jspec.spec.model_spec import ModelSpec
from jspec.training.heads.draft_head import Guess, TargetFeatures, layers_over, plain_layer
from jspec.training.heads.unrolled_attention import unroll_head


@dataclass(frozen=True, slots=True)
class TrainedEagle1:
    """One layer after fc; embedding and lm_head are the target's and not trained."""

    spec: HeadSpec

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return ()

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        del target_params, draft_ids
        params = init_params(head_params(self.spec), seed=seed)
        del params["embed"], params["lm_head"], params["draft_ids"]
        return params

    def whole(self, params: Params, target_params: Params, draft_ids: Any) -> Params:
        shared = {name: target_params[name] for name in ("embed", "lm_head")}
        return {**params, **shared, "draft_ids": draft_ids}

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
        hidden = features.hidden.astype(dtype)
        outs = unroll_head(self.spec, params, token_ids, hidden, num_depths=num_depths)
        head = FeatureHead(self.spec, Ops())
        return [Guess(logits=head.logits(params, out), feature=out) for out in outs]

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        """Write the head with a zero fc bias, which SGLang would otherwise leave uninitialised."""
        del draft_ids, target
        shared = ("embed", "lm_head")  # the target's, which are not stored
        whole = jax.device_get({name: x for name, x in params.items() if name not in shared})
        layer, bias = whole["layers"][0], np.zeros(self.spec.layer.hidden_size, np.float32)
        whole["layers"] = {0: {**layer, "fuse": {**layer["fuse"], "bias": bias}}}
        save_eagle1(folder, replace(self.spec, fc_bias=True), whole, dtype=dtype)


def eagle1_head(target: ModelSpec, *, intermediate_size: int) -> TrainedEagle1:
    """Return a head with its target's sizes; fc has no bias, as in Llama 3's published head."""
    layer = plain_layer(target, intermediate_size=intermediate_size)
    return TrainedEagle1(
        eagle1_spec(
            layer=layers_over(target, (layer,)),
            draft_vocab_size=target.vocab_size,
            fc_bias=False,
        )
    )

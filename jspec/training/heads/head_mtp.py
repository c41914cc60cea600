"""Training of layers for multi-token prediction, one KV pool each (multi-layer EAGLE).

Layer s reads only the pairs (the target's feature i, token i + s + 1) of positions 0..i, so depth s
is one causal forward of layer s over the whole row. The layout is MiMo-V2-Flash's, whose layers all
read the target's hidden before its final norm. In a chain (Step-3.5-Flash's layout) layer s instead
reads layer s - 1's output at the same position, before its final norm, and every layer has its own
lm_head, initialised from the target's.
"""

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
from jspec.layers.embedding import embed
from jspec.models.heads.feature_head import FeatureHead, run_first_layer
from jspec.models.heads.head_params import head_params
from jspec.models.heads.mtp import save_mtp, shared, written_config
from jspec.models.layer import LayerSettings, Params
from jspec.models.placement import init_params
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import ModelSpec
from jspec.training.dense import causal_attend
from jspec.training.heads.draft_head import Guess, TargetFeatures, plain_layer


@dataclass(frozen=True, slots=True)
class TrainedMtp:
    """One layer per depth (else ConfigError); embedding and shared lm_head are not trained."""

    spec: HeadSpec

    def __post_init__(self) -> None:
        if not self.spec.per_level or self.spec.feeds_back_normed:
            raise ConfigError(
                f"per_level is {self.spec.per_level} and feeds_back_normed is "
                f"{self.spec.feeds_back_normed}; expected True and False, which is all that is "
                "trained here"
            )

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.spec.aux_layer_ids

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        """Return random parameters, but the target's final norm and, if not shared, lm_head."""
        del draft_ids
        params = init_params(head_params(self.spec), seed=seed)
        for layer in params["layers"].values():
            layer["norm"]["scale"] = jnp.asarray(target_params["norm"]["scale"], jnp.float32)
            if self.spec.own_head:
                kernel = jnp.asarray(target_params["lm_head"]["kernel"], jnp.float32)
                layer["lm_head"]["kernel"] = kernel
        return {"layers": params["layers"]}

    def whole(self, params: Params, target_params: Params, draft_ids: Any) -> Params:
        del draft_ids
        return {**params, **{name: target_params[name] for name in shared(self.spec)}}

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
        head, attend_of = FeatureHead(self.spec, Ops()), causal_attend("xla")
        hidden = (features.aux if self.spec.aux_layer_ids else features.hidden).astype(dtype)
        batch_size, length = token_ids.shape
        padded = jnp.pad(token_ids, ((0, 0), (0, num_depths)))
        positions = jnp.broadcast_to(jnp.arange(length), (batch_size, length))
        found = []
        for i in range(num_depths):
            spec, ids = self.spec.layer.layers[i], padded[:, 1 + i : 1 + i + length]
            out = run_first_layer(
                params["layers"][i],
                embed(params["embed"], ids).astype(dtype),
                hidden,
                positions,
                attend_of(spec.softmax_attention),
                head=self.spec,
                spec=spec,
                settings=LayerSettings(Ops()),
            )
            found.append(Guess(logits=head.logits(params, out[:, : length - 1 - i], level=i)))
            if self.spec.chained:
                hidden = out
        return found

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        """Write the layers; in a chain with the target's embedding, which SGLang does not share."""
        del draft_ids
        stored = ("layers", "embed") if self.spec.chained else ("layers",)
        host = jax.device_get({name: params[name] for name in stored})
        save_mtp(folder, self.spec, host, target=target, dtype=dtype)


def mtp_head(
    target: ModelSpec, *, num_layers: int, intermediate_size: int, chained: bool = False
) -> TrainedMtp:
    layer = plain_layer(target, intermediate_size=intermediate_size)
    return TrainedMtp(written_config(target, layer, num_layers=num_layers, chained=chained))

"""Training of a P-EAGLE head: the first level from the text's pairs, the others from masks at once.

The pairs (token t + 1, feature t) run through all layers, causally; slot t gives the first level
after root t + 1. At random roots, a mask for each further level attends to the pairs before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.layers.embedding import embed
from jspec.layers.norm import Residual
from jspec.models.heads.eagle3 import save_eagle3
from jspec.models.heads.feature_head import FeatureHead, run_first_layer
from jspec.models.layer import LayerSettings, Params, run_layer
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import eagle3_spec
from jspec.spec.model_spec import ModelSpec
from jspec.training.heads.anchored_attention import (
    AnchoredAttention,
    RecordedText,
    block_positions,
)
from jspec.training.heads.draft_head import (
    Guess,
    TargetFeatures,
    layers_over,
    plain_layer,
)
from jspec.training.heads.head_eagle3 import Eagle3Weights


@dataclass(frozen=True, slots=True)
class TrainedParallel(Eagle3Weights):
    """An EAGLE-3 head with a mask token, of any number of layers."""

    def guesses(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        features: TargetFeatures,
        *,
        num_depths: int,
        dtype: DTypeLike,
        roots: Int[Array, "B A"] | None = None,
    ) -> list[Guess]:
        if roots is None:
            raise ValueError("roots is None; expected those of the masks")
        head = FeatureHead(self.spec, Ops())
        text = [RecordedText(layer.softmax_attention) for layer in self.spec.layer.layers]
        length, size = token_ids.shape[1], num_depths - 1
        hidden = head.features(params, features.aux.astype(dtype))
        embedded = embed(params["embed"], jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1))))
        positions = jnp.broadcast_to(jnp.arange(length), token_ids.shape)
        out = self._run(params, embedded.astype(dtype), hidden, positions, text)
        found = [Guess(logits=head.logits(params, out[:, : length - 1]))]
        if not size:
            return found
        blocks = [
            AnchoredAttention(own.keys, own.values, roots, spec=own.spec, is_causal=True)
            for own in text
        ]
        places = block_positions(roots, size=size)
        masks = jnp.full(places.shape, head.mask_token_id)
        embedded = embed(params["embed"], masks).astype(dtype)
        mask = jnp.broadcast_to(head.mask_feature(params).astype(dtype), embedded.shape)
        out = self._run(params, embedded, mask, places, blocks).reshape(*roots.shape, size, -1)
        return found + [
            Guess(logits=head.logits(params, out[:, :, i]), roots=roots) for i in range(size)
        ]

    def _run(
        self,
        params: Params,
        embedded: Float[Array, "*b E"],
        hidden: Float[Array, "*b E"],
        positions: Int[Array, "*b"],
        attends: list[Any],
    ) -> Float[Array, "*b E"]:
        layers, settings = self.spec.layer.layers, LayerSettings(Ops())
        out = run_first_layer(
            params["layers"][0],
            embedded,
            hidden,
            positions,
            attends[0],
            head=self.spec,
            spec=layers[0],
            settings=settings,
        )
        stream = Residual(x=out)
        for i, spec in enumerate(layers[1:], start=1):
            own = params["layers"][i]
            stream = run_layer(own, stream, positions, attends[i], spec=spec, settings=settings)
        return stream.sum()

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        del target
        own = {name: x for name, x in params.items() if name != "embed"}
        host = {**jax.device_get(own), "draft_ids": draft_ids}
        save_eagle3(folder, self.spec, host, dtype=dtype)


def parallel_head(
    target: ModelSpec,
    *,
    draft_vocab_size: int,
    num_layers: int,
    intermediate_size: int,
    aux_layer_ids: tuple[int, ...],
    mask_token_id: int,
) -> TrainedParallel:
    layer = plain_layer(target, intermediate_size=intermediate_size)
    return TrainedParallel(
        eagle3_spec(
            layer=layers_over(target, (layer,) * num_layers),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=aux_layer_ids,
            mask_token_id=mask_token_id,
        )
    )

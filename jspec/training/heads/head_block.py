"""Training of heads that draft a block at once: DFlash, DFlash2 and DSpark.

A block runs at every root of a row (`anchored_attention`) and learns the tokens after it. A Markov
head or a selector is given the text's own tokens. Embedding and lm_head are not trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.errors import ConfigError
from jspec.layers.attention import project
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm
from jspec.models.heads.block_head import BlockHead, run_block_layer
from jspec.models.heads.dflash import block_params, save_block
from jspec.models.layer import LayerSettings, Params
from jspec.models.placement import init_params
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.block_spec import (
    BlockSpec,
    ConvolutionSpec,
    MarkovKind,
    MarkovSpec,
    SelectorSpec,
)
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope import RopeConfig
from jspec.training.heads.anchored_attention import AnchoredAttention, block_positions
from jspec.training.heads.draft_head import (
    Guess,
    TargetFeatures,
    layers_over,
    plain_layer,
)

CONVOLUTION = ConvolutionSpec(taps=2, group_size=16)  # as published
NUM_CANDIDATES = 16
SMALL = 0.01  # deviation of the previous token's entries, so that their terms start near 0


@dataclass(frozen=True, slots=True)
class TrainedBlock:
    """A block drafter over its target's whole vocabulary, without windows."""

    spec: BlockSpec

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.spec.aux_layer_ids

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        """Return random parameters, with the target's final norm and convolutions without
        effect."""
        del draft_ids
        params = init_params(block_params(self.spec), seed=seed)
        for name in ("embed", "lm_head", "draft_ids"):
            del params[name]
        params["norm"]["scale"] = jnp.asarray(target_params["norm"]["scale"], jnp.float32)
        for layer in params["layers"].values():
            for own in (layer[name] for name in ("attention_conv", "mlp_conv") if name in layer):
                own["base"] = jnp.zeros_like(own["base"]).at[:, 0].set(1.0)
                own["dynamic"]["kernel"] = jnp.zeros_like(own["dynamic"]["kernel"])
        for own in (params[name] for name in ("markov", "selector") if name in params):
            own["before"] = SMALL * own["before"] / jnp.std(own["before"])
        if self.spec.markov is not None:
            width = self.spec.layer.hidden_size + self.spec.markov.rank
            params["confidence"] = {"kernel": jnp.zeros((width, 1)), "bias": jnp.zeros(1)}
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
        roots: Int[Array, "B A"] | None = None,
    ) -> list[Guess]:
        if roots is None:
            raise ValueError("roots is None; expected those of a block drafter's blocks")
        hidden = self._run_blocks(params, token_ids, features, roots, dtype=dtype)
        hidden = hidden[:, -self.spec.most_steps :]
        flat = _next_ids(token_ids, roots, num_depths)
        head, found = BlockHead(self.spec, Ops()), []
        state = None if self.spec.markov is None else head.no_state(len(hidden), hidden.dtype)
        for i in range(num_depths):
            row, before = hidden[:, i], flat[:, i : i + 1]
            logits = head.logits(params, row)
            reranked = confidence = None
            if state is not None:
                state, more = head.markov(params, before, row, state)
                logits = logits + more[:, 0]
                confidence = self._confidence(params, row, before[:, 0])
            if self.spec.selector is not None:
                context = head.transition_context(params, before, row)[:, 0]
                reranked = logits + logits_of(context, params["selector"]["after"].T)
            found.append(
                Guess(
                    logits=_apart(logits, roots),
                    roots=roots,
                    reranked=None if reranked is None else _apart(reranked, roots),
                    confidence=None if confidence is None else _apart(confidence, roots),
                    num_candidates=self.spec.selector.num_candidates if self.spec.selector else 0,
                )
            )
        return found

    def _run_blocks(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        features: TargetFeatures,
        roots: Int[Array, "B A"],
        *,
        dtype: DTypeLike,
    ) -> Float[Array, "N R E"]:
        spec, size = self.spec, self.spec.block_size
        head, settings = BlockHead(spec, Ops()), LayerSettings(Ops(), queries_per_row=size)
        ctx = head.context(params, features.aux.astype(dtype))
        root_ids = jnp.take_along_axis(token_ids, roots, axis=1, mode="clip")
        ids = jnp.full((*roots.shape, size), spec.mask_token_id).at[..., 0].set(root_ids)
        stream = Residual(x=embed(params["embed"], ids.reshape(-1)).astype(dtype))
        for i, layer in enumerate(spec.layer.layers):
            own = params["layers"][i]
            keys, values = _keys_and_values(own["attention"], ctx, spec=layer)
            attention = layer.softmax_attention
            attend = AnchoredAttention(keys, values, roots, spec=attention, is_causal=False)
            stream = run_block_layer(
                own,
                stream,
                block_positions(roots, size=size),
                attend,
                spec=layer,
                settings=settings,
                convolution=spec.convolution,
            )
        out = norm(params["norm"], stream.sum(), eps=spec.layer.rms_norm_eps)
        return out.reshape(-1, size, out.shape[-1])

    def _confidence(
        self, params: Params, hidden: Float[Array, "N E"], before: Int[Array, "N"]
    ) -> Float[Array, "N"] | None:
        if "confidence" not in params:  # of a head as it is served
            return None
        entries = jnp.take(params["markov"]["before"], before, axis=0, mode="clip")
        joined = jnp.concatenate((hidden, entries), axis=-1)
        return linear(params["confidence"], joined, ops=Ops())[:, 0].astype(jnp.float32)

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        del draft_ids, target
        own = {name: x for name, x in params.items() if name not in ("embed", "lm_head")}
        save_block(folder, self.spec, jax.device_get(own), dtype=dtype)


def trained_block(
    target: ModelSpec,
    *,
    num_layers: int,
    num_depths: int,
    intermediate_size: int,
    aux_layer_ids: tuple[int, ...],
    mask_token_id: int,
    markov_rank: int | None = None,
    selector_rank: int | None = None,
) -> TrainedBlock:
    """Return a head with its target's attention heads and RoPE theta, as published. markov_rank:
    DSpark, whose root also predicts. selector_rank: DFlash2. Neither: DFlash."""
    layer = plain_layer(target, intermediate_size=intermediate_size)
    rope = RopeConfig(theta=target.layers[-1].softmax_attention.rope.theta)
    layer = replace(layer, attention=replace(layer.softmax_attention, qk_norm=True, rope=rope))
    own: dict[str, Any] = {}
    if markov_rank is not None:
        own = {"markov": MarkovSpec(rank=markov_rank, kind=MarkovKind.VANILLA)}
    elif selector_rank is not None:
        own = {
            "convolution": CONVOLUTION,
            "selector": SelectorSpec(
                rank=selector_rank, num_candidates=min(NUM_CANDIDATES, target.vocab_size)
            ),
        }
    return TrainedBlock(
        BlockSpec(
            layer=layers_over(target, (layer,) * num_layers),
            draft_vocab_size=target.vocab_size,
            aux_layer_ids=aux_layer_ids,
            block_size=num_depths + (markov_rank is None),
            mask_token_id=mask_token_id,
            from_root=markov_rank is not None,
            causal_windows=selector_rank is None,
            windows_from_root=True,
            **own,
        )
    )


def default_block_layer_ids(num_layers: int, *, count: int) -> tuple[int, ...]:
    """Return ids of `count` captures, evenly from the output of layer 1 to that of layer L - 3.
    Raises ConfigError for too small a target."""
    if count == 1:
        return (num_layers // 2 + 1,)
    ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))
    if list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ConfigError(
            f"a target of {num_layers} layers has no {count} default captures; expected "
            "aux_layer_ids, or fewer layers of the head"
        )
    return ids


def _keys_and_values(
    params: Params, ctx: Float[Array, "B T E"], *, spec: LayerSpec
) -> tuple[Float[Array, "B T G D"], Float[Array, "B T G D"]]:
    positions = jnp.broadcast_to(jnp.arange(ctx.shape[1]), ctx.shape[:2])
    how: Any = {"spec": spec.softmax_attention, "eps": spec.eps, "shard": Shard(), "ops": Ops()}
    _, keys, values = rotate_and_split(*project(params, ctx, positions, **how))
    return keys, values


def _next_ids(token_ids: jax.Array, roots: jax.Array, count: int) -> Int[Array, "N S"]:
    places = block_positions(roots, size=count).reshape(len(roots), -1)
    return jnp.take_along_axis(token_ids, places, axis=1, mode="clip").reshape(-1, count)


def _apart(x: jax.Array, roots: jax.Array) -> jax.Array:
    return x.reshape(*roots.shape, *x.shape[1:])

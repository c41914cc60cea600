"""A draft head as hashable host data: its inputs and how it joins them, layers and vocabulary. Slot
i is of the pair (token i + 1, feature of position i)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jspec.errors import ConfigError
from jspec.spec.model_spec import ModelSpec


class Join(enum.Enum):
    """How the first layer reads the token's embedding e and the feature h."""

    PROJECTED = "a product gives [e; h] the width of h, and an ordinary layer runs over it"
    WIDE = "attention reads [e; h]; the residual is h"


class FeatureNorm(enum.Enum):
    """RMSNorm on the target's captured layers before the product that fuses them."""

    NONE = "nothing"
    WHOLE = "all features side by side, by one RMSNorm (norm_before_fc)"
    EACH = "each layer's feature by an RMSNorm of its own (fc_norm)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A draft head over pairs of a token and a feature."""

    layer: ModelSpec  # its decoder layers; vocab_size is the target's V
    draft_vocab_size: int  # U
    target_hidden_size: int
    join: Join
    # The target's residual stream is captured at the INPUT of these layers; the number of layers
    # means after the last one. Empty: the head reads the last hidden state, after the final norm.
    aux_layer_ids: tuple[int, ...] = ()
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norms_pair: bool = True  # e and h are normed before they are joined
    hidden_first: bool = False  # [h; e], else [e; h]
    input_norm: bool = False  # the first layer norms its input from PROJECTED; others always do
    norm_before_residual: bool = False  # the residual of WIDE is the normed h
    fc_bias: bool = False  # of the product, whichever of the two there is
    norm_before_head: bool = True  # lm_head reads the normed output
    own_head: bool = False  # lm_head is not the target's
    feeds_back_normed: bool = False  # the next draft forward reads the normed output
    logit_scale: float = 1.0  # factor of the logits
    zeroes_first: bool = False  # the embedding of the token at slot 0 is zero
    # All levels are drafted in one forward (P-EAGLE): after the last pair come pairs of this token
    # and a learned feature, one for each further level.
    mask_token_id: int | None = None
    # Layer s alone drafts level s + 1, with its own pair, norm, lm_head and pool; its slot i is of
    # the pair (token i + s + 1, h). Otherwise all layers run at every level.
    per_level: bool = False
    chained: bool = False  # layer s takes h from layer s - 1 at the same slot, not from the target

    def __post_init__(self) -> None:
        if list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise ConfigError(f"aux layer ids are {self.aux_layer_ids}; expected them to ascend")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}; expected an id of the vocabulary of "
                f"{self.layer.vocab_size}"
            )
        if self.feeds_back_normed and not self.norm_before_head:
            raise ConfigError("feeds_back_normed is True without norm_before_head; expected both")
        if self.join is Join.PROJECTED or self.fuses_features:
            return
        if self.feature_norm is not FeatureNorm.NONE or self.fc_bias:
            raise ConfigError(
                f"a head without aux layers has feature_norm {self.feature_norm.name} and fc_bias "
                f"{self.fc_bias}; expected neither, since it has no fc"
            )
        if self.target_hidden_size != self.layer.hidden_size:
            raise ConfigError(
                f"hidden_size is {self.layer.hidden_size}; expected the target's "
                f"{self.target_hidden_size}, since a head without aux layers has no fc"
            )

    @property
    def fuses_features(self) -> bool:
        """True if a product turns the captured layers into the feature, after feature_norm."""
        return self.join is Join.WIDE and bool(self.aux_layer_ids)

    @property
    def num_layers(self) -> int:
        return self.layer.num_layers

    def stack(self, level: int) -> range:
        """Return the layers that run at a level of the draft; levels start at 0."""
        return range(level, level + 1) if self.per_level else range(self.num_layers)


def eagle1_spec(
    *, layer: ModelSpec, draft_vocab_size: int, fc_bias: bool = True, norms_inputs: bool = False
) -> HeadSpec:
    """Return an EAGLE-1 or EAGLE-2 head; lm_head is the target's, or its columns of U ids."""
    return HeadSpec(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=layer.hidden_size,
        join=Join.PROJECTED,
        norms_pair=norms_inputs,
        fc_bias=fc_bias,
        norm_before_head=False,
    )


def eagle3_spec(
    *,
    layer: ModelSpec,
    draft_vocab_size: int,
    target_hidden_size: int,
    aux_layer_ids: tuple[int, ...],
    feature_norm: FeatureNorm = FeatureNorm.NONE,
    fc_bias: bool = False,
    norm_before_residual: bool = False,
    norm_before_head: bool = True,
    feeds_back_normed: bool = False,
    logit_scale: float = 1.0,
    mask_token_id: int | None = None,
) -> HeadSpec:
    return HeadSpec(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        join=Join.WIDE,
        aux_layer_ids=aux_layer_ids,
        feature_norm=feature_norm,
        fc_bias=fc_bias,
        norm_before_residual=norm_before_residual,
        norm_before_head=norm_before_head,
        own_head=True,
        feeds_back_normed=feeds_back_normed,
        logit_scale=logit_scale,
        mask_token_id=mask_token_id,
    )


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return (2, L // 2, L - 3) like SafeAILab/EAGLE. Raises ConfigError below 7 layers."""
    ids = (2, num_layers // 2, num_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        raise ConfigError(
            f"a target of {num_layers} layers has no default EAGLE-3 layers (2, L//2, L-3 "
            f"gives {ids}); expected eagle_aux_hidden_state_layer_ids in the draft's config, "
            "or aux_layer_ids where one is trained"
        )
    return ids


def mtp_spec(
    *,
    layer: ModelSpec,
    target_num_layers: int,
    recurrent: bool = False,  # one layer runs at every level, on its output of the level before
    chained: bool = False,
    reads_normed: bool = True,  # the target's hidden state is after its final norm
    hidden_first: bool = False,
    feeds_back_normed: bool = False,
    own_head: bool = False,
    zeroes_first: bool = False,
) -> HeadSpec:
    """Return layers for multi-token prediction, with the target's width and vocabulary. Raises
    ConfigError for layers that cannot be recurrent."""
    if recurrent:
        if chained or layer.num_layers != 1:
            raise ConfigError(
                f"layers for multi-token prediction are recurrent, {layer.num_layers}, and chained "
                f"is {chained}; expected one layer that is not chained"
            )
        if (window := layer.one_layer.attention.window) is not None:
            raise ConfigError(
                f"a layer for multi-token prediction has a window of {window}; expected none for "
                f"one that every level runs again"
            )
    return HeadSpec(
        layer=layer,
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        join=Join.PROJECTED,
        aux_layer_ids=() if reads_normed else (target_num_layers,),
        hidden_first=hidden_first,
        input_norm=True,
        own_head=own_head,
        feeds_back_normed=feeds_back_normed,
        zeroes_first=zeroes_first,
        per_level=not recurrent,
        chained=chained,
    )

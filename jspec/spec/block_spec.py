"""A model that drafts a block of tokens in one forward, as hashable host data.

Its queries are the root and a mask token for each further position. K and V of the committed text
are made of the target's features; the text itself never runs through its layers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jspec.errors import ConfigError
from jspec.spec.model_spec import ModelSpec


class MarkovKind(enum.Enum):
    """The vector m of a Markov head, from the previous token's entry e and the row's output h."""

    VANILLA = "m = e"
    GATED = "m = sigmoid(gate([h; e])) * e"
    RNN = "[g; c; m'] = joint([s; e; h]), m = tanh(m'); next s = sigmoid(g) s + sigmoid(-g) tanh(c)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovSpec:
    """A Markov head (DSpark): adds a product of m, `rank` wide, to the logits of a row."""

    rank: int
    kind: MarkovKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSpec:
    """Grouped dynamic convolutions (DFlash2) before and after each sub-layer.

    y[t] = sum over taps i of (base[i] + c[t, i]) x[t - i], within the block. c[t] is a product of
    the sub-layer's normed input at t; a group of channels shares it.
    """

    taps: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorSpec:
    """A selector (DFlash2): rescores a row's `num_candidates` best tokens by the token before:
    score(b, c) = logit(c) + <before(b) * hidden(h), after(c)>, vectors of `rank`."""

    rank: int
    num_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A block drafter's model (DFlash, DSpark, DFlash2). Each row of a block sees all rows of it,
    except in layers with a window if `causal_windows`."""

    layer: ModelSpec  # its decoder layers; vocab_size is the target's V
    draft_vocab_size: int  # U
    aux_layer_ids: tuple[int, ...]  # as in HeadSpec: at the INPUT of these layers of the target
    block_size: int  # rows of its forward in training
    mask_token_id: int
    from_root: bool = False  # the root's row predicts the first draft, not the first mask's row
    causal_windows: bool = True  # in window layers a row sees no later row of the block
    windows_from_root: bool = False  # windows count back from the root, not from each row
    markov: MarkovSpec | None = None
    selector: SelectorSpec | None = None  # at most one of markov and selector
    convolution: ConvolutionSpec | None = None  # around every sub-layer

    def __post_init__(self) -> None:
        if not self.aux_layer_ids or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise ConfigError(
                f"aux layer ids are {self.aux_layer_ids}; expected at least one, ascending"
            )
        if not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}; expected an id of the vocabulary of "
                f"{self.layer.vocab_size}"
            )
        size, own = self.layer.hidden_size, self.convolution
        if own is not None and (size % own.group_size or own.taps > self.block_size):
            raise ConfigError(
                f"a convolution has groups of {own.group_size} and {own.taps} taps; expected a "
                f"divisor of hidden_size {size}, and at most block_size {self.block_size}"
            )
        if self.selector is not None and self.selector.num_candidates > self.draft_vocab_size:
            raise ConfigError(
                f"selector_top_k is {self.selector.num_candidates}; expected at most the draft "
                f"vocabulary {self.draft_vocab_size}"
            )
        if self.most_steps < 1:
            raise ConfigError(f"block_size is {self.block_size}; expected at least 2")

    @property
    def most_steps(self) -> int:
        """The largest S: the number of rows that predict."""
        return self.block_size - (not self.from_root)

    def num_rows(self, num_steps: int) -> int:
        return num_steps + (not self.from_root)

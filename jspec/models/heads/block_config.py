"""A block drafter's config.json, read against its target.

There are three layouts: z-lab's (SpecForge, SGLang), with some keys in `dflash_config`;
transformers' MuseGlimmerAssistant, all at the top level; and speculators', with the layers' keys in
`transformer_layer_config`. They count layers and windows differently:

    layout        ids of the target's layers   window w: row at p of a block with root at L sees
    z-lab         outputs, from 0              keys from p - w + 1, no later row of the block
    transformers  outputs, from 0              keys from p - w
    speculators   inputs (outputs, from 1)     keys from L - w, no later row of the block

Raises ConfigError for a variant that is not served, and CheckpointError for a file that is missing,
unreadable, or belongs to another target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields, in_file, read_fields
from jspec.models.family import (
    FULL,
    SLIDING,
    read_attention,
    read_decoder,
    read_dense,
    read_windows,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_files import check_target, refuse_unknown, speculators_json
from jspec.models.registry import BLOCKS
from jspec.spec.block_spec import (
    BlockSpec,
    ConvolutionSpec,
    MarkovKind,
    MarkovSpec,
    SelectorSpec,
)
from jspec.spec.model_spec import ModelSpec

NESTED, INPUT_IDS, OUTPUT_IDS = (
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "target_layer_ids",
)
# Keys that are read and that head_files.refuse_unknown would refuse otherwise.
KNOWN = frozenset(
    (
        *("rms_norm_eps", "attention_bias", "mask_token_id", "dflash_config", INPUT_IDS),
        *("draft_vocab_size", "is_causal", "sliding_window_non_causal"),
    )
)
# speculators' class for each kind.
WRITTEN = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}
# Prefixes of settings that only one kind has.
OF_KINDS = {
    "dspark": ("markov_", "confidence_", "enable_confidence"),
    "dflash2": ("conv_", "selector_"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The tables of a config.json. head: keys of the head; layers: keys of its decoder layers."""

    head: Fields
    layers: Fields
    kind: str  # of BLOCKS
    is_speculators: bool = False
    is_assistant: bool = False

    @property
    def tables(self) -> tuple[Fields, ...]:
        return (self.head, self.layers) if self.is_speculators else (self.head,)


def load_block_config(
    path: Path, *, target: ModelSpec, draft_rope_theta: float | None = None
) -> BlockSpec:
    """Read a block drafter's model from `path`/config.json and check it against its target. RoPE is
    the draft's own, with theta 10000 by default; draft_rope_theta overrides theta."""
    fields = read_fields(path / "config.json")
    with in_file(fields.path):
        found = _layout_of(fields)
        for table in found.tables:
            check_quantization(table)
            table.refuse("rope_dim", allowed=(), why="RoPE rotates whole heads here")
            refuse_unknown(table, known=KNOWN)
            _refuse_other_kinds(found.kind, table)
        layer = _layers_of(found, target, draft_rope_theta=draft_rope_theta)
        size = found.head.integer("target_hidden_size", layer.hidden_size)
        check_target(fields, layer, target, hidden_size=size)
        if size != layer.hidden_size:
            raise ConfigError(
                f"{fields.path}: hidden_size is {layer.hidden_size}; expected the target's {size}, "
                "whose embedding a block drafter reads"
            )
        return BlockSpec(
            layer=layer,
            draft_vocab_size=_draft_vocab_size(found.head, layer),
            aux_layer_ids=_aux_layer_ids(found, target.num_layers),
            block_size=found.head.integer("block_size"),
            mask_token_id=_mask_id(found.head),
            from_root=found.head.flag("sample_from_anchor", found.kind == "dspark"),
            causal_windows=_causal_windows(found, layer),
            windows_from_root=found.is_speculators,
            markov=_markov(found),
            **_of_dflash2(found),
        )


def block_config_json(spec: BlockSpec, *, dtype: str) -> dict[str, Any]:
    """Return config.json of a block drafter without windows, in speculators' layout."""
    kind = "dflash"
    own: dict[str, Any] = {}
    if spec.markov is not None:
        kind = "dspark"
        own = {
            "markov_rank": spec.markov.rank,
            "markov_head_type": spec.markov.kind.name.lower(),
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    elif spec.convolution is not None and spec.selector is not None:
        kind = "dflash2"
        own = {
            "conv_kernel_size": spec.convolution.taps,
            "conv_group_size": spec.convolution.group_size,
            "selector_rank": spec.selector.rank,
            "selector_top_k": spec.selector.num_candidates,
        }
    return speculators_json(
        kind, spec.layer, layers="qwen3", num_steps=spec.most_steps, dtype=dtype
    ) | {
        "architectures": [WRITTEN[kind]],
        INPUT_IDS: list(spec.aux_layer_ids),
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.from_root,
        "sliding_window_non_causal": kind == "dflash2",
        **own,
    }


def _layout_of(fields: Fields) -> _Layout:
    if fields.get("speculators_model_type") is not None:
        kinds = tuple(name for name in BLOCKS if name.islower())
        fields.refuse("speculators_model_type", allowed=kinds, why="another draft model")
        return _Layout(
            head=fields,
            layers=fields.table(NESTED),
            kind=BLOCKS[fields.get("speculators_model_type")],
            is_speculators=True,
        )
    architecture = fields.architecture()
    if architecture not in BLOCKS:
        known = ", ".join(name for name in BLOCKS if not name.islower())
        raise ConfigError(
            f"{fields.path}: draft architecture is {architecture!r}; expected one of {known}, or "
            "speculators_model_type"
        )
    nested = fields.table("dflash_config")
    both = {k for k, v in nested.values.items() if fields.get(k) not in (None, v)}
    if both:
        raise CheckpointError(
            f"{fields.path}: {shown(sorted(both))} differ in dflash_config and at the top level; "
            "expected one value of each"
        )
    flat = Fields(fields.path, {**fields.values, **nested.values})
    flat.refuse("projector_type", allowed=("dflash", "dspark"), why="another draft model")
    return _Layout(
        head=flat,
        layers=flat,
        kind="dspark" if flat.get("projector_type") == "dspark" else BLOCKS[architecture],
        is_assistant=fields.get("model_type") == "muse_glimmer_assistant",
    )


def _layers_of(found: _Layout, target: ModelSpec, *, draft_rope_theta: float | None) -> ModelSpec:
    """Read the decoder layers: Qwen3's, with norms of q and k."""
    values = dict(found.layers.values)
    if found.is_assistant:  # it gives no vocabulary
        values.setdefault("vocab_size", target.vocab_size)
    fields = Fields(found.layers.path, values)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, qk_norm=True, qkv_bias=bias, out_bias=bias)
    if draft_rope_theta is not None:
        attention = replace(attention, rope=replace(attention.rope, theta=draft_rope_theta))
    dense = read_dense(fields)
    layer = read_decoder(
        fields,
        family="llama",
        attention=attention,
        ffn=lambda _: dense,
        windows=_windows(found, fields),
    )
    return replace(layer, tie_word_embeddings=False)


def _windows(found: _Layout, fields: Fields) -> tuple[int | None, ...]:
    """Return the layers' windows as AttentionSpec counts them: including the row itself."""
    size = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    kind = SLIDING if found.is_assistant else FULL
    windows = read_windows(fields, window=size, default=lambda _: kind)
    if any(windows):
        fields.refuse("use_sliding_window", allowed=(True,), why="layer_types has windows")
    more = found.is_assistant or found.is_speculators
    return tuple(None if w is None else w + more for w in windows)


def _causal_windows(found: _Layout, layer: ModelSpec) -> bool:
    """Return whether rows of layers with a window see no later row; in other layers they do."""
    both_ways = found.kind == "dflash2"
    if found.is_speculators:
        return not found.head.flag("sliding_window_non_causal", both_ways)
    is_causal = found.head.get("is_causal")
    if is_causal is True and any(each.attention.window is None for each in layer.layers):
        raise ConfigError(
            f"{found.head.path}: is_causal is True; expected false or no such key in a head with "
            "layers of full attention, whose rows see each other both ways"
        )
    return found.head.flag("is_causal", not (found.is_assistant or both_ways))


def _aux_layer_ids(found: _Layout, num_layers: int) -> tuple[int, ...]:
    """Return the aux ids as inputs of layers: [1, 9] of z-lab equals [2, 10] of speculators."""
    name = INPUT_IDS if found.is_speculators else OUTPUT_IDS
    value = found.head.get(name)
    named = f"{found.head.path}: {name} is {shown(value)}"
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise CheckpointError(f"{named}; expected a list of layers")
    stated = found.head.integer("num_target_layers", num_layers)
    if stated != num_layers:
        raise CheckpointError(
            f"{found.head.path}: num_target_layers is {stated}; expected the target's {num_layers}"
        )
    ids = tuple(item + (not found.is_speculators) for item in value)
    if min(ids) < 0 or max(ids) > num_layers:
        raise CheckpointError(f"{named}; expected layers of a target of {num_layers}")
    return ids


def _markov(found: _Layout) -> MarkovSpec | None:
    if found.kind != "dspark" or found.head.get("markov_rank") == 0:
        return None
    name = found.head.get("markov_head_type") or MarkovKind.VANILLA.name.lower()
    kinds = {kind.name.lower(): kind for kind in MarkovKind}
    found.head.refuse("markov_head_type", allowed=tuple(kinds), why="no other head is known")
    return MarkovSpec(rank=found.head.integer("markov_rank"), kind=kinds[name])


def _of_dflash2(found: _Layout) -> dict[str, Any]:
    if found.kind != "dflash2":
        return {}
    return {
        "convolution": ConvolutionSpec(
            taps=found.head.integer("conv_kernel_size"),
            group_size=found.head.integer("conv_group_size"),
        ),
        "selector": SelectorSpec(
            rank=found.head.integer("selector_rank"),
            num_candidates=found.head.integer("selector_top_k"),
        ),
    }


def _refuse_other_kinds(kind: str, table: Fields) -> None:
    for name, value in table.values.items():
        of = next((of for of, words in OF_KINDS.items() if name.startswith(words)), kind)
        if of != kind and value:
            raise ConfigError(
                f"{table.path}: {name} is {shown(value)}; expected no such key in a checkpoint of "
                f"{kind}: it is one of {of}"
            )


def _mask_id(head: Fields) -> int:
    value = head.get("mask_token_id")
    if type(value) is not int:
        raise CheckpointError(f"{head.path}: mask_token_id is {shown(value)}; expected a token id")
    return value


def _draft_vocab_size(head: Fields, layer: ModelSpec) -> int:
    size = head.integer("draft_vocab_size", layer.vocab_size)
    if size > layer.vocab_size:
        raise CheckpointError(
            f"{head.path}: draft_vocab_size is {size}; expected at most the target's "
            f"{layer.vocab_size}"
        )
    return size

"""Block drafters' weights: their table, and reading them from z-lab's or speculators' files.
Embedding and lm_head are the target's, except the lm_head of a draft vocabulary (d2t)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jspec.models.files.stored.param_reads import Place, on_host
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import HostArray, write_checkpoint
from jspec.models.files.w8a8 import open_tensors
from jspec.models.heads.block_config import block_config_json
from jspec.models.heads.head_files import (
    Params,
    canonical_name,
    check_vocabulary_names,
    is_stray,
    read_draft_ids,
    read_head,
    shared_with_target,
    stored_embed,
)
from jspec.models.heads.head_params import EMBED, FUSED, HEAD, draft_ids
from jspec.models.layer_params import attention_params, ffn_params, lm_head, norm, product
from jspec.models.params import (
    Form,
    Init,
    ParamPath,
    ParamSpec,
    ParamTable,
    Part,
    or_fused,
    prefixed,
)
from jspec.spec.block_spec import BlockSpec, ConvolutionSpec, MarkovKind, MarkovSpec
from jspec.spec.weight_format import Formats, Shape

CONFIDENCE = "confidence_head."
# transformers' names of the product of the features and of the norm after it.
ENCODER = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


def block_name(name: str) -> str:
    """Map a stored name to the table's: without `model.`, and by ENCODER."""
    name = canonical_name(name)
    return ENCODER.get(name, name)


def block_params(spec: BlockSpec) -> ParamTable:
    """Declare a block drafter's weights. The embedding and draft_ids have no layout."""
    model, E, U = spec.layer, spec.layer.hidden_size, spec.draft_vocab_size
    table: list[ParamSpec] = [
        ParamSpec(path=EMBED, shape=(model.vocab_size, E), init=Init.TABLE),
        *product(("fc",), len(spec.aux_layer_ids) * E, (("fc", E, 1),)),
        norm("hidden_norm", "hidden_norm", E),
    ]
    for i, layer in enumerate(model.layers):
        own = (
            norm("input_norm", "input_layernorm", E),
            *attention_params(layer.softmax_attention, in_size=E, out_size=E),
            norm("post_norm", "post_attention_layernorm", E),
            *ffn_params(layer.ffn, size=E),
            *_convolution_params(spec.convolution, size=E),
        )
        table += prefixed(own, path=("layers", i), stored=f"layers.{i}.")
    table += (norm("norm", "norm", E), lm_head(E, U, tied=False), draft_ids(U))
    if spec.markov is not None:
        own = _markov_params(spec.markov, size=E, vocab_size=model.vocab_size, draft_size=U)
        table += prefixed(own, path=("markov",), stored="markov_head.")
    if spec.selector is not None:
        rank, V = spec.selector.rank, model.vocab_size
        own = (
            _table(("before",), "predecessor_codebook", (V, rank)),
            _table(("after",), "successor_codebook", (V, rank)),
            *product(("hidden",), E, (("hidden_projection", rank, 1),), op=None),
        )
        table += prefixed(own, path=("selector",), stored="candidate_selector.")
    return or_fused(table, FUSED)


def _table(path: ParamPath, name: str, shape: Shape) -> ParamSpec:
    part = Part(name=name, shape=shape, size=shape[-1], form=Form.AS_IS)
    return ParamSpec(path=path, shape=shape, layouts=((part,),))


def _convolution_params(spec: ConvolutionSpec | None, *, size: int) -> ParamTable:
    """Declare a layer's convolutions: [before and after the sub-layer, taps, E], and a product."""
    if spec is None:
        return ()
    table: list[ParamSpec] = []
    for name in ("attention_conv", "mlp_conv"):
        width = 2 * spec.taps * (size // spec.group_size)
        own = (
            _table(("base",), "base_kernel", (2, spec.taps, size)),
            *product(("dynamic",), size, (("kernel_projection", width, 1),), op=None),
        )
        table += prefixed(own, path=(name,), stored=f"{name}.")
    return tuple(table)


def _markov_params(spec: MarkovSpec, *, size: int, vocab_size: int, draft_size: int) -> ParamTable:
    """Declare a Markov head: a vector per previous id, the product to logits, and the gates."""
    rank = spec.rank
    before = _table(("before",), "markov_w1.weight", (vocab_size, rank))
    after = replace(
        lm_head(rank, draft_size, tied=False, name="markov_w2.weight"), path=("after",), op=None
    )
    table = (before, after)
    if spec.kind is MarkovKind.GATED:
        gate = (("gate_proj", rank, 1),)
        return (*table, *product(("gate",), size + rank, gate, bias=True, op=None))
    if spec.kind is MarkovKind.RNN:
        joint = (("joint_proj", 3 * rank, 1),)
        return (*table, *product(("joint",), 2 * rank + size, joint, bias=True, op=None))
    return table


def _is_stray(name: str) -> bool:
    """Match unread tensors, including DSpark's estimate of acceptance (docs/decisions/0053)."""
    return is_stray(name) or name.startswith(CONFIDENCE)


def check_block(path: Path, spec: BlockSpec) -> tuple[str, ...]:
    """Return the params that the file lacks, which are the target's. Raises CheckpointError."""
    with open_tensors(path, canonical=block_name) as tensors:
        check_vocabulary_names(tensors, spec, block_params(spec), is_stray=_is_stray)
        return shared_with_target(tensors, spec)


def save_block(path: Path, spec: BlockSpec, params: Params, *, dtype: npt.DTypeLike) -> None:
    """Write a head over its target's whole vocabulary in speculators' layout, without embedding and
    lm_head. params: may have DSpark's `confidence`."""
    own = tuple(each for each in block_params(spec) if each.layouts and each.path != HEAD)
    tensors = stored_tensors(own, params, dtype=dtype)
    if "confidence" in params:
        for stored, value in (
            ("weight", np.asarray(params["confidence"]["kernel"]).T),
            ("bias", np.asarray(params["confidence"]["bias"])),
        ):
            tensors[f"{CONFIDENCE}proj.{stored}"] = np.ascontiguousarray(value, np.float32)
    write_checkpoint(path, block_config_json(spec, dtype=np.dtype(dtype).name), tensors)


def load_block(
    path: Path,
    spec: BlockSpec,
    *,
    hot_ids: HostArray | None = None,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int = 1,
    place: Place = on_host,
    formats: Formats = (),
) -> Params:
    """Load the params (`dtype`; draft_ids int32[U]) to where `place` puts them. An embedding or
    lm_head that the file lacks is the target's own array. Raises CheckpointError."""
    with open_tensors(path, canonical=block_name) as tensors:
        check_vocabulary_names(tensors, spec, block_params(spec), is_stray=_is_stray)
        shares = shared_with_target(tensors, spec)
        table = block_params(spec)
        own = [each for each in table if each.layouts and each.path[0] not in shares]
        if "embed" not in shares:
            own.append(stored_embed(table[0]))
        return read_head(
            tensors,
            spec,
            own,
            shares=shares,
            ids=read_draft_ids(tensors, spec),
            hot_ids=hot_ids,
            target_params=target_params,
            dtype=dtype,
            shards=shards,
            place=place,
            formats=formats,
        )

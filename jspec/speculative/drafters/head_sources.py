"""The plans of drafters with a head: EAGLE-1 to 3, multi-token prediction (NEXTN), blocks (DFLASH).
All raise ConfigError or CheckpointError if the checkpoint does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jspec.config.drafting import Algorithm
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.files.stored.param_reads import Place
from jspec.models.files.tensor_files import HostArray
from jspec.models.heads.block_config import load_block_config
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.dflash import block_name, block_params, check_block, load_block
from jspec.models.heads.eagle1 import (
    check_eagle1,
    load_eagle1,
    load_eagle1_config,
)
from jspec.models.heads.eagle3 import check_eagle3, load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_files import canonical_name, published_specs, with_hot_columns
from jspec.models.heads.head_params import EMBED, HEAD, HeadNames, head_params
from jspec.models.heads.mtp import (
    check_mtp,
    copies_of_target,
    load_mtp,
    load_mtp_config,
    shared,
)
from jspec.models.heads.target_copies import TargetCopy
from jspec.models.heads.token_map import read_token_map
from jspec.pallas_kernels.ops import Ops
from jspec.spec.block_spec import BlockSpec
from jspec.spec.head_spec import HeadSpec
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.block import BlockDrafter, ParallelDrafter
from jspec.speculative.drafters.frozen_kv import assistant_source, is_assistant
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ranked import EagleDrafter
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import Params


def eagle1_source(request: DraftRequest) -> DraftSource:
    if is_assistant(request.checkpoint):
        return assistant_source(request)
    args, path = request.args, request.checkpoint
    is_dummy = args.load_format == "dummy"
    spec = load_eagle1_config(
        path,
        target=request.target,
        draft_rope_theta=args.speculative_draft_rope_theta,
        reads_names=not is_dummy,
    )
    spec = _cached(spec, request)
    # Before the slower read of the target.
    shares_embed = is_dummy or check_eagle1(path, spec)
    return _source_of(
        spec,
        request,
        partial(load_eagle1, path, spec),
        shares=("embed", "lm_head") if shares_embed else ("lm_head",),
        published=published_specs(head_params(spec))[:1],
        canonical=canonical_name,
        copies={
            "embed_tokens.weight": TargetCopy(path=EMBED, is_read=True),
            "lm_head.weight": TargetCopy(path=HEAD, is_read=False),
        },
    )


def eagle3_source(request: DraftRequest) -> DraftSource:
    """Plan an EAGLE-3 head in SGLang's or speculators' layout."""
    args, path = request.args, request.checkpoint
    is_dummy = args.load_format == "dummy"
    spec = load_eagle3_config(
        path,
        target=request.target,
        draft_rope_theta=args.speculative_draft_rope_theta,
        reads_names=not is_dummy,
    )
    spec = _cached(spec, request)
    return _source_of(
        spec,
        request,
        partial(load_eagle3, path, spec),
        # Checked before the slower read of the target. Most heads share the embedding.
        shares=("embed",) if is_dummy else check_eagle3(path, spec),
        published=published_specs(head_params(spec)),
        canonical=canonical_name,
        copies={"embed_tokens.weight": TargetCopy(path=EMBED, is_read=True)},
    )


def mtp_source(request: DraftRequest) -> DraftSource:
    if is_assistant(request.checkpoint):
        return assistant_source(request)
    args, path = request.args, request.checkpoint
    if args.speculative_draft_rope_theta is not None:
        raise ConfigError(
            f"speculative_draft_rope_theta is {args.speculative_draft_rope_theta}, but the layers "
            f"for multi-token prediction have their own; expected it unset"
        )
    spec, names = load_mtp_config(
        path, target=request.target, num_layers=args.speculative.num_steps
    )
    spec = _cached(spec, request)
    if args.load_format != "dummy":
        check_mtp(path, spec, names)  # before the slower read of the target
    return _source_of(
        spec,
        request,
        partial(load_mtp, path, spec, names),
        names=names,
        algorithm=Algorithm.MULTI_LAYER_EAGLE if spec.per_level else Algorithm.NEXTN,
        shares=shared(spec),
        copies=copies_of_target(spec, names),
    )


def block_source(request: DraftRequest) -> DraftSource:
    args, path = request.args, request.checkpoint
    spec = load_block_config(
        path, target=request.target, draft_rope_theta=args.speculative_draft_rope_theta
    )
    spec = replace(spec, layer=request.on_devices(spec.layer))
    if args.speculative.num_steps > spec.most_steps:
        raise ConfigError(
            f"speculative_num_steps is {args.speculative.num_steps}; expected at most "
            f"{spec.most_steps}, by the draft's block_size {spec.block_size}"
        )

    of_level = None if spec.selector is None else spec.selector.num_candidates
    if of_level is not None and args.speculative.topk > of_level:
        raise ConfigError(
            f"speculative_eagle_topk is {args.speculative.topk}; expected at most {of_level}, the "
            f"draft's selector_top_k"
        )

    if args.load_format == "dummy":
        is_whole = spec.draft_vocab_size == spec.layer.vocab_size
        shares: tuple[str, ...] = ("embed", "lm_head") if is_whole else ("embed",)
    else:
        shares = check_block(path, spec)  # before the slower read of the target
    load, hot = partial(load_block, path, spec), _hot_ids(request, shares)
    drafted = spec if hot is None else replace(spec, draft_vocab_size=len(hot))
    _check_draft_vocabulary(drafted, request)

    def make(ops: Ops, shard: Shard) -> Drafter:
        model = BlockHead(drafted, ops, shard, request.formats)
        return BlockDrafter(model, args.speculative, args.speculative_draft_noise)

    return DraftSource(
        make=make,
        read=_reader(load, request, hot),
        specs=(spec.layer,),
        aux_layer_ids=spec.aux_layer_ids,
        **_shared(shares, hot),
        published=published_specs(block_params(spec)),
        canonical=block_name,
        copies={
            "embed_tokens.weight": TargetCopy(path=EMBED, is_read=True),
            "lm_head.weight": TargetCopy(path=HEAD, is_read=True),
        },
    )


def _cached(spec: HeadSpec, request: DraftRequest) -> HeadSpec:
    return replace(spec, layer=request.on_devices(spec.layer))


def _source_of(
    spec: HeadSpec,
    request: DraftRequest,
    load: Callable[..., Params],
    *,
    shares: tuple[str, ...],
    names: HeadNames | None = None,
    algorithm: Algorithm | None = None,
    **more: Any,
) -> DraftSource:
    args = request.args
    hot = _hot_ids(request, shares, per_level=spec.per_level)
    spec = spec if hot is None else replace(spec, draft_vocab_size=len(hot))
    _check_draft_vocabulary(spec, request)
    speculation = replace(args.speculative, algorithm=algorithm or args.algorithm)

    def make(ops: Ops, shard: Shard) -> Drafter:
        kind = MultiLayerDrafter if spec.per_level else EagleDrafter
        if spec.mask_token_id is not None:
            kind = ParallelDrafter
        head = FeatureHead(spec, ops, shard, names, request.formats)
        return kind(head, speculation, draft_noise=args.speculative_draft_noise)

    return DraftSource(
        make=make,
        read=_reader(load, request, hot),
        specs=(spec.layer,),
        aux_layer_ids=spec.aux_layer_ids,
        algorithm=algorithm,
        **_shared(shares, hot),
        **more,
    )


def _hot_ids(
    request: DraftRequest, shares: tuple[str, ...], *, per_level: bool = False
) -> HostArray | None:
    """Return the token map's ids, if any. Raises ConfigError for a head that cannot use them."""
    name = request.args.speculative_token_map
    if name is None:
        return None
    if per_level or "lm_head" not in shares:
        why = "layers that draft one level each" if per_level else "an lm_head of its own"
        raise ConfigError(
            f"speculative_token_map is {name!r}, but {request.checkpoint} has {why}; expected it "
            f"unset"
        )
    return read_token_map(Path(name), vocab_size=request.target.vocab_size)


def _shared(shares: tuple[str, ...], hot_ids: HostArray | None) -> dict[str, Any]:
    if hot_ids is None:
        return {"shares": shares}
    own = tuple(name for name in shares if name != "lm_head")
    return {"shares": own, "with_target": partial(with_hot_columns, hot_ids)}


def _reader(
    load: Callable[..., Params], request: DraftRequest, hot_ids: HostArray | None
) -> Callable[[Params, DTypeLike, Place], Params]:
    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        how: dict[str, Any] = {"shards": request.shards, "formats": request.formats}
        how["hot_ids"] = hot_ids
        return load(target_params=target_params, dtype=np.dtype(dtype), place=place, **how)

    return read


def _check_draft_vocabulary(spec: HeadSpec | BlockSpec, request: DraftRequest) -> None:
    """Raise ConfigError for a draft vocabulary below K ids or not divisible by the shards."""
    size, topk = spec.draft_vocab_size, request.args.speculative.topk
    if topk > size:
        raise ConfigError(
            f"speculative_eagle_topk is {topk}; expected at most {size}, the draft vocabulary"
        )
    if size % request.shards:
        raise ConfigError(
            f"tp_size is {request.shards}; expected a divisor of the draft vocabulary {size}"
        )

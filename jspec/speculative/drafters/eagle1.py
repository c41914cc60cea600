"""EAGLE-1 and EAGLE-2: `eagle`'s drafter with an EAGLE-1 head.

The head reads the target's last hidden state instead of aux features. It scores with the target's
lm_head, or with the columns of frequent ids (FR-Spec, Zhao et al., 2025, arXiv:2502.14856).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from jspec.layers.linear import Shard
from jspec.models.files.stored import Place
from jspec.models.heads.eagle1 import (
    Eagle1Head,
    check_eagle1,
    eagle1_params,
    load_eagle1,
    load_eagle1_config,
    with_hot_columns,
)
from jspec.models.heads.head_files import canonical_name, published_specs
from jspec.models.heads.target_copies import EMBED, HEAD, TargetCopy
from jspec.models.heads.token_map import read_token_map
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafters.eagle import EagleDrafter, check_draft_vocabulary
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import Params


def eagle1_source(request: DraftRequest) -> DraftSource:
    """Plan an EAGLE-1 or EAGLE-2 head; raises ConfigError or CheckpointError if it does not fit."""
    args, path = request.args, request.checkpoint
    hot_ids = None
    if args.speculative_token_map is not None:
        hot_ids = read_token_map(
            Path(args.speculative_token_map), vocab_size=request.target.vocab_size
        )
    is_dummy = args.load_format == "dummy"
    config = load_eagle1_config(
        path,
        target=request.target,
        hot_vocab_size=None if hot_ids is None else len(hot_ids),
        draft_rope_theta=args.speculative_draft_rope_theta,
        reads_names=not is_dummy,
    )
    check_draft_vocabulary(config.draft_vocab_size, request)
    # Before the slower read of the target.
    shares_embed = is_dummy or check_eagle1(path, config)

    def make(ops: Ops, shard: Shard) -> EagleDrafter:
        head = Eagle1Head(config, ops, shard)
        return EagleDrafter(head, args.speculative, draft_noise=args.speculative_draft_noise)

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        return load_eagle1(
            path,
            config,
            hot_ids=hot_ids,
            target_params=target_params,
            dtype=np.dtype(dtype),
            shards=request.shards,
            place=place,
        )

    return DraftSource(
        make=make,
        read=read,
        specs=(config.layer,),
        shares=(*(("embed",) if shares_embed else ()), *(("lm_head",) if hot_ids is None else ())),
        published=published_specs(eagle1_params(config))[:1],
        canonical=canonical_name,
        copies_in=lambda _: {
            "embed_tokens.weight": TargetCopy(path=EMBED, is_read=True),
            "lm_head.weight": TargetCopy(path=HEAD, is_read=False),
        },
        with_target=None if hot_ids is None else partial(with_hot_columns, hot_ids),
    )

"""NEXTN: drafting with a checkpoint's layers for multi-token prediction (MTP).

The checkpoint decides the method. Several layers draft one level each (`multi_layer`); a single
recurrent layer runs for every level, which is EAGLE's procedure with another head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jax.typing import DTypeLike

from jspec.config.drafting import Algorithm
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.files.stored import Place
from jspec.models.heads.hf_mtp import (
    check_mtp,
    copies_in,
    copies_of_target,
    load_mtp,
    load_mtp_config,
    shared,
)
from jspec.models.heads.mtp import MtpHead, RecurrentHead
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.eagle import EagleDrafter, check_draft_vocabulary
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import Params


def mtp_source(request: DraftRequest) -> DraftSource:
    """Plan the MTP layers of `request.checkpoint`; raises ConfigError or CheckpointError if it does
    not fit.
    """
    args, path = request.args, request.checkpoint
    if args.speculative_draft_rope_theta is not None:
        raise ConfigError(
            f"speculative_draft_rope_theta is {args.speculative_draft_rope_theta}, but the layers "
            f"for multi-token prediction have their own; expected it unset"
        )
    config, names = load_mtp_config(
        path,
        target=request.target,
        num_layers=args.speculative.num_steps,
    )
    check_draft_vocabulary(config.model.vocab_size, request)
    if args.load_format != "dummy":
        check_mtp(path, config, names)  # before the slower read of the target
    algorithm = Algorithm.NEXTN if config.recurrent else Algorithm.MULTI_LAYER_EAGLE
    spec = replace(args.speculative, algorithm=algorithm)

    def make(ops: Ops, shard: Shard) -> Drafter:
        head, has_noise = MtpHead(config, ops, shard, names), args.speculative_draft_noise
        if config.recurrent:
            return EagleDrafter(RecurrentHead(head), spec, draft_noise=has_noise)
        return MultiLayerDrafter(head, spec, draft_noise=has_noise)

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        return load_mtp(
            path,
            config,
            names,
            target_params=target_params,
            dtype=np.dtype(dtype),
            shards=request.shards,
            place=place,
        )

    return DraftSource(
        make=make,
        read=read,
        specs=(config.model,),
        aux_layer_ids=config.aux_layer_ids,
        shares=shared(config),
        copies=copies_of_target(config, names),
        copies_in=lambda tensors: copies_in(tensors, config, names),
        algorithm=algorithm,
    )

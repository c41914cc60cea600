"""The plan of STANDALONE, which drafts with a small language model (`ranked.StandaloneDrafter`)."""

from __future__ import annotations

import numpy as np
from jax.typing import DTypeLike

from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import check_target, load_model_spec, load_target
from jspec.models.files.stored.param_reads import Place
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafters.ranked import StandaloneDrafter
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import Params
from jspec.text.tokenizer.tokenizer import check_same_vocabulary


def standalone_source(request: DraftRequest) -> DraftSource:
    """Plan a draft language model. Raises ConfigError or CheckpointError if it does not fit."""
    args, path = request.args, request.checkpoint
    spec = request.on_devices(load_model_spec(path))
    if spec.vocab_size != request.target.vocab_size:
        raise ConfigError(
            f"{path / 'config.json'}: vocab_size is {spec.vocab_size}; expected "
            f"{request.target.vocab_size}, the target's"
        )
    if spec.is_recurrent:
        raise ConfigError(
            f"{path}: the draft has recurrent layers; expected one whose layers cache their tokens,"
            " since each level of a draft must be taken back"
        )
    check_same_vocabulary(request.tokenizer, path)
    if args.speculative.topk > spec.vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk is {args.speculative.topk}; expected at most "
            f"{spec.vocab_size}, the vocabulary"
        )
    if args.speculative_draft_rope_theta is not None:
        raise ConfigError(
            f"speculative_draft_rope_theta is {args.speculative_draft_rope_theta}, but "
            f"speculative_algorithm is STANDALONE, whose draft has its own; expected it unset"
        )
    if args.load_format != "dummy":
        check_target(path, spec)  # before the slower read of the target

    def make(ops: Ops, shard: Shard) -> StandaloneDrafter:
        model = Decoder(spec, ops, shard, formats=request.formats)
        return StandaloneDrafter(model, args.speculative, draft_noise=args.speculative_draft_noise)

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        del target_params  # it has its own embedding
        return load_target(
            path,
            spec,
            dtype=np.dtype(dtype),
            shards=request.shards,
            place=place,
            formats=request.formats,
        )

    return DraftSource(make=make, read=read, specs=(spec,))

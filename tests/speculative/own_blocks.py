"""Block drafters, small and random, each beside its float64 reference."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspec.models.files.stored.tensors import stored_tensors, value_at
from jspec.models.files.tensor_files import write_checkpoint
from jspec.models.heads.dflash import block_params
from jspec.models.heads.head_params import HEAD
from jspec.models.layer import Params
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.spec.block_spec import BlockSpec, ConvolutionSpec, MarkovKind, MarkovSpec, SelectorSpec
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from tests.models.block_reference import BlockReference
from tests.speculative.engines import TARGET, tiny_params

WINDOW = 6
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}


@functools.cache
def layers() -> ModelSpec:
    """A layer with a window and one without, with norms of q and k."""
    plain = uniform_decoder(
        vocab_size=TARGET.vocab_size,
        hidden_size=TARGET.hidden_size,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    attention = dataclasses.replace(plain.layers[0].softmax_attention, qk_norm=True)
    return dataclasses.replace(
        plain,
        layers=tuple(
            dataclasses.replace(
                plain.layers[0], attention=dataclasses.replace(attention, window=window)
            )
            for window in (WINDOW, None)
        ),
    )


SPECS = {
    "dflash": BlockSpec(
        layer=layers(),
        draft_vocab_size=TARGET.vocab_size,
        aux_layer_ids=(1, TARGET.num_layers),
        block_size=6,
        mask_token_id=TARGET.vocab_size - 1,
    ),
}
SPECS["dspark"] = dataclasses.replace(
    SPECS["dflash"],
    from_root=True,
    causal_windows=False,
    markov=MarkovSpec(rank=12, kind=MarkovKind.RNN),
)
SPECS["dflash2"] = dataclasses.replace(
    SPECS["dflash"],
    causal_windows=False,
    convolution=ConvolutionSpec(taps=2, group_size=8),
    selector=SelectorSpec(rank=8, num_candidates=16),
)


@functools.cache
def params_of(name: str) -> Params:
    """Random weights, norms away from 1; embedding and lm_head are the target's."""
    table, target = block_params(SPECS[name]), tiny_params()[0]
    params = init_params(table, seed=5)
    values = {spec.path: value_at(params, spec.path) for spec in table}
    for i, spec in enumerate(table):
        if spec.init is Init.ONES:
            values[spec.path] = 1 + jax.random.normal(jax.random.key(i), spec.shape) / 4
    return nested(values.items()) | {each: target[each] for each in ("embed", "lm_head")}


@functools.cache
def reference_of(name: str) -> BlockReference:
    spec, params = SPECS[name], params_of(name)
    own = tuple(each for each in block_params(spec) if each.layouts)
    tensors = dict(stored_tensors(own, params, dtype=np.float32))
    tensors["embed_tokens.weight"] = np.asarray(params["embed"]["table"])
    attention = spec.layer.layers[0].softmax_attention
    return BlockReference(
        tensors=tensors,
        head_dim=attention.head_dim,
        theta=attention.rope.theta,
        eps=spec.layer.rms_norm_eps,
        mask_token_id=spec.mask_token_id,
        windows=tuple(each.attention.window for each in spec.layer.layers),
        is_causal=spec.causal_windows,
        from_root=spec.from_root,
        markov=None if spec.markov is None else spec.markov.kind.name.lower(),
        num_candidates=None if spec.selector is None else spec.selector.num_candidates,
    )


def write(path: Path, name: str) -> None:
    """Write a checkpoint as z-lab does: no embedding or lm_head; windows include the row."""
    spec = SPECS[name]
    attention = spec.layer.layers[0].softmax_attention
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": "qwen3",
        "vocab_size": spec.layer.vocab_size,
        "hidden_size": spec.layer.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": spec.layer.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": spec.layer.rms_norm_eps,
        "rope_theta": attention.rope.theta,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "block_size": spec.block_size,
        "dflash_config": {
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": [each - 1 for each in spec.aux_layer_ids],
        },
    }
    if not spec.causal_windows:
        config["is_causal"] = False
    if spec.markov is not None:
        kind = spec.markov.kind.name.lower()
        config |= {"markov_rank": spec.markov.rank, "markov_head_type": kind}
    if spec.convolution is not None and spec.selector is not None:
        config["dflash_config"] |= {
            "conv_kernel_size": spec.convolution.taps,
            "conv_group_size": spec.convolution.group_size,
            "selector_rank": spec.selector.rank,
            "selector_top_k": spec.selector.num_candidates,
        }
    own = [each for each in block_params(spec) if each.layouts and each.path != HEAD]
    tensors = stored_tensors(tuple(own), params_of(name), dtype=np.float32)
    write_checkpoint(path, config, tensors)

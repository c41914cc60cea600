"""Tiny random model pairs, as ordinary Hugging Face directories for the real loaders.

Weights are random but scaled so that the next token depends on the whole prefix; the tokenizer is
byte level (one id per byte, then special tokens). For tests and examples only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jspec.models.files.checkpoint import save_target
from jspec.models.heads.eagle3 import save_eagle3
from jspec.models.heads.head_params import head_params
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.spec.head_spec import HeadSpec, eagle3_spec
from jspec.spec.model_spec import ModelSpec, uniform_decoder

END = "<|endoftext|>"
NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPair:
    """The folders of a pair."""

    target_path: Path
    draft_path: Path
    target_config: ModelSpec
    draft_config: HeadSpec


def tiny_target_config(*, num_layers: int = 2, max_position: int = 256) -> ModelSpec:
    """Return a Llama that compiles in a second; V = 320 leaves ids beyond the bytes."""
    return uniform_decoder(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=max_position,
        eos_token_ids=(NUM_BYTES,),
        bos_token_id=NUM_BYTES,
    )


def tiny_draft_config(target: ModelSpec) -> HeadSpec:
    heads = target.one_layer.attention
    layer = uniform_decoder(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_layers=1,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=target.max_position,
    )
    return eagle3_spec(
        layer=layer,
        draft_vocab_size=160,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=(0, target.num_layers - 1, target.num_layers),
    )


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte level without merges: id b is byte b, id 256 is the end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def write_tiny_target(path: Path, config: ModelSpec, *, seed: int = 0) -> Path:
    save_target(path, config, init_params(table_of(config), seed=seed), dtype=np.float32)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END, "bos_token": END}), encoding="utf-8"
    )
    return path


def write_tiny_pair(
    directory: Path, *, seed: int = 0, num_layers: int = 2, max_position: int = 256
) -> TinyPair:
    """Write `directory/target` and `directory/draft`; the same seed gives the same bytes."""
    target_config = tiny_target_config(num_layers=num_layers, max_position=max_position)
    draft_config = tiny_draft_config(target_config)
    draft = init_params(head_params(draft_config), seed=seed + 1)
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(target_config.vocab_size, draft_config.draft_vocab_size, False))
    draft["draft_ids"] = jnp.asarray(ids, jnp.int32)
    target_path, draft_path = directory / "target", directory / "draft"
    write_tiny_target(target_path, target_config, seed=seed)
    save_eagle3(draft_path, draft_config, draft, dtype=np.float32, include_embed=True)
    return TinyPair(
        target_path=target_path,
        draft_path=draft_path,
        target_config=target_config,
        draft_config=draft_config,
    )

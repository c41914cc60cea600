"""Trains an EAGLE-3 head for any Llama target, by training-time test (see jspec.training.ttt).

    python -m jspec.training.eagle3_ttt --target DIR --text FOLDER --out DIR

--target is any Llama checkpoint folder in Hugging Face's layout with a tokenizer.json, --text any
folder of text files. The target is frozen and runs inside the step, so it must fit on the device
beside the head. Most of every batch is the target's own samples, the rest text: acceptance is
measured on what the target says, not on what people wrote. The draft vocabulary is the most
frequent ids of both. OUT/head is served by jspec and by whatever reads SpecForge's layout.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from jspec.core.config import RopeConfig
from jspec.core.model_spec import DenseSpec, Eagle3Config, LayerSpec, ModelSpec
from jspec.models.checkpoint import load_model_spec, load_target
from jspec.models.decoder import Params
from jspec.models.eagle3 import eagle3_params
from jspec.models.hf_eagle3 import save_eagle3
from jspec.models.placement import init_params
from jspec.training import corpus as corpora
from jspec.training.data import TokenStream, crops, joined, pack, rows
from jspec.training.loop import LoopConfig, Result, mean_metrics, train
from jspec.training.sampler import draw_prompts, sample_rows
from jspec.training.tokenizer_training import load_tokenizer
from jspec.training.ttt import make_frozen, training_time_test_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe:
    """Data, unrolling and loss of a run; `num_depths` is the number of unrolled steps."""

    loop: LoopConfig
    batch_size: int = 32
    length: int = 1024
    num_depths: int = 5
    sample_share: float = 0.875
    overlap_weight: float = 2.0
    compute_dtype: Any = jnp.bfloat16


def init_head(
    config: Eagle3Config, target_params: Params, draft_ids: np.ndarray, *, seed: int
) -> Params:
    """Trainable float32 parameters: random, but the final norm and lm_head are the target's.

    embed (the target's table) and draft_ids are not trained and not here.
    """
    params = init_params(eagle3_params(config), seed=seed)
    del params["embed"], params["draft_ids"]
    if config.target_hidden_size == config.layer.hidden_size:
        kernel = jnp.asarray(target_params["lm_head"]["kernel"], jnp.float32)
        params["lm_head"]["kernel"] = kernel[:, draft_ids]
        params["norm"]["scale"] = jnp.asarray(target_params["norm"]["scale"], jnp.float32)
    return params


def draft_vocabulary(tables: list[np.ndarray], *, vocab_size: int, size: int) -> np.ndarray:
    """i32[size], ascending: the most frequent ids over all tables (ties: lower id first)."""
    counts = sum(np.bincount(table.ravel(), minlength=vocab_size) for table in tables)
    return np.sort(np.argsort(-np.asarray(counts), kind="stable")[:size]).astype(np.int32)


def train_head(
    target: ModelSpec,
    target_params: Params,
    config: Eagle3Config,
    recipe: HeadRecipe,
    *,
    draft_ids: np.ndarray,
    text: TokenStream,
    samples: np.ndarray,
    held_out: np.ndarray,
    checkpoint_dir: Path | None = None,
) -> Result:
    """Trains on text crops and sample rows; held_out [R, T] picks the best parameters.

    samples: [R, T] with T = recipe.length; Result.params leaves embed and draft_ids out.
    """
    num_samples = round(recipe.batch_size * recipe.sample_share)
    seed, num_text = recipe.loop.seed, recipe.batch_size - num_samples
    parts = []
    if num_text:
        parts.append(crops(text, batch_size=num_text, length=recipe.length, seed=seed))
    if num_samples:
        parts.append(rows(samples, batch_size=num_samples, seed=seed))
    loss = training_time_test_loss(
        target,
        config,
        length=recipe.length,
        num_depths=recipe.num_depths,
        dtype=recipe.compute_dtype,
        overlap_weight=recipe.overlap_weight,
    )
    frozen = make_frozen(target_params, draft_ids)
    jitted = jax.jit(lambda params, frozen, batch: loss(params, frozen, batch, jax.random.key(0)))
    return train(
        "head",
        config=recipe.loop,
        loss=loss,
        initial=init_head(config, target_params, draft_ids, seed=seed),
        frozen=frozen,
        batch_at=joined(parts),
        evaluate=lambda params: mean_metrics(
            lambda batch: jitted(params, frozen, batch), held_out, batch_size=recipe.batch_size
        ),
        checkpoint_dir=checkpoint_dir,
    )


def export_head(
    folder: Path,
    config: Eagle3Config,
    params: Params,
    *,
    draft_ids: np.ndarray,
    dtype: Any = ml_dtypes.bfloat16,
) -> None:
    """config.json and model.safetensors, without the embedding (the target's is shared)."""
    host = {**jax.device_get(params), "draft_ids": draft_ids}
    save_eagle3(folder, config, host, dtype=dtype)


def head_config(
    target: ModelSpec,
    *,
    draft_vocab_size: int,
    intermediate_size: int,
    aux_layer_ids: tuple[int, ...],
) -> Eagle3Config:
    """A head with its target's heads and width; RoPE theta 10000, as published heads have."""
    attention = replace(
        target.one_layer.attention,
        qkv_bias=False,
        out_bias=False,
        rope=RopeConfig(theta=10000.0),
    )
    own = LayerSpec(
        attention=attention, ffn=DenseSpec(inner=intermediate_size), eps=target.rms_norm_eps
    )
    layer = replace(target, layers=(own,), tie_word_embeddings=False, family="llama")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=aux_layer_ids,
    )


def _inner_size(target: ModelSpec) -> int:
    """The target's own, or four times its width where it has no dense layer."""
    inner = (x.ffn.inner for x in target.layers if isinstance(x.ffn, DenseSpec))
    return next(inner, 4 * target.hidden_size)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jspec.training.eagle3_ttt")
    parser.add_argument("--target", type=Path, required=True, help="a Llama checkpoint folder")
    parser.add_argument("--text", type=Path, required=True, help="a folder of text files")
    parser.add_argument("--pattern", default="*", help="which files of --text, as a glob")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-vocab-size", type=int, default=32000)
    parser.add_argument("--intermediate-size", type=int, default=None)
    parser.add_argument("--num-samples", type=int, default=2048, help="rows of the target's own")
    parser.add_argument("--num-steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--num-depths", type=int, default=7)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--budget-seconds", type=float, default=None)
    return parser.parse_args()


def _text_streams(
    folder: Path, *, pattern: str, tokenizer: Tokenizer, separator_id: int
) -> tuple[TokenStream, TokenStream]:
    """(training stream, held-out stream) of a folder of text files."""
    documents = corpora.read_folder(folder, pattern=pattern)
    train_part, held_out = (
        [document.text for document in corpora.of_split(documents, part)]
        for part in (corpora.Split.TRAIN, corpora.Split.HELD_OUT)
    )
    held_out = held_out or train_part[-1:]  # too few files for the hash to hold one out
    return (
        pack(tokenizer, train_part, separator_id=separator_id, seed=0),
        pack(tokenizer, held_out, separator_id=separator_id, seed=0),
    )


def _own_samples(
    target: ModelSpec, params: Params, stream: TokenStream, *, count: int, length: int
) -> np.ndarray:
    """i32[count, length]: crops of the stream that the target continued at four temperatures."""
    prompts = draw_prompts(
        stream,
        count=count,
        length=length,
        shortest=max(length // 16, 1),
        longest=max(length // 3, 1),
        temperatures=(0.0, 0.3, 0.7, 1.0),
        seed=count,
    )
    return sample_rows(target, params, prompts, batch_size=64, dtype=jnp.bfloat16)


def main() -> None:
    args = _parse()
    target = load_model_spec(args.target)
    params = jax.tree.map(jnp.asarray, load_target(args.target, target, dtype=ml_dtypes.bfloat16))
    text, held_out_text = _text_streams(
        args.text,
        pattern=args.pattern,
        tokenizer=load_tokenizer(args.target),
        separator_id=target.eos_token_ids[0] if target.eos_token_ids else 0,
    )
    samples = _own_samples(target, params, text, count=args.num_samples, length=args.length)
    held_out = _own_samples(target, params, held_out_text, count=64, length=args.length)
    size = min(args.draft_vocab_size, target.vocab_size)
    draft_ids = draft_vocabulary([text.ids, samples], vocab_size=target.vocab_size, size=size)
    config = head_config(
        target,
        draft_vocab_size=size,
        intermediate_size=args.intermediate_size or _inner_size(target),
        aux_layer_ids=Eagle3Config.default_aux_layer_ids(target.num_layers),
    )
    loop = LoopConfig(
        num_steps=args.num_steps,
        peak_learning_rate=args.learning_rate,
        weight_decay=0.0,
        max_grad_norm=0.5,
        budget_seconds=args.budget_seconds,
    )
    recipe = HeadRecipe(
        loop=loop, batch_size=args.batch_size, length=args.length, num_depths=args.num_depths
    )
    result = train_head(
        target,
        params,
        config,
        recipe,
        draft_ids=draft_ids,
        text=text,
        samples=samples,
        held_out=held_out,
        checkpoint_dir=args.out / "checkpoints" / "head",
    )
    export_head(args.out / "head", config, result.params, draft_ids=draft_ids)
    print(f"held-out {result.metrics} at step {result.step} of {result.num_steps}")


if __name__ == "__main__":
    main()

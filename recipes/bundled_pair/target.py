"""Train a Llama target from scratch on packed text, and export it in Hugging Face's layout.

    python -m recipes.bundled_pair.target --corpus DIR --out DIR [--budget-seconds 300]

--corpus has the output of the stages `corpus` and `tokenizer` of recipes.bundled_pair.pair.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from tokenizers import Tokenizer

from jspec.models.files.checkpoint import save_target
from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.training.data import corpus as corpora
from jspec.training.data.token_stream import TokenStream, crops, fixed_crops, pack
from jspec.training.dense import (
    attention_backend,
    causal_attend,
    compute_view,
    dropout,
    forward,
    init_target,
    lm_logits,
    with_lm_head,
)
from jspec.training.loop import (
    Evaluate,
    LoopConfig,
    Loss,
    Result,
    mean_metrics,
    train,
)
from recipes.bundled_pair.tokenizer_training import end_of_text_id, load_tokenizer, save_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecipe:
    """Data and regularisation of a run; `compute_dtype` is that of activations and products."""

    loop: LoopConfig
    batch_size: int = 32
    length: int = 2048
    dropout_rate: float = 0.1
    compute_dtype: Any = jnp.bfloat16
    num_eval_rows: int = 64


def bundled_config(tokenizer: Tokenizer, **changes: Any) -> ModelSpec:
    """Return the bundled target (7.8 million parameters), with `changes` for uniform_decoder."""
    end = end_of_text_id(tokenizer)
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_layers": 9,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position": 2048,
        "eos_token_ids": (end,),
        "bos_token_id": end,
    }
    return uniform_decoder(**{**sizes, **changes})


def next_token_loss(config: ModelSpec, recipe: TargetRecipe, *, train: bool) -> Loss:
    """Return the mean cross entropy of tokens 1..T-1 of each row, with top-1 accuracy."""
    backend = attention_backend(config, length=recipe.length, dtype=recipe.compute_dtype)
    attend = causal_attend(backend)

    def loss(
        params: Params, frozen: Any, batch: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        del frozen
        use_dropout = train and recipe.dropout_rate > 0
        view = compute_view(params, recipe.compute_dtype)
        hidden, _ = forward(
            config,
            view,
            batch,
            dtype=recipe.compute_dtype,
            attend=attend,
            drop=dropout(key, recipe.dropout_rate) if use_dropout else None,
        )
        logits, labels = lm_logits(view, hidden)[:, :-1], batch[:, 1:]
        cross = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        hits = jnp.argmax(logits, axis=-1) == labels
        return jnp.mean(cross), {"accuracy": jnp.mean(hits.astype(jnp.float32))}

    return loss


def held_out_evaluation(loss: Loss, held_out: np.ndarray, *, batch_size: int) -> Evaluate:
    jitted = jax.jit(lambda params, frozen, batch: loss(params, frozen, batch, jax.random.key(0)))
    return lambda params: mean_metrics(
        lambda batch: jitted(params, None, batch), held_out, batch_size=batch_size
    )


def train_target(
    config: ModelSpec,
    recipe: TargetRecipe,
    *,
    train_stream: TokenStream,
    held_out_stream: TokenStream,
    checkpoint_dir: Path | None = None,
) -> Result:
    """Train from random weights and return the EMA that is best on held-out text."""
    count = min(recipe.num_eval_rows, len(held_out_stream.ids) // recipe.length or 1)
    held_out = fixed_crops(held_out_stream, count=count, length=recipe.length)
    return train(
        "target",
        config=recipe.loop,
        loss=next_token_loss(config, recipe, train=True),
        initial=init_target(config, seed=recipe.loop.seed),
        frozen=None,
        batch_at=crops(
            train_stream,
            batch_size=recipe.batch_size,
            length=recipe.length,
            seed=recipe.loop.seed,
        ),
        evaluate=held_out_evaluation(
            next_token_loss(config, recipe, train=False), held_out, batch_size=recipe.batch_size
        ),
        checkpoint_dir=checkpoint_dir,
    )


def export_target(folder: Path, config: ModelSpec, params: Params, *, tokenizer: Tokenizer) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16), tokenizer files."""
    save_target(folder, config, jax.device_get(with_lm_head(params)), dtype=ml_dtypes.bfloat16)
    eos = list(config.eos_token_ids)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "do_sample": True,
        "temperature": 0.7,
    }
    text = json.dumps(generation, indent=1)
    (folder / "generation_config.json").write_text(text + "\n", "utf-8")
    save_tokenizer(tokenizer, folder, max_length=config.max_position)


def load_streams(folder: Path) -> tuple[Tokenizer, TokenStream, TokenStream]:
    tokenizer = load_tokenizer(folder)
    documents = corpora.read_corpus(folder)
    end = end_of_text_id(tokenizer)
    streams = [
        pack(
            tokenizer,
            [document.text for document in corpora.of_split(documents, split)],
            separator_id=end,
        )
        for split in (corpora.Split.TRAIN, corpora.Split.HELD_OUT)
    ]
    return tokenizer, streams[0], streams[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bundled_pair.target", description=__doc__
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-seconds", type=float, default=None)
    parser.add_argument("--num-steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    loop = LoopConfig(
        num_steps=args.num_steps,
        peak_learning_rate=args.learning_rate,
        budget_seconds=args.budget_seconds,
    )
    tokenizer, train_stream, held_out_stream = load_streams(args.corpus)
    config = bundled_config(tokenizer)
    result = train_target(
        config,
        TargetRecipe(loop=loop, batch_size=args.batch_size, length=args.length),
        train_stream=train_stream,
        held_out_stream=held_out_stream,
        checkpoint_dir=args.out / "checkpoints" / "target",
    )
    export_target(args.out / "target", config, result.params, tokenizer=tokenizer)
    print(f"held-out {result.metrics} at step {result.step} of {result.num_steps}")


if __name__ == "__main__":
    main()

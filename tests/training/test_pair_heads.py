"""The small heads beside the pair: their rows, their sizes, the text that they are judged on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.heldout import heldout_prompts
from jspec.engine.weights.loading import BUNDLED
from jspec.models.files.checkpoint import load_model_spec
from jspec.text.tokenizer.tokenizer import Tokenizer
from jspec.training.data.corpus import Document, Split
from jspec.training.loop import LoopConfig
from recipes.bundled_pair.pair_heads import HEADS, in_rows, make

SMALL_HEADS_BYTES = 5e6  # of all three in bfloat16


def test_long_rows_are_cut_into_short_ones() -> None:
    found = in_rows(np.arange(14).reshape(2, 7), length=3)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 9], [10, 11, 12]]


def test_all_heads_together_are_small_enough_to_be_bundled() -> None:
    target = load_model_spec(BUNDLED / "target")
    loop = LoopConfig(num_steps=1, peak_learning_rate=1e-3)
    ids = np.arange(target.vocab_size, dtype=np.int32)
    E, V = target.hidden_size, target.vocab_size
    shared = {"norm": {"scale": jnp.ones(E)}, "lm_head": {"kernel": jnp.zeros((E, V))}}
    total = 0
    for name in HEADS:
        head = make(name, target, loop=loop, tiny=False).head
        total += sum(x.size for x in jax.tree.leaves(head.init(shared, ids, seed=0)))
    assert 4e6 < 2 * total < SMALL_HEADS_BYTES - 2e4  # configs and headers


def test_prompts_come_from_held_out_files_of_the_corpus_that_is_named() -> None:
    tokenizer = Tokenizer.from_directory(BUNDLED / "target")
    texts = {Split.TRAIN: "class Seen: pass\n" * 40, Split.HELD_OUT: "x = [y]\n" * 40}
    corpus = [
        Document(path=f"{split.value}.py", module=split.value, split=split, text=text)
        for split, text in texts.items()
    ]
    for prompt in heldout_prompts(tokenizer, count=3, length=16, corpus=corpus):
        text = tokenizer.decode(list(prompt))
        assert "y]" in text
        assert "Seen" not in text

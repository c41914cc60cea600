"""The small bundled heads: rows, sizes, held-out prompts."""

from __future__ import annotations

import numpy as np

from benchmarks.heldout import heldout_prompts
from jspec.engine.weights.loading import BUNDLED
from jspec.text.tokenizer.tokenizer import Tokenizer
from jspec.training.data.corpus import Document, Split
from recipes.bundled_pair.pair_heads import in_rows


def test_long_rows_are_cut_into_short_ones() -> None:
    found = in_rows(np.arange(14).reshape(2, 7), length=3)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 9], [10, 11, 12]]


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

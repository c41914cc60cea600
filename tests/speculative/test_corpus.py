"""Reading a corpus of token ids, and every file that is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jspec.core.engine_args import EngineArgs
from jspec.core.errors import ConfigError
from jspec.engine.loading import load_models, resolve_paths
from jspec.speculative.corpus import read_corpus
from jspec.speculative.ngram import NgramDrafter
from jspec.testing.tiny_models import write_tiny_pair
from tests.speculative.engines import mesh_of


def test_ids_come_from_text_and_from_an_array(tmp_path: Path) -> None:
    text, array = tmp_path / "ids.txt", tmp_path / "ids.npy"
    text.write_text("3 1\n4\t1 5\n")
    np.save(array, np.array([3, 1, 4, 1, 5], np.uint16))
    for path in (text, array):
        ids = read_corpus(path, vocab_size=6, max_tokens=100)
        assert ids.dtype == np.int32
        assert ids.tolist() == [3, 1, 4, 1, 5]
        assert read_corpus(path, vocab_size=6, max_tokens=3).tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"1 two 3", "invalid literal for int.*'two'"),
        ("a.txt", b"1", r"holds int64\[1\]; expected integers in one dimension, at least two"),
        ("a.txt", b"1 6 2", "holds id 6; expected ids below 6"),
        ("a.txt", b"1 -1 2", "holds id -1; expected ids below 6"),
        ("a.txt", b"\xff\xfe", "expected a .npy array of token ids, or text of them"),
        ("a.txt", b"1 99999999999999999999", "expected a .npy array of token ids"),
        ("a.npy", b"", "expected a .npy array of token ids, or text of them"),
        ("a.npy", b"1 2 3", "expected a .npy array of token ids, or text of them"),
        (None, b"", "No such file"),
    ],
)
def test_anything_else_is_named(
    tmp_path: Path, name: str | None, content: bytes, message: str
) -> None:
    path = tmp_path / (name or "missing")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_corpus(path, vocab_size=6, max_tokens=100)
    assert f"speculative_ngram_external_corpus_path is {str(path)!r}" in str(caught.value)


def test_an_array_of_floats_or_of_rows_is_no_corpus(tmp_path: Path) -> None:
    for array, seen in ((np.ones(3), r"float64\[3\]"), (np.ones((2, 2), int), r"int64\[2, 2\]")):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ConfigError, match=seen):
            read_corpus(tmp_path / "a.npy", vocab_size=6, max_tokens=100)


def test_loading_gives_a_lookup_drafter_and_its_corpus(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path)
    (tmp_path / "ids.txt").write_text("1 2 3 1 2 9 9")
    args = EngineArgs(
        model_path=str(pair.target_path),
        speculative_algorithm="NGRAM",
        speculative_ngram_min_match_window_size=2,
        speculative_ngram_max_match_window_size=5,
        speculative_ngram_external_corpus_path=str(tmp_path / "ids.txt"),
        speculative_ngram_external_corpus_max_tokens=6,
    )
    models = load_models(args, resolve_paths(args), mesh=mesh_of(1))
    assert models.drafter == NgramDrafter(args.speculative, min_match=2, max_match=5)
    assert models.draft_layer is None
    assert models.params["draft"]["corpus"].tolist() == [1, 2, 3, 1, 2, 9]
    # Places by what ends there, read backwards: 1 | 1 3 2 1 | 2 1 | 2 1 3 2 1 | 3 2 1.
    assert models.params["draft"]["contexts"].tolist() == [0, 3, 1, 4, 2]

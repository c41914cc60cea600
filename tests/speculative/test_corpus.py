"""Reading a corpus of token ids, and every file that is not a corpus."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.loading import load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError
from jspec.speculative.drafters import corpus
from jspec.speculative.drafters.ngram import BEFORE_START, NgramDrafter, find_in_corpus
from jspec.text.tokenizer.tokenizer import Tokenizer
from tests.speculative.engines import mesh_of
from tests.support.tiny_models import write_tiny_pair

BYTES = 257  # ids of the tiny tokenizer: a byte each, and the end of text
END = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a directory with a tokenizer that has an id for each byte."""
    return write_tiny_pair(tmp_path_factory.mktemp("pair")).target_path


def read_corpus(
    path: Path, *, vocab_size: int = BYTES, max_tokens: int = 100, tokenizer: Path = Path("none")
) -> np.ndarray:
    return corpus.read_corpus(
        path, vocab_size=vocab_size, max_tokens=max_tokens, tokenizer=tokenizer
    )


def texts_of(ids: np.ndarray, tokenizer: Path) -> list[str]:
    """Return the documents, each of which ends with END unless the ids were cut."""
    decode = Tokenizer.from_directory(tokenizer).decode
    ends = [-1, *np.flatnonzero(ids == END).tolist(), len(ids)]
    return [decode(ids[i + 1 : j].tolist()) for i, j in itertools.pairwise(ends)]


def test_ids_come_from_text_and_from_an_array(tmp_path: Path) -> None:
    text, array = tmp_path / "ids.txt", tmp_path / "ids.npy"
    text.write_text("3 1\n4\t1 5\n")
    np.save(array, np.array([3, 1, 4, 1, 5], np.uint16))
    for path in (text, array):
        ids = read_corpus(path, vocab_size=6, max_tokens=100)
        assert ids.dtype == np.int32
        assert ids.tolist() == [3, 1, 4, 1, 5]
        assert read_corpus(path, vocab_size=6, max_tokens=3).tolist() == [3, 1, 4]


def test_text_is_encoded_by_the_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    return 1 2\n", encoding="utf-8")
    ids = read_corpus(tmp_path / "a.py", tokenizer=tokenizer)
    assert texts_of(ids, tokenizer) == ["def f():\n    return 1 2\n", ""]
    assert texts_of(
        read_corpus(tmp_path / "a.py", tokenizer=tokenizer, max_tokens=5), tokenizer
    ) == ["def f"]


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path, tokenizer: Path) -> None:
    for name, text in (
        ("b.txt", "bee"),
        ("a/z.md", "12 13"),  # no list of ids: it is in a directory of texts
        ("a/c.jsonl", '{"text": "one"}\n\n"two"\n{"text": "", "id": 3}'),
        (".git/config", "hidden"),
        (".hidden", "hidden"),
        ("empty.txt", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    ids = read_corpus(tmp_path, tokenizer=tokenizer)
    assert texts_of(ids, tokenizer) == ["bee", "one", "two", "12 13", ""]
    assert texts_of(read_corpus(tmp_path, tokenizer=tokenizer, max_tokens=6), tokenizer) == [
        "bee",
        "on",
    ]


def test_what_is_not_needed_is_not_read(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("enough")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    assert texts_of(read_corpus(tmp_path, tokenizer=tokenizer, max_tokens=6), tokenizer) == [
        "enough"
    ]
    with pytest.raises(ConfigError, match=r"b.txt is not UTF-8: byte 0xff .*, in line 1"):
        read_corpus(tmp_path, tokenizer=tokenizer, max_tokens=8)


def test_long_texts_are_encoded_line_by_line(tmp_path: Path, tokenizer: Path) -> None:
    lines = [f"line {i} " + "x" * (i % 300) for i in range(1000)]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    assert (tmp_path / "a.txt").stat().st_size > 2 * corpus.PIECE_CHARACTERS
    ids = read_corpus(tmp_path / "a.txt", tokenizer=tokenizer, max_tokens=10**6)
    assert texts_of(ids, tokenizer) == ["\n".join(lines), ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"1", r"holds int64\[1\]; expected integers in one dimension, at least two"),
        ("a.txt", b"1 600 2", "holds id 600; expected ids below 257"),
        ("a.txt", b"1 -1 2", "holds id -1; expected ids below 257"),
        ("a.txt", b"1 99999999999999999999", "expected token ids, or text"),
        ("a.txt", b"", "which is empty; expected token ids, or text"),
        ("a.txt", b" \n", "which is empty; expected token ids, or text"),
        (
            "a.txt",
            b"one\ntwo\xff\xfe",
            r"a.txt is not UTF-8: byte 0xff at offset 7, in line 2; expected text",
        ),
        ("a.jsonl", b"", r"holds int64\[0\]; expected .* text of at least two tokens"),
        ("a.jsonl", b'{"text": ""}', r"holds int64\[0\]; expected .* at least two tokens"),
        (
            "a.jsonl",
            b'"a"\n{"text": "b"',
            r"a.jsonl line 2 is not JSON \(.*\); expected a JSON",
        ),
        ("a.jsonl", b'\n{"txt": "b"}', r"a.jsonl line 2 holds \{'txt': 'b'\}; expected a JSON"),
        ("a.jsonl", b'{"text": 3}', r"line 1 holds \{'text': 3\}; expected a JSON object"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1 is not JSON"),
        ("a.jsonl", b'"a \\ud800"', "line 1 holds half of a surrogate pair"),
        ("a.npy", b"", "expected a .npy array of token ids"),
        ("a.npy", b"1 2 3", "expected a .npy array of token ids"),
        (None, b"", "No such file"),
    ],
)
def test_anything_else_is_named(
    tmp_path: Path, tokenizer: Path, name: str | None, content: bytes, message: str
) -> None:
    path = tmp_path / (name or "missing")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_corpus(path, tokenizer=tokenizer)
    assert f"speculative_ngram_external_corpus_path is {str(path)!r}" in str(caught.value)


def test_a_directory_without_text_a_file_too_large_and_a_pipe(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"none', which holds int64\[0\]; expected"):
        read_corpus(tmp_path / "none", tokenizer=tokenizer)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_corpus(tmp_path / "pipe", tokenizer=tokenizer)
    (tmp_path / "large.txt").write_text("much")
    monkeypatch.setattr(corpus, "MAX_FILE_BYTES", 3)
    with pytest.raises(ConfigError, match=r"large.txt has 4 bytes; expected at most 3 a file"):
        read_corpus(tmp_path / "large.txt", tokenizer=tokenizer)


def test_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_corpus(tmp_path / "a.txt", tokenizer=tmp_path)
    (tmp_path / "a.txt").write_text("1 2")
    assert read_corpus(tmp_path / "a.txt", tokenizer=tmp_path).tolist() == [1, 2]


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


def test_text_is_drafted_from(tmp_path: Path) -> None:
    """The row has no match of its own, so the continuation in the text is the chain."""
    pair = write_tiny_pair(tmp_path)
    encode = Tokenizer.from_directory(pair.target_path).encode
    (tmp_path / "text.jsonl").write_text('{"text": "xyzab"}')
    args = EngineArgs(
        model_path=str(pair.target_path),
        speculative_algorithm="NGRAM",
        speculative_ngram_external_corpus_path=str(tmp_path / "text.jsonl"),
    )
    models = load_models(args, resolve_paths(args), mesh=mesh_of(1))
    assert models.params["draft"]["corpus"].tolist() == [*encode("xyzab"), END]
    found = find_in_corpus(
        jnp.asarray(models.params["draft"]["corpus"]),
        jnp.asarray(models.params["draft"]["contexts"]),
        jnp.array([[*reversed(encode("..xy")), *[BEFORE_START] * 8]], jnp.int32),
        draft_shape=args.speculative,
        min_match=2,
    )
    assert found.tokens.tolist() == [[[*encode("zab")]]]
    assert found.is_match.tolist() == [[True]]


def test_a_bad_corpus_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path)
    (pair.target_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "text.jsonl").write_text("{")
    args = EngineArgs(
        model_path=str(pair.target_path),
        speculative_algorithm="NGRAM",
        speculative_ngram_external_corpus_path=str(tmp_path / "text.jsonl"),
        load_format="dummy",
    )
    with pytest.raises(ConfigError, match=r"text.jsonl line 1 is not JSON"):
        load_models(args, resolve_paths(args), mesh=mesh_of(1))

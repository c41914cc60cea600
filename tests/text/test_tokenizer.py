from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, processors

from jspec.errors import CheckpointError, RequestError
from jspec.text.tokenizer.decoders import byte_of
from jspec.text.tokenizer.tokenizer import BosRule, Tokenizer

BUNDLED = Path(__file__).resolve().parents[2] / "jspec" / "bundled" / "target"
PIECE_KINDS = (
    *("sentencepiece", "llama", "gemma", "bytes_then_metaspace", "metaspace"),
    *("metaspace_never", "word_piece", "bpe_suffix", "none"),
)
TEXT = "def f(x):\n    return '你好 🙂'  # größer\n"


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


@settings(deadline=None)
@given(text=st.text())
def test_byte_level_encode_then_decode_is_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    if not any(byte_level.is_special(i) for i in ids):
        assert byte_level.decode(ids) == text


@settings(deadline=None)
@given(data=st.data())
def test_token_bytes_join_to_the_decoded_text(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 2)))
    joined = b"".join(byte_level.all_bytes[i] for i in ids)
    assert joined.decode(errors="replace") == byte_level.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", PIECE_KINDS)
def test_bytes_of_pieces_join_to_the_decoded_text(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = [
        i
        for i in data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
        if tokenizer.id_to_token(i) is not None
    ]
    joined = b"".join(
        [*tokenizer.alphabet.at_start(ids[:1]), *(tokenizer.all_bytes[i] for i in ids[1:])]
    )
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:  # one wrong byte spoils the run of bytes that it is in
        assert joined.decode() == text


def test_vocab_size_is_one_more_than_the_highest_id(byte_level: Tokenizer) -> None:
    assert byte_level.id_to_token(byte_level.vocab_size - 1) == "<é 你>"
    assert byte_level.id_to_token(byte_level.vocab_size) is None
    with pytest.raises(ValueError, match="token_id is -1"):
        byte_level.id_to_token(-1)


def test_only_special_tokens_are_special(byte_level: Tokenizer) -> None:
    names = {byte_level.id_to_token(i) for i in byte_level.special_ids}
    assert names == {"<|bos|>", "<|eos|>", "<|end|>"}
    ids = byte_level.encode("a<|eos|>b<é 你>")
    assert byte_level.decode(ids) == "ab<é 你>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|eos|>b<é 你>"


def test_lone_surrogate_is_a_request_error(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 1"):
        byte_level.encode("a\ud800")


def test_without_config_files_nothing_is_known_about_bos_and_eos(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_ids == ()
    assert byte_level.bos_token_id is None
    assert byte_level.bos_rule is BosRule.AS_TEMPLATE


def test_eos_is_the_union_of_all_files(write_checkpoint: Any) -> None:
    tokenizer = Tokenizer.from_directory(
        write_checkpoint(
            generation_config={"eos_token_id": [7, 2]},
            config={"eos_token_id": 7, "bos_token_id": 0},
            tokenizer_config={"eos_token": {"content": "<|eos|>"}},
        )
    )
    assert tokenizer.eos_token_ids == (7, 2, id_of(tokenizer, "<|eos|>"))
    assert tokenizer.bos_token_id == 0


def test_eos_of_a_nested_language_model(write_checkpoint: Any) -> None:
    directory = write_checkpoint(config={"text_config": {"eos_token_id": 9}})
    assert Tokenizer.from_directory(directory).eos_token_ids == (9,)


def test_explicit_null_bos_wins_over_the_model_config(write_checkpoint: Any) -> None:
    directory = write_checkpoint(config={"bos_token_id": 5}, tokenizer_config={"bos_token": None})
    assert Tokenizer.from_directory(directory).bos_token_id is None


def test_bos_is_added_when_asked_and_the_template_does_not(write_checkpoint: Any) -> None:
    directory = write_checkpoint(tokenizer_config={"bos_token": "<|bos|>", "add_bos_token": True})
    tokenizer = Tokenizer.from_directory(directory)
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT) == (tokenizer.bos_token_id, *plain)
    assert tokenizer.encode("") == (tokenizer.bos_token_id,)
    assert tokenizer.decode(plain) == TEXT


@pytest.mark.parametrize(("add_bos_token", "num_bos"), [(None, 1), (True, 1), (False, 0)])
def test_bos_of_the_template_is_never_doubled(
    write_checkpoint: Any, add_bos_token: bool | None, num_bos: int
) -> None:
    directory = write_checkpoint(
        tokenizer_config={"bos_token": "<|bos|>", "add_bos_token": add_bos_token}
    )
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    backend.save(str(path))
    tokenizer = Tokenizer.from_directory(directory)
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT) == (id_of(tokenizer, "<|bos|>"),) * num_bos + plain


def test_stored_truncation_and_padding_are_dropped(write_checkpoint: Any) -> None:
    directory = write_checkpoint()
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(path))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("def")) < 4


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[]", '{"model": {"type": "Nope"}}'])
def test_missing_or_corrupt_tokenizer_names_the_path(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_directory(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("config", '{"eos_token_id": "x"}', "eos_token_id"),
        ("config", '{"eos_token_id": [1, -1]}', "eos_token_id"),
        ("generation_config", '{"bos_token_id": true}', "bos_token_id"),
        ("generation_config", "[]", "JSON object"),
        ("tokenizer_config", "{", "is not JSON"),
        ("tokenizer_config", '{"eos_token": "<nope>"}', "eos_token"),
        ("tokenizer_config", '{"bos_token": ["<|bos|>"]}', "bos_token"),
        ("tokenizer_config", '{"add_bos_token": "yes"}', "add_bos_token"),
        ("tokenizer_config", '{"add_bos_token": true}', "add_bos_token"),
    ],
)
def test_bad_config_files_name_path_and_field(
    write_checkpoint: Any, name: str, content: str, field: str
) -> None:
    directory = write_checkpoint()
    path = directory / f"{name}.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_directory(directory)
    assert str(path) in str(error.value)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("decoder", "culprit"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "Replace"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteLevel()]), "ByteLevel"),
        (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "WordPiece"),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(
    write_checkpoint: Any, decoder: Any, culprit: str
) -> None:
    path = write_checkpoint() / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["decoder"] = json.loads(decoder.__getstate__())
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"because of {culprit}"):
        Tokenizer.from_directory(path.parent)


def test_byte_tokens_are_recognised_by_their_spelling() -> None:
    assert byte_of("<0xE4>") == 0xE4
    assert not any(byte_of(token) for token in ("<0xE4", "<0xG0>", "a<0xE4>", "<0x123>"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_pipe_is_not_waited_for(byte_level: Tokenizer, name: str, tmp_path: Path) -> None:
    byte_level.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read: it is not a regular file"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_brackets_without_end_are_an_error(
    byte_level: Tokenizer, name: str, tmp_path: Path
) -> None:
    byte_level.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text('{"model": ' + "[" * 200_000)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_directory(tmp_path)


def test_long_rows_are_decoded_while_other_threads_run() -> None:
    """A single long `decode` keeps the interpreter lock to its end."""
    tokenizer = Tokenizer.from_directory(BUNDLED)
    rows = [[10 + i % 3000 for i in range(500_000)], [10, 11, 12]]
    gaps, is_done = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not is_done.wait(0.001):
            last, before = time.monotonic(), last
            gaps.append(last - before)

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    texts = tokenizer.decode_all(rows)
    seconds = time.monotonic() - began
    is_done.set()
    ticking.join()
    assert max(gaps) < 0.6 * seconds
    assert texts == [tokenizer.decode(row) for row in rows]

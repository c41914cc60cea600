"""Corpora for lookup drafting: token ids, or text to encode."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import MIB, check_regular, utf8_fault
from jspec.text.tokenizer.tokenizer import Tokenizer

MAX_FILE_BYTES = 256 * MIB
PIECE_CHARACTERS = 1 << 16  # encoded at once, in whole lines, to stop after max_tokens
_WORD, _INTEGER = re.compile(r"\S+"), re.compile(r"[+-]?[0-9]+")


def read_corpus(path: Path, *, vocab_size: int, max_tokens: int, tokenizer: Path) -> np.ndarray:
    """Return the first ids of a corpus, i32[n] with 2 <= n <= max_tokens.

    A .npy array or a text of integers holds ids; other text is encoded with the tokenizer in the
    directory `tokenizer`. A .jsonl file has one document per line: an object with a "text" field,
    or a string. A directory is read recursively by name. Documents end with the end-of-text token.
    Raises ConfigError naming the file (and line), CheckpointError for text without a tokenizer.
    """
    name = f"speculative_ngram_external_corpus_path is {str(path)!r}"
    if path.suffix == ".npy":
        ids = _array(path, name)
    elif (listed := _listed_ids(path, name)) is not None:
        ids = listed
    else:
        found = Tokenizer.from_directory(tokenizer)
        ids = _encoded(_documents(path, name), found, max_tokens=max_tokens)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.size < 2:
        raise ConfigError(
            f"{name}, which holds {ids.dtype}{list(ids.shape)}; expected integers in one "
            f"dimension, at least two, or text of at least two tokens"
        )
    ids = ids[:max_tokens]
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ConfigError(f"{name}, which holds id {outside[0]}; expected ids below {vocab_size}")
    return ids.astype(np.int32)


def _array(path: Path, name: str) -> np.ndarray:
    try:
        found: np.ndarray = np.load(path)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{name}; expected a .npy array of token ids ({error})") from error
    return found


def _listed_ids(path: Path, name: str) -> np.ndarray | None:
    if path.suffix == ".jsonl" or path.is_dir():
        return None
    text = _text(path, name)
    if not all(_INTEGER.fullmatch(match[0]) for match in _WORD.finditer(text)):
        return None
    words = text.split()
    if not words:
        raise ConfigError(f"{name}, which is empty; expected token ids, or text")
    try:
        return np.array([int(word) for word in words], np.int64)
    except (OverflowError, ValueError) as error:  # too many digits for int64 or Python
        raise ConfigError(f"{name}; expected token ids, or text ({error})") from error


def _encoded(documents: Iterator[str], tokenizer: Tokenizer, *, max_tokens: int) -> np.ndarray:
    pieces = [np.zeros(0, np.int64)]
    room = max_tokens
    for ids in _encoded_pieces(documents, tokenizer):
        pieces.append(np.array(ids, np.int64))
        room -= len(ids)
        if room <= 0:
            break
    return np.concatenate(pieces)


def _encoded_pieces(documents: Iterator[str], tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    for document in documents:
        start = 0
        while start < len(document):
            end = document.find("\n", start + PIECE_CHARACTERS) + 1 or len(document)
            yield tokenizer.encode(document[start:end], add_special_tokens=False)
            start = end
        if document:
            yield tokenizer.eos_token_ids[:1]


def _documents(path: Path, name: str) -> Iterator[str]:
    for file in _files(path) if path.is_dir() else (path,):
        text = _text(file, name)
        if file.suffix == ".jsonl":
            yield from _records(text, f"{name}: {file}")
        else:
            yield text


def _files(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(folder) / each for each in sorted(files) if not each.startswith("."))


def _text(path: Path, name: str) -> str:
    try:
        size = check_regular(path)
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{name}: {path} has {size} bytes; expected at most {MAX_FILE_BYTES} a file"
            )
        data = path.read_bytes()
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"{name}; expected a file or a directory to read ({error})") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}: {path} {utf8_fault(error)}, in line {line}; expected text, or a .npy array "
            "of token ids"
        ) from error


def _records(text: str, where: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _record(line, f"{where} line {number}")


def _record(line: str, where: str) -> str:
    expected = 'expected a JSON object with a "text" field, or a string'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); {expected}") from error
    found = value.get("text") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise ConfigError(f"{where} holds {shown(value)}; {expected}")
    if not found.isascii() and any("\ud800" <= letter <= "\udfff" for letter in found):
        raise ConfigError(f"{where} holds half of a surrogate pair; expected valid Unicode")
    return found

"""Small tokenizers of every kind, written to disk once and loaded as a checkpoint's would be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jspec.text.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "class Node:\n    def __init__(self, value, parents):\n        self.value = value\n",
    "for index, token in enumerate(tokens):\n    print(index, token)\n",
    "# größer, naïve, 你好世界, こんにちは, 🙂🙃 👩‍👩‍👧\n",
]
WORD_PIECES = ("▁", "▁▁", "▁def", "▁f", "(", "x", "▁x▁", "你", "é", ".", "\ufffd")
PIECES = (*WORD_PIECES, "##s", "</w>", "y</w>")
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPACES = decoders.Replace("▁", " ")
PIECE_DECODERS: Mapping[str, Any] = {
    "llama": decoders.Sequence(
        [SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "strip_two": decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "gemma": decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    "bytes_then_metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "word_piece": decoders.WordPiece(),
    "bpe_suffix": decoders.BPEDecoder(),
    "none": None,
}

WriteCheckpoint = Callable[..., Path]


def train_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|eos|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Added tokens are plain text, not byte-level spelling: spaces and non-Latin text occur.
    backend.add_tokens([AddedToken("        ", normalized=False), AddedToken("<é 你>")])
    return backend


def train_sentencepiece() -> tokenizers.Tokenizer:
    """Llama's arrangement: a space put in front, byte fallback, the leading space stripped."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = PIECE_DECODERS["llama"]
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS[:3], trainer)
    content = json.loads(backend.to_str())
    content["model"]["byte_fallback"] = True
    vocab = content["model"]["vocab"]
    vocab.update({piece: len(vocab) + rank for rank, piece in enumerate(BYTE_PIECES)})
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def piece_vocabulary(decoder: Any) -> tokenizers.Tokenizer:
    vocab = {piece: piece_id for piece_id, piece in enumerate((*PIECES, *BYTE_PIECES))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="x"))
    backend.add_special_tokens(["</s>"])
    if decoder is not None:
        backend.decoder = decoder
    return backend


def write_files(directory: Path, backend: tokenizers.Tokenizer, **configs: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    for name, value in configs.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    return train_byte_level()


@pytest.fixture
def write_checkpoint(tmp_path: Path, byte_level_backend: tokenizers.Tokenizer) -> WriteCheckpoint:
    """Writes a byte-level checkpoint; keywords are JSON files, as in `config={...}`."""

    def write(**configs: Any) -> Path:
        return write_files(tmp_path / "model", byte_level_backend, **configs)

    return write


@pytest.fixture(scope="session")
def tokenizers_by_kind(
    tmp_path_factory: pytest.TempPathFactory, byte_level_backend: tokenizers.Tokenizer
) -> Mapping[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    backends = {"byte_level": byte_level_backend, "sentencepiece": train_sentencepiece()}
    for kind, decoder in PIECE_DECODERS.items():
        backends[kind] = piece_vocabulary(decoder)
    return {
        kind: Tokenizer.from_directory(write_files(root / kind, backend))
        for kind, backend in backends.items()
    }


@pytest.fixture(scope="session")
def byte_level(tokenizers_by_kind: Mapping[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind["byte_level"]


@pytest.fixture(scope="session")
def sentencepiece(tokenizers_by_kind: Mapping[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind["sentencepiece"]

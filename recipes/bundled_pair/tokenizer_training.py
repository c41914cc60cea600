"""Training of a byte-level BPE tokenizer for source code, written in Hugging Face's layout.

Pre-tokens: a run of line breaks; a run of two or more spaces or of tabs (so a line's indentation is
one token and a prompt may end right after it); a word with at most one character before it, as in
".word" and "_word"; up to three digits; a run of punctuation. There is no normaliser, so decoding
an encoding restores the text byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jspec.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"

_PATTERN = "|".join(
    (
        r"[\r\n]+",
        r" {2,}",
        r"\t+",
        r"[^\r\n\t\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r"\s",
    )
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with `vocab_size` entries: END_OF_TEXT is id 0, no byte is missing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=1)
    (folder / "tokenizer_config.json").write_text(text + "\n", "utf-8")


def end_of_text_id(tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise ConfigError(f"the tokenizer has no {END_OF_TEXT}; expected one of this module's")
    return int(token_id)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / TOKENIZER_FILE))

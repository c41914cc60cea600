"""End-of-sequence ids from the model's files and the tokenizer's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from jspec.engine.weights.loading import BUNDLED, end_of_sequence_ids
from jspec.text.tokenizer.tokenizer import Tokenizer

TARGET = BUNDLED / "target"


def tokenizer_alone(directory: Path, **config: object) -> Tokenizer:
    shutil.copy(TARGET / "tokenizer.json", directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_directory(directory)


def test_a_tokenizer_elsewhere_takes_no_end_away(tmp_path: Path) -> None:
    own = end_of_sequence_ids(TARGET, Tokenizer.from_directory(TARGET))
    assert own != ()
    assert tokenizer_alone(tmp_path).eos_token_ids == ()
    assert end_of_sequence_ids(TARGET, tokenizer_alone(tmp_path)) == own
    assert end_of_sequence_ids(TARGET, None) == own


def test_each_may_name_ends_that_the_other_does_not(tmp_path: Path) -> None:
    backend = Tokenizer.from_directory(TARGET).backend
    own = end_of_sequence_ids(TARGET, None)
    other = next(i for i in range(20, 99) if backend.id_to_token(i) and i not in own)
    tokenizer = tokenizer_alone(tmp_path, eos_token=backend.id_to_token(other))
    assert end_of_sequence_ids(TARGET, tokenizer) == (*own, other)

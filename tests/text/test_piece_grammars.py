"""Grammars over vocabularies of text pieces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jspec.errors import RequestError
from jspec.messages.grammar import ReasoningMarks, num_words
from jspec.messages.request import SamplingParams
from jspec.text.grammar.grammars import Grammars
from jspec.text.tokenizer.tokenizer import Tokenizer

from .conftest import BYTE_PIECES, PIECE_DECODERS, SPACES, train_sentencepiece, write_files

pytest.importorskip("llguidance")

MODEL_IDS = 50  # of a model, more than its tokenizer has
PIECES = [
    *("▁", "▁▁", "t", "r", "u", "e", "f", "▁t", "▁true", "true", "tr", "▁fal", "se", "alse"),
    *("{", "▁{", '{"', '"', "a", "▁a", '":', ":", "}", "1", "▁1", "é", "▁é", "ue", "▁x▁", "x"),
]


def gemma() -> tokenizers.Tokenizer:
    """Llama's tokenizer without the prepended space."""
    content = json.loads(train_sentencepiece().to_str())
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = PIECE_DECODERS["gemma"]
    return backend


def unigram(decoder: Any) -> Callable[[], tokenizers.Tokenizer]:
    def made() -> tokenizers.Tokenizer:
        special = ["<unk>", "</s>", "<pad>"]
        pieces = [*special, *PIECES, *BYTE_PIECES]
        vocab = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
        backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoder
        backend.add_special_tokens(special)
        return backend

    return made


BACKENDS: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    "llama": train_sentencepiece,
    "gemma": gemma,
    "unigram": unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "unigram_never": unigram(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    ),
    "strips_two": unigram(
        decoders.Sequence(
            [SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
        )
    ),
    "strips_one": unigram(PIECE_DECODERS["llama"]),
}


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("pieces")
    return {
        kind: Tokenizer.from_directory(write_files(root / kind, make()))
        for kind, make in BACKENDS.items()
    }


@pytest.fixture(params=sorted(BACKENDS))
def tokenizer(by_kind: dict[str, Tokenizer], request: pytest.FixtureRequest) -> Tokenizer:
    return by_kind[request.param]


def end_of(tokenizer: Tokenizer) -> int:
    end = tokenizer.token_to_id("</s>")
    assert end is not None
    return end


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    size = tokenizer.vocab_size + MODEL_IDS
    return Grammars(tokenizer, vocab_size=size, eos_token_ids=(end_of(tokenizer),))


def grammar_of(tokenizer: Tokenizer, **given: Any) -> Any:
    source = SamplingParams(**given).grammar
    assert source is not None
    return grammars_of(tokenizer).compile(source)


def masks(state: Any, tokenizer: Tokenizer, ids: list[int], parents: list[int]) -> list[set[int]]:
    size = tokenizer.vocab_size + MODEL_IDS
    allowed = np.zeros((len(ids), num_words(size)), np.uint32)
    state.fill(np.array(ids, np.int32), np.array(parents, np.int32), allowed)
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def next_ids(state: Any, tokenizer: Tokenizer) -> set[int]:
    return masks(state, tokenizer, [0], [-1])[0]


SCHEMA = {"properties": {"a": {"enum": [1, "é"]}}, "required": ["a"], "additionalProperties": False}
COMPACT = {**SCHEMA, "type": "object", "x-guidance": {"whitespace_flexible": False}}


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "(true|false)"}, "true|false"),
        ({"regex": " (true|false)"}, " (true|false)"),
        ({"regex": "( |  )?[a-z]{1,3}( é 你)?"}, "( |  )?[a-z]{1,3}( é 你)?"),
        ({"json_schema": COMPACT}, r'\{"a":(1|"é")\}'),
        ({"ebnf": 'root ::= "a" | " a" | "ä"'}, " ?a|ä"),
    ],
    ids=["words", "space first", "spaces", "schema", "ebnf"],
)
def test_any_allowed_path_is_a_text_of_the_grammar(
    tokenizer: Tokenizer, given: dict[str, Any], pattern: str
) -> None:
    draw, end, grammar = random.Random(5), end_of(tokenizer), grammar_of(tokenizer, **given)
    for _ in range(40):
        state, ids = grammar.begin(), list[int]()
        while True:
            allowed = next_ids(state, tokenizer)
            assert allowed
            assert not allowed & (tokenizer.special_ids - {end})
            assert max(allowed) < tokenizer.vocab_size
            chosen = draw.choice(sorted(allowed))
            if chosen == end:
                break
            ids.append(chosen)
            state.accept((chosen,))
            assert not state.failed
        assert re.fullmatch(pattern, tokenizer.decode(ids)), [tokenizer.id_to_token(i) for i in ids]


def test_a_token_is_allowed_if_what_the_client_sees_goes_on_to_a_text(tokenizer: Tokenizer) -> None:
    """Compare first and second tokens with the decoder's own text."""
    words = ("true", "t x", "false", " false", "  {", "  true", "a", "a{", "é", " é")
    grammar = grammar_of(tokenizer, regex="|".join(map(re.escape, words)))
    own = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    pieces = [i for i in own if "\ufffd" not in tokenizer.decode([i])]

    def goes_on(ids: list[int]) -> bool:
        return any(word.startswith(tokenizer.decode(ids)) for word in words)

    first = next_ids(grammar.begin(), tokenizer)
    for i in pieces:
        if tokenizer.decode([i]):
            assert (i in first) == goes_on([i]), tokenizer.id_to_token(i)
    assert {tokenizer.decode([i])[:1] for i in first} >= {"t", "f", "a"}
    num_checked = 0
    for i in sorted(first & {*pieces}):
        state, text = grammar.begin(), tokenizer.decode([i])
        state.accept((i,))
        if len({word[len(text) :][:1] for word in words if word.startswith(text)}) < 2:
            continue  # one way on: the masks may keep to how a tokenizer spells it
        second = next_ids(state, tokenizer)
        num_checked += 1
        for j in pieces:
            if tokenizer.decode([i, j]) != text:
                assert (j in second) == goes_on([i, j]), tokenizer.decode([i, j])
    assert num_checked > 3


def test_nodes_of_a_tree_have_the_masks_of_their_own_paths(tokenizer: Tokenizer) -> None:
    grammar, draw = grammar_of(tokenizer, regex="( ?[a-z]{1,4} ){1,3}"), random.Random(1)
    state, first = grammar.begin(), sorted(next_ids(grammar.begin(), tokenizer))
    tokens, parents, paths = [0], [-1], [tuple[int, ...]()]
    for _ in range(12):
        parent = draw.randrange(len(tokens))
        alone = grammar.begin()
        alone.accept(paths[parent])
        choices = sorted(next_ids(alone, tokenizer) - {end_of(tokenizer)}) if parent else first
        if choices:
            tokens.append(draw.choice(choices))
            parents.append(parent)
            paths.append((*paths[parent], tokens[-1]))
    for _ in range(2):  # and the state is unchanged
        for found, path in zip(masks(state, tokenizer, tokens, parents), paths, strict=True):
            alone = grammar.begin()
            alone.accept(path)
            assert found == next_ids(alone, tokenizer)


def test_after_reasoning_the_grammar_begins_inside_a_text(by_kind: dict[str, Tokenizer]) -> None:
    llama = by_kind["strips_one"]
    grammars, end = grammars_of(llama), end_of(llama)
    source = SamplingParams(regex="true|( true x)").grammar
    spaced = llama.token_to_id("▁true")
    close = llama.backend.model.tokenize("</t>")
    assert source is not None
    assert spaced is not None
    grammar = grammars.compile(source)
    state, ids = grammars.after_reasoning(grammar, ReasoningMarks("</t>")).begin(), close
    for token_id in (*(token.id for token in ids), spaced):
        state.accept((token_id,))
    assert end not in next_ids(state, llama)  # it is " true" there, of which more must come
    # The answer may start with the grammar's text, or with `{`, which opens the reasoning.
    marks = ReasoningMarks("</t>", open="{")
    for opening, is_whole in ((), True), ((llama.token_to_id("{"), *(t.id for t in ids)), False):
        state = grammars.after_reasoning(grammar, marks).begin()
        for token_id in (*opening, spaced):
            assert token_id is not None
            assert token_id in next_ids(state, llama)
            state.accept((token_id,))
        assert not state.failed
        assert (end in next_ids(state, llama)) == is_whole


def test_an_end_that_the_tokenizer_shows_is_no_text_of_a_grammar(tmp_path: Path) -> None:
    backend = gemma()
    backend.add_tokens(["<end>"])
    tokenizer = Tokenizer.from_directory(write_files(tmp_path, backend))
    end = tokenizer.token_to_id("<end>")
    assert end is not None
    assert not tokenizer.is_special(end)
    size = tokenizer.vocab_size + MODEL_IDS
    source = SamplingParams(regex="[<>a-z]{3,9}x").grammar
    assert source is not None
    state = Grammars(tokenizer, vocab_size=size, eos_token_ids=(end,)).compile(source).begin()
    assert end not in next_ids(state, tokenizer)


def test_a_decoder_that_cuts_the_end_is_refused(tmp_path: Path) -> None:
    for part in (decoders.BPEDecoder(), decoders.Strip(" ", 1, 1)):
        backend = unigram(part)()
        tokenizer = Tokenizer.from_directory(write_files(tmp_path, backend))
        with pytest.raises(RequestError, match=r"\(regex\) and the tokenizer's decoder has"):
            grammar_of(tokenizer, regex="a")

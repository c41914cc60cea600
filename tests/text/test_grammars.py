"""Masks at tree nodes, refused grammars, and the cache of compiled grammars."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec.errors import RequestError
from jspec.messages.grammar import GrammarKind, GrammarSource, num_words
from jspec.messages.request import SamplingParams
from jspec.text.grammar.grammar_state import CompiledGrammar
from jspec.text.grammar.grammars import MAX_ALL_WORK, MAX_WORK, Grammars
from jspec.text.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_models import tiny_tokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer.from_directory(folder)


@pytest.fixture(scope="module")
def end_id(tokenizer: Tokenizer) -> int:
    return min(tokenizer.special_ids)


@pytest.fixture(scope="module")
def vocab_size(tokenizer: Tokenizer) -> int:
    return tokenizer.vocab_size + 37  # a model's vocabulary may be larger


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, vocab_size: int, end_id: int) -> Grammars:
    return Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=(end_id,))


def source(**given: Any) -> GrammarSource:
    found = SamplingParams(**given).grammar
    assert found is not None
    return found


def allowed_ids(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def filled(state: Any, tokens: list[int], parents: list[int], vocab_size: int) -> np.ndarray:
    allowed = np.zeros((len(tokens), num_words(vocab_size)), np.uint32)
    state.fill(np.array(tokens, np.int32), np.array(parents, np.int32), allowed)
    return allowed


def root_of(grammars: Grammars, given: GrammarSource, ids: tuple[int, ...], size: int) -> set[int]:
    """Return the ids allowed after `ids`, from a separate state."""
    state = grammars.compile(given).begin()
    state.accept(ids)
    return allowed_ids(filled(state, [0], [-1], size)[0])


def test_every_node_is_told_what_may_follow_its_own_path(
    grammars: Grammars, tokenizer: Tokenizer, vocab_size: int, end_id: int
) -> None:
    given = source(json_schema=SCHEMA)
    path = tokenizer.encode('{"a":"', add_special_tokens=False)
    x, wrong = (tokenizer.encode(t, add_special_tokens=False)[0] for t in ("x", "7"))
    y = tokenizer.encode("y", add_special_tokens=False)[0]
    state = grammars.compile(given).begin()
    state.accept(path)
    # root -> x, wrong, y; wrong -> x; y -> y, end
    tokens, parents = [0, x, wrong, y, x, y, end_id], [-1, 0, 0, 0, 2, 3, 3]
    for _ in range(2):  # and the state is unchanged
        masks = [allowed_ids(row) for row in filled(state, tokens, parents, vocab_size)]
        paths = {0: (), 1: (x,), 3: (y,), 5: (y, y)}
        for node, after in paths.items():
            assert masks[node] == root_of(grammars, given, (*path, *after), vocab_size)
        everything = set(range(num_words(vocab_size) * 32))
        assert all(masks[node] == everything for node in (2, 4, 6))  # no path reaches these nodes
    assert {x, y} <= masks[0]
    assert wrong not in masks[0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"json_schema": SCHEMA}, '{"a":"x","b":true}'),
        ({"json_schema": json.dumps(SCHEMA)}, '{"a":"yy","b":false}'),
        ({"regex": "[0-9]{2}-x"}, "42-x"),
        ({"ebnf": 'root ::= "ab" | "ba"'}, "ba"),
        ({"ebnf": 'start: "ab" "c"'}, "abc"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            },
            'free <f>{"a":"x","b":true}</f> text',
        ),
    ],
    ids=["schema", "schema as text", "regex", "gbnf", "lark", "tag"],
)
def test_a_text_of_the_grammar_is_allowed_and_then_the_end(
    grammars: Grammars,
    tokenizer: Tokenizer,
    vocab_size: int,
    end_id: int,
    given: dict[str, Any],
    text: str,
) -> None:
    state = grammars.compile(source(**given)).begin()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert token_id in allowed_ids(filled(state, [0], [-1], vocab_size)[0])
        state.accept((token_id,))
        assert not state.failed
    last = allowed_ids(filled(state, [0], [-1], vocab_size)[0])
    assert end_id in last
    assert all(token_id < vocab_size for token_id in last)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "(a"}, r"regex is '\(a': .*unclosed group"),
        ({"json_schema": {"type": "objec"}}, "json_schema is .*Invalid type: objec"),
        ({"json_schema": "[1"}, r"json_schema is '\[1': "),
        ({"json_schema": "[1]"}, "expected a JSON object"),
        (
            {"json_schema": "[" + "9" * 5000 + "]"},
            r"\.\.\.: an integer of 5000 digits; expected at",
        ),
        ({"ebnf": 'root ::= "a'}, "ebnf is "),
        ({"structural_tag": {"structures": [], "triggers": []}}, "expected lists `structures`"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<b"]}},
            "no trigger begins '<a>'",
        ),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(
    grammars: Grammars, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        grammars.compile(source(**given))


DEFINED = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}}
NEEDY = {"$defs": {"n": {**DEFINED["$defs"]["n"], "required": ["c"]}}}
A_REF = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
ENDLESS: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, "#/$ref leads back to #"),
    ({"allOf": [{"$ref": "#"}]}, "#/allOf/0/$ref leads back to #"),
    (A_REF, "#/anyOf/0/$ref leads back to #"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
     "#/$defs/b/$ref leads back to #/$defs/a"),
    ({"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"], **NEEDY},
     "#/$defs/n/properties/c/$ref leads back to #/$defs/n"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/$ref leads back to #"),
    ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
     "#/prefixItems/1/$ref leads back to #"),
    ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
     "#/additionalProperties/$ref leads back to #"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), ENDLESS, ids=[found for _, found in ENDLESS])
def test_a_schema_that_no_finite_text_follows_names_the_reference(
    grammars: Grammars, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"never ends: {re.escape(message)}; expected"):
        grammars.compile(source(json_schema=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", **DEFINED},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, **NEEDY},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {
            "type": "object",
            "additionalProperties": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "minProperties": 1,
        },
        {  # a chain of references that is longer than Python's stack is deep
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
            | {"d1500": {"enum": [1]}},
            "$ref": "#/$defs/d1400",
        },
    ],
    ids=["optional", "unused", "alternative", "null", "empty", "others", "chain"],
)
def test_a_recursion_that_can_end_is_taken(grammars: Grammars, schema: dict[str, Any]) -> None:
    grammars.compile(source(json_schema=schema))


def test_what_a_schema_asks_and_is_not_enforced_is_logged_once(
    guided: Grammars,
    tokenizer: Tokenizer,
    vocab_size: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A property's name, a default and a known format are not in the log."""
    file = {"type": "string", "format": "path"}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "date"},
            "uniqueItems": {"type": "array", "items": file, "uniqueItems": True, "default": [1]},
            "b": {"anyOf": [{"type": "string", "format": "binary"}]},
            "c": {"type": "array", "uniqueItems": False},
        },
        "required": ["format", "uniqueItems"],
        "additionalProperties": False,
    }
    state = guided.compile(source(json_schema=schema)).begin()
    text = '{"format":"2020-01-01","uniqueItems":["a","a"]}'
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert token_id in allowed_ids(filled(state, [0], [-1], vocab_size)[0])
        state.accept((token_id,))
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": ""}], "triggers": ["<f"]}
    guided.compile(source(structural_tag=tag))
    (line,) = [each.getMessage() for each in caplog.records]
    assert line == (
        "a JSON schema has format 'path', uniqueItems, format 'binary': accepted and not enforced "
        "(logged once a name)"
    )
    with pytest.raises(RequestError, match="Unimplemented keys"):
        guided.compile(source(json_schema={"not": {"type": "string"}, "uniqueItems": True}))


def test_an_engine_without_grammars_says_so(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, vocab_size=400, eos_token_ids=(1,), backend="none")
    with pytest.raises(RequestError, match=r"\(regex\) and grammar_backend is 'none'"):
        grammars.compile(source(regex="a"))


def test_a_grammar_needs_a_tokenizer_and_an_end(tokenizer: Tokenizer) -> None:
    regex = GrammarSource(GrammarKind.REGEX, "a")
    with pytest.raises(RequestError, match="has no tokenizer"):
        Grammars(None, vocab_size=8, eos_token_ids=(1,)).compile(regex)
    with pytest.raises(RequestError, match="names no end of sequence"):
        Grammars(tokenizer, vocab_size=8, eos_token_ids=()).compile(regex)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf are given; expected one grammar"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos is true beside regex"),
        ({"regex": ""}, "regex is ''; expected a text that is not empty"),
        ({"regex": 3}, "regex is 3; expected a text"),
        ({"json_schema": "x" * 300000}, "json_schema has 300000 characters; expected at most"),
    ],
)
def test_sampling_parameters_say_what_was_expected(given: dict[str, Any], message: str) -> None:
    for make in (SamplingParams.from_mapping, lambda values: SamplingParams(**values)):
        with pytest.raises(RequestError, match=message):
            make(given)


def test_a_grammar_that_grew_too_large_says_so_in_a_sentence(
    tokenizer: Tokenizer, vocab_size: int, end_id: int
) -> None:
    """llguidance's own message contains thousands of characters of parser state."""
    made = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=(end_id,))
    names = {f"k{i}": {"type": "string"} for i in range(1500)}
    schema = {"type": "object", "properties": names}
    with pytest.raises(RequestError, match=r"json_schema is .* items; max is 2000"):
        made.compile(source(json_schema=schema))  # at its first token; here at a later one:
    state = made.compile(source(json_schema={"type": "array", "items": schema})).begin()
    state.accept(tokenizer.encode("[{", add_special_tokens=False))
    filled(state, [0], [-1], vocab_size)
    assert "items" in state.failed
    assert len(state.failed) < 300


HUGE = "(((a{1000}){1000}){%d})b"  # llguidance's own limits let it grow to 160 MB in half a second


@pytest.fixture
def guided(tokenizer: Tokenizer, vocab_size: int, end_id: int) -> Grammars:
    return Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=(end_id,))


@pytest.mark.parametrize(
    "given",
    [
        {"regex": HUGE % 700},
        {"regex": "x((a{1000}){900})b"},
        {"ebnf": 'start: "x" A\nA: /((a{1000}){900})b/'},
        {"json_schema": {"type": "string", "pattern": f"^{HUGE % 700}$"}},
    ],
    ids=["repetitions", "later", "lark", "pattern"],
)
def test_a_pattern_that_grows_beyond_bounds_is_refused_before_it_runs(
    guided: Grammars, given: dict[str, Any]
) -> None:
    """Computing a mask would stall every sequence of the batch."""
    name = next(iter(given))
    started = time.thread_time()
    with pytest.raises(RequestError, match=f"{name} is .*too many expressions.*; expected .*count"):
        guided.compile(source(**given))
    refused = time.thread_time() - started
    sum(i for i in range(2_000_000))  # as slow as this machine: 0.1 s or more
    assert refused < 2 * (time.thread_time() - started - refused)


def test_refused_patterns_leave_no_memory_behind(guided: Grammars) -> None:
    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    before = resident()
    for number in range(700, 708):
        with pytest.raises(RequestError):
            guided.compile(source(regex=HUGE % number))
    assert resident() - before < 100 << 20


def test_a_grammar_whose_run_failed_is_made_anew(
    guided: Grammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    """Sequences share the lexer state, so the next one would fail as well."""
    given = source(regex=".*[ab].{200}c")
    grammar = guided.compile(given)
    waiting = grammar  # compiled, and not started yet
    state, ids = grammar.begin(), tokenizer.encode("a", add_special_tokens=False)
    state.accept((vocab_size,))  # no token: an error of the package
    assert state.failed
    again = guided.compile(given)
    assert again is not grammar
    for made in (waiting, again):
        fresh = made.begin()
        fresh.accept(ids)
        assert not fresh.failed
        assert allowed_ids(filled(fresh, [0], [-1], vocab_size)[0])


def test_what_worked_long_is_made_anew_and_the_least_used_goes(
    tokenizer: Tokenizer, vocab_size: int, end_id: int
) -> None:
    """llguidance's memory grows with work, so the cache is bounded by work."""
    made = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=(end_id,))
    letters = "abcdefgh"
    grammars = [made.compile(source(regex=letter)) for letter in letters]
    assert made.compile(source(regex="a")) is grammars[0]
    for grammar in grammars[1:]:
        assert isinstance(grammar, CompiledGrammar)
        grammar.work.seconds += MAX_WORK * 0.9
    assert made.compile(source(regex="a")) is grammars[0]  # it is the last one used now
    kept = [made.compile(source(regex=x)) is g for x, g in zip(letters, grammars, strict=True)]
    assert kept[0]
    assert 2 <= sum(kept) <= 1 + MAX_ALL_WORK / MAX_WORK / 0.9
    assert isinstance(grammars[0], CompiledGrammar)
    grammars[0].work.seconds += MAX_WORK * 1.1
    assert made.compile(source(regex="a")) is not grammars[0]


def test_work_is_counted(grammars: Grammars, vocab_size: int) -> None:
    grammar = grammars.compile(source(regex="[a-z]{1,400}"))
    assert isinstance(grammar, CompiledGrammar)
    before, state = grammar.work.seconds, grammar.begin()
    for _ in range(20):
        filled(state, [0], [-1], vocab_size)
    assert before < grammar.work.seconds < 1


def test_large_and_usual_grammars_are_taken(guided: Grammars, vocab_size: int) -> None:
    sized = {"type": "string", "minLength": 1, "maxLength": 200}
    for given in (
        {"json_schema": {"enum": [f"value {i * 7919 % 100003}" for i in range(10000)]}},
        {"json_schema": {"properties": {f"k{i}": sized for i in range(300)}}},
        {"json_schema": {"type": "string", "minLength": 3000, "maxLength": 20000}},
        {"regex": r"(\w{1,60}[ ,.]){1,80}"},
        {"regex": "a{5000}"},
    ):
        state = guided.compile(source(**given)).begin()
        filled(state, [0], [-1], vocab_size)
        assert not state.failed

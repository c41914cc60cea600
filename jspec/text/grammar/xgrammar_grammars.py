"""Grammars through xgrammar (github.com/mlc-ai/xgrammar), an extra: `pip install jspec[xgrammar]`.

Its converter of JSON schemas leaves out keywords that it does not know, so those are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jspec.messages.grammar import WORD_BITS, GrammarKind, GrammarSource, num_words
from jspec.text.grammar.grammar_state import CompiledGrammar
from jspec.text.grammar.grammar_vocabulary import Vocabulary
from jspec.text.grammar.structural_tags import read_tags

# Keywords of JSON schema that would be left out.
UNKNOWN = frozenset(
    {
        *("not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains"),
        *("maxContains", "dependentRequired", "dependentSchemas", "dependencies"),
    }
)
OPTIONS = "x-guidance"  # llguidance's, of which whitespace_flexible is read here too
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset({"enum", "const", "default", "examples"})


class XgrammarGrammars:
    """Implements `grammars.Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        hidden = frozenset(vocabulary.special_token_ids)
        # A token without bytes is never allowed; special ones have text, but are none of a grammar.
        tokens = [b"" if i in hidden else token for i, token in enumerate(vocabulary.tokens)]
        self._eos_token_ids = vocabulary.eos_token_ids
        info = xgrammar.TokenizerInfo(
            tokens,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=list(self._eos_token_ids),
        )
        bits = np.zeros(num_words(len(tokens)) * WORD_BITS, bool)
        bits[: len(tokens)] = [bool(token) for token in tokens]
        bits[list(self._eos_token_ids)] = True
        self._usable = np.packbits(bits, bitorder="little").view(np.uint32)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """See `grammars.Backend`."""
        return CompiledGrammar(lambda: self._begun(source), eos_token_ids=self._eos_token_ids)

    def _begun(self, source: GrammarSource) -> Callable[[], _Matcher]:
        import xgrammar

        compiled = self._compiled(source)
        return lambda: _Matcher(xgrammar.GrammarMatcher(compiled), self._usable)

    def _compiled(self, source: GrammarSource) -> Any:
        import xgrammar

        text = source.text
        if source.kind is GrammarKind.JSON_SCHEMA:
            schema, is_flexible = _schema(json.loads(text))
            return self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=is_flexible, strict_mode=False
            )
        if source.kind is GrammarKind.REGEX:
            return self._compiler.compile_regex(text)
        if source.kind is GrammarKind.EBNF:
            if "::=" in text:
                return self._compiler.compile_grammar(text)
            return self._compiler.compile_lark(text)
        tags = read_tags(text)
        items = [
            xgrammar.StructuralTagItem(
                begin=tag.begin, schema=json.dumps(_schema(tag.schema)[0]), end=tag.end
            )
            for tag in tags
        ]
        triggers = list(dict.fromkeys(tag.trigger for tag in tags))
        return self._compiler.compile_structural_tag(items, triggers)


class _Matcher:
    """Implements `grammar_state.Matcher`."""

    def __init__(self, matcher: Any, usable: np.ndarray) -> None:
        self._matcher, self._usable = matcher, usable
        self.error = ""

    def fill(self, row: np.ndarray) -> None:
        """See Matcher."""
        if not self.error:
            self._matcher.fill_next_token_bitmask(row.view(np.int32).reshape(1, -1))
            row &= self._usable  # where it allows all, it looks at no token

    def consume(self, token_ids: list[int]) -> bool:
        """See Matcher."""
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                self.error = f"token {token_id} is not allowed"
                return False
        return True

    def go_back(self) -> None:
        """See Matcher."""
        self._matcher.rollback(1)


def _schema(given: Any) -> tuple[Any, bool]:
    """Without llguidance's options, and whether blanks may stand between the parts of the JSON.

    Raises ValueError for what is no schema, and for keywords that would not be kept to.
    """
    if not isinstance(given, Mapping | bool):
        raise ValueError("expected a JSON object")
    found = sorted(set(_keywords(given)) & UNKNOWN)
    if found:
        raise ValueError(
            f"{', '.join(found)}: xgrammar does not keep to it; expected a schema "
            f"without it, or --grammar-backend llguidance"
        )
    if isinstance(given, bool):
        return given, True
    options = given.get(OPTIONS) or {}
    is_flexible = not isinstance(options, Mapping) or options.get("whitespace_flexible", True)
    return {name: value for name, value in given.items() if name != OPTIONS}, bool(is_flexible)


def _keywords(schema: Any) -> Iterator[str]:
    """All that stand in the places of keywords, at any depth."""
    if isinstance(schema, list):
        for item in schema:
            yield from _keywords(item)
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        yield str(name)
        if name in _NAMED and isinstance(value, Mapping):
            for each in value.values():
                yield from _keywords(each)
        elif name not in _VALUES:
            yield from _keywords(value)

"""Grammars through llguidance (github.com/guidance-ai/llguidance), an extra:
`pip install jspec[grammar]`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jspec.core.grammar import Grammar, GrammarKind, GrammarSource
from jspec.text.grammar_state import CompiledGrammar
from jspec.text.grammar_vocabulary import Vocabulary
from jspec.text.structural_tags import read_tags


class LlguidanceGrammars:
    """Implements `grammars.Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._eos_token_ids = vocabulary.eos_token_ids
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), eos_token=list(vocabulary.eos_token_ids)
        )

    def compile(self, source: GrammarSource) -> Grammar:
        """See `grammars.Backend`."""
        import llguidance

        matcher = llguidance.LLMatcher(self._tokenizer, _definition(source), log_level=0)
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        # Nobody moves this one; each sequence gets a copy.
        return CompiledGrammar(
            lambda: _Matcher(matcher.deep_copy()), eos_token_ids=self._eos_token_ids
        )


class _Matcher:
    """Implements `grammar_state.Matcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        return _reason(self._matcher)

    def fill(self, row: np.ndarray) -> None:
        """See Matcher."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def consume(self, token_ids: list[int]) -> bool:
        """See Matcher."""
        return bool(self._matcher.consume_tokens(token_ids))

    def go_back(self) -> None:
        """See Matcher."""
        self._matcher.rollback(1)


def _reason(matcher: Any) -> str:
    """What is wrong, without the parser's state that comes after it."""
    return str(matcher.get_error()).partition("\n<state>")[0]


def _definition(source: GrammarSource) -> str:
    """In llguidance's own words. Raises ValueError for what is none."""
    import llguidance

    text = source.text
    if source.kind is GrammarKind.JSON_SCHEMA:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("expected a JSON object")
        return str(llguidance.LLMatcher.grammar_from_json_schema(text))
    if source.kind is GrammarKind.REGEX:
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    if source.kind is GrammarKind.EBNF:
        return str(llguidance.grammar_from("ebnf", text))
    tags = [
        llguidance.StructTag(trigger=tag.trigger, begin=tag.begin, grammar=tag.schema, end=tag.end)
        for tag in read_tags(text)
    ]
    return str(llguidance.StructTag.to_grammar(tags, assume_special=False))

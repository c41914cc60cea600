"""Grammar compilation with llguidance (github.com/guidance-ai/llguidance), in jspec[grammar]."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from jspec.errors import SHOWN_CHARS
from jspec.messages.grammar import GrammarKind, GrammarSource, num_words
from jspec.text.grammar.grammar_state import CompiledGrammar, Matcher, error_of
from jspec.text.grammar.grammar_vocabulary import Vocabulary
from jspec.text.grammar.json_schemas import endless_recursion, without_unenforced
from jspec.text.grammar.structural_tags import read_tags

# llguidance's cost limit of a grammar's patterns before the first token; the grammar's length is
# added. With llguidance's default of a million, nested repetitions take 160 MB and half a second;
# with this, 10 MB and a fiftieth of the time. An enumeration needs some 13 per value.
START_FUEL = 100_000
LOGGER = logging.getLogger("jspec.server")
MAX_REPORTED = 64  # names of unenforced parts, each logged once
MAX_STATES = 100_000  # over all sequences of a grammar; some 100 MB at worst


class LlguidanceGrammars:
    """A compiler for one vocabulary. Raises ImportError if llguidance is not installed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._reported: set[str] = set()
        self._eos_token_ids = vocabulary.eos_token_ids
        self._first, self._wide_words = vocabulary.first, num_words(len(vocabulary.tokens))
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), eos_token=list(vocabulary.eos_token_ids)
        )

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile. Raises ValueError, TypeError, RuntimeError or RecursionError if invalid."""
        definition, fuel = self._definition(source), START_FUEL + len(source.text)
        return CompiledGrammar(
            lambda: self._begun(definition, fuel), eos_token_ids=self._eos_token_ids
        )

    def _definition(self, source: GrammarSource) -> str:
        import llguidance

        text = source.text
        if source.kind is GrammarKind.JSON_SCHEMA:
            schema = json.loads(text)
            if not isinstance(schema, dict | bool):
                raise ValueError("expected a JSON object")
            followed = self._followed(schema)
            text = text if followed == schema else json.dumps(followed)
            return str(llguidance.LLMatcher.grammar_from_json_schema(text))
        if source.kind is GrammarKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(text))
        if source.kind is GrammarKind.EBNF:
            return str(llguidance.grammar_from("ebnf", text))
        tags = [
            llguidance.StructTag(
                trigger=tag.trigger,
                begin=tag.begin,
                grammar=self._followed(tag.schema),
                end=tag.end,
            )
            for tag in read_tags(text)
        ]
        return str(llguidance.StructTag.to_grammar(tags, assume_special=False))

    def _followed(self, schema: Any) -> Any:
        """Return the part of a schema that is enforced; log the rest, each name once. Raises
        ValueError for a schema that no finite text can follow."""
        if fault := endless_recursion(schema):
            raise ValueError(
                f"its recursion never ends: {fault}; expected a reference that an instance can "
                "leave out, such as an optional property or one of several alternatives"
            )
        followed, left_out = without_unenforced(schema, _is_known_format)
        new = [name for name in left_out if name[:SHOWN_CHARS] not in self._reported]
        if new and len(self._reported) < MAX_REPORTED:
            self._reported.update(name[:SHOWN_CHARS] for name in new)
            LOGGER.warning(
                "a JSON schema has %s: accepted and not enforced (logged once a name)",
                ", ".join(new[:8]),
            )
        return followed

    def _begun(self, definition: str, fuel: int) -> Callable[[bool], Matcher]:
        import llguidance

        limits = llguidance.LLParserLimits(initial_lexer_fuel=fuel, max_lexer_states=MAX_STATES)
        matcher = llguidance.LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)
        reason = error_of(matcher) or self._reason_at_the_start(matcher.deep_copy())
        if reason:
            raise ValueError(_advised(reason))

        def new_matcher(begins_text: bool) -> Matcher:
            first = self._first if begins_text else None
            return Matcher(
                matcher.deep_copy(), first, self._wide_words
            )  # this one stays at the start

        return new_matcher

    def _reason_at_the_start(self, matcher: Any) -> str:
        """Return why no first token can pass, or "". llguidance reports it only after a token."""
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little")
        bits[list(self._eos_token_ids)] = 0
        if not matcher.is_error() and bits.any():
            matcher.consume_token(int(bits.argmax()))
        return error_of(matcher)


def _advised(reason: str) -> str:
    if "too many" not in reason and "too big" not in reason:
        return reason
    return f"{reason}; expected a grammar that is smaller, or repetitions of a lower count"


@lru_cache(maxsize=256)
def _is_known_format(name: str) -> bool:
    import llguidance

    matcher = llguidance.LLMatcher
    schema = json.dumps({"type": "string", "format": name})
    return not matcher.validate_grammar(matcher.grammar_from_json_schema(schema))

"""Grammars through llguidance: compiled once, then asked at every node what may come next.

llguidance (github.com/guidance-ai/llguidance) is an extra, `pip install jspec[grammar]`. Its masks
are a function of the bytes so far, so a sequence's tokens do not depend on which drafts were asked
about.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from jspec.core.errors import RequestError, shown
from jspec.core.grammar import WORD_BITS, Constraint, Grammar, GrammarKind, GrammarSource
from jspec.text.tokenizer import Tokenizer

MAX_CACHED = 256  # compiled grammars, the last ones used
MISSING = "the package llguidance, which is not installed: pip install 'jspec[grammar]'"


class Grammars:
    """Compiles for one vocabulary. Safe to share between threads; llguidance lets Python's lock go.

    vocab_size: V of the model, which may have more ids than the tokenizer has tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._known: OrderedDict[GrammarSource, _Compiled] = OrderedDict()
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar, maybe from before.

        Raises RequestError naming the parameter for one that is wrong or too large, and where there
        is no tokenizer, no end of sequence, or no llguidance.
        """
        with self._lock:
            found = self._known.get(source)
            if found is None:
                found = self._compile(source)
            self._known[source] = found
            self._known.move_to_end(source)
            if len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
            return found

    def _compile(self, source: GrammarSource) -> _Compiled:
        name, text = source.kind.value, source.text
        if self._tokenizer is None:
            raise RequestError(
                f"{name} is given and the engine has no tokenizer (skip_tokenizer_init); expected "
                f"one, since a grammar speaks of text"
            )
        if not self._eos_token_ids:
            raise RequestError(
                f"{name} is given and the model names no end of sequence; expected eos_token_id in "
                f"its config, since nothing else can end the text of a grammar"
            )
        try:
            import llguidance
        except ImportError:
            raise RequestError(f"{name} is given and needs {MISSING}") from None
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)),
                eos_token=list(self._eos_token_ids),
            )
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _definition(source), log_level=0)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"{name} is {shown(text)}: {error}") from None
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:400]
            raise RequestError(f"{name} is {shown(text)}: {reason}")
        return _Compiled(matcher, eos_token_ids=self._eos_token_ids)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in known]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


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
    return _tags(text)


def _tags(text: str) -> str:
    """SGLang's structural tags: free text, in which each trigger begins one of the tags."""
    import llguidance

    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("expected a JSON object")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("expected lists `structures` (not empty) and `triggers`")
    tags = []
    for tag in structures:
        if not isinstance(tag, dict) or not isinstance(tag.get("begin"), str):
            raise ValueError("expected each of `structures` to have begin, schema and end")
        begin = tag["begin"]
        fitting = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
        if not fitting:
            raise ValueError(f"no trigger begins {begin!r}; expected one of {triggers}")
        end = tag.get("end", "")
        if not isinstance(end, str):
            raise ValueError(f"end is {end!r}; expected a text")
        schema = tag.get("schema", {})
        tags.append(llguidance.StructTag(trigger=fitting[0], begin=begin, grammar=schema, end=end))
    return str(llguidance.StructTag.to_grammar(tags, assume_special=False))


class _Compiled:
    """A matcher that nobody moves; each sequence gets a copy."""

    def __init__(self, matcher: Any, *, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def begin(self) -> Constraint:
        return _State(self._matcher.deep_copy(), self._eos_token_ids)


class _State:
    """Implements `core.grammar.Constraint` by one matcher, which can go back."""

    def __init__(self, matcher: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def failed(self) -> str:
        return str(self._matcher.get_error())

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        """As `Constraint.fill`: from the root down, back behind each child."""
        allowed[:] = 0xFFFFFFFF
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        ids = tokens.tolist()
        # (node, whether its children are still to come): no recursion, a chain may be deep.
        todo = [(0, True)]
        while todo:
            node, is_new = todo.pop()
            if not is_new:
                self._matcher.rollback(1)
                continue
            if node:
                if not self._goes_on(ids[node], allowed[parents[node]]):
                    continue
                todo.append((node, False))
            mask = allowed[node]
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                allowed[:] = 0xFFFFFFFF
                return
            todo += [(child, True) for child in reversed(children.get(node, ()))]

    def _goes_on(self, token_id: int, allowed: np.ndarray) -> bool:
        """Moves behind a drafted token if the grammar allows it and does not end by it."""
        word, bit = divmod(token_id, WORD_BITS)
        is_allowed = bool(int(allowed[word]) >> bit & 1) and token_id not in self._eos_token_ids
        return is_allowed and bool(self._matcher.consume_token(token_id))

    def accept(self, token_ids: tuple[int, ...]) -> None:
        """As `Constraint.accept`."""
        self._matcher.consume_tokens(list(token_ids))

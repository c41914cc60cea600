"""The interface of a grammar, which determines the tokens that may come next:
`text.grammar.grammars` compiles it, the scheduler carries it and the runner queries it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jspec.errors import RequestError

WORD_BITS = 32  # tokens per mask word
ENDLESS = 2**31 - 1  # more tokens than any text has


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    close: str  # ends the reasoning
    open: str | None = None  # starts it; None: the output starts inside the reasoning


def grammar_of(sampling: object) -> GrammarSource | None:
    for kind in GrammarKind:
        text = getattr(sampling, kind.value)
        if text is not None:
            return GrammarSource(kind, text)
    return None


def check_grammar(sampling: object, *, ignore_eos: bool) -> None:
    """Raise RequestError for two grammars, and for a grammar combined with ignore_eos."""
    given = [kind.value for kind in GrammarKind if getattr(sampling, kind.value) is not None]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are given; expected one grammar at most")
    if given and ignore_eos:
        raise RequestError(
            f"ignore_eos is true beside {given[0]}; expected false, since nothing may follow "
            f"the end of a grammar"
        )


class Constraint(Protocol):
    """A grammar's state along one sequence. Used by one thread at a time."""

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        """Write the tokens allowed after each node of a tree, without changing the state.

        tokens, parents: i32[N]. Node 0 is the root, which was already accepted; parents[0] = -1.
        allowed: u32[N, W], where bit v % 32 of word v // 32 is token v. Nodes that the grammar
        cannot reach allow every token, since verification cannot reach them either. After `failed`,
        all nodes do.
        """
        ...

    def accept(self, token_ids: tuple[int, ...]) -> None: ...

    @property
    def num_free(self) -> int:
        """A number of next tokens that are all unrestricted, so that their steps need no mask: 0 if
        unknown, ENDLESS for the rest of the text."""
        ...

    @property
    def failed(self) -> str:
        """The error message if the grammar became too complex to continue, else ""."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all sequences that follow it."""

    def begin(self, *, goes_on: bool = False) -> Constraint:
        """Return the state before the first token. goes_on: the sequence continues earlier text."""
        ...


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)

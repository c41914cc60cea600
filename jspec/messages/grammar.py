"""What a grammar is to the engine: it says which tokens may come next.

Who compiles one is `text.grammar.grammars`; the scheduler carries it, the runner asks it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jspec.errors import RequestError

WORD_BITS = 32  # tokens of one word of a mask


class GrammarKind(enum.Enum):
    """How a grammar is written; the values are SGLang's sampling parameters."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as it was asked for."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around the reasoning in front of a grammar's text. close: what ends it.

    open: reasoning begins with this, or there is none; None: the answer begins inside.
    """

    close: str
    open: str | None = None


def grammar_of(sampling: object) -> GrammarSource | None:
    """The grammar among sampling parameters, which have an attribute of each kind's name."""
    for kind in GrammarKind:
        text = getattr(sampling, kind.value)
        if text is not None:
            return GrammarSource(kind, text)
    return None


def check_grammar(sampling: object, *, ignore_eos: bool) -> None:
    """Raises RequestError for two grammars, and for one whose end is to be ignored."""
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
        """Writes which tokens may follow each node of a tree; the state stays where it is.

        tokens, parents: i32[N], node 0 is the root, which the state has seen, parents[0] = -1.
        allowed: u32[N, W], bit v % 32 of word v // 32 is token v. A node that the grammar cannot
        reach gets ones: a verification cannot reach it either. So do all once it `failed`.
        """
        ...

    def accept(self, token_ids: tuple[int, ...]) -> None:
        """Goes on after these tokens."""
        ...

    @property
    def failed(self) -> str:
        """Why it knows no further (a grammar that grew too complex); empty while it does."""
        ...


class Grammar(Protocol):
    """Compiled, and shared by all sequences that were asked to follow it."""

    def begin(self, *, goes_on: bool = False) -> Constraint:
        """The state in front of the first token. goes_on: text stands before it."""
        ...


def num_words(vocab_size: int) -> int:
    """W: words of a mask."""
    return -(-vocab_size // WORD_BITS)

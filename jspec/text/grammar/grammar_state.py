"""One sequence's state in a grammar, which walks a draft tree and rolls back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.messages.grammar import WORD_BITS, Constraint
from jspec.text.grammar.grammar_vocabulary import FirstTokens


class Matcher:
    """llguidance's state of one sequence, whose masks have `wide_words` words."""

    def __init__(self, matcher: Any, first: FirstTokens | None, wide_words: int) -> None:
        self._matcher = matcher
        self._first = first  # replaces ids for the first token of a text; None if none differs
        self._wide_words = wide_words
        self._num_tokens = 0
        self._begins_blank = False  # the first token was not given to llguidance

    @property
    def error(self) -> str:
        return error_of(self._matcher)

    def fill(self, row: np.ndarray) -> None:
        is_wide = row.size != self._wide_words
        wide = np.full(self._wide_words, 0xFFFFFFFF, np.uint32) if is_wide else row
        self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
        if self._first is not None and not self._num_tokens:
            self._first.allow(row, wide)
        elif is_wide:
            row[:] = wide[: row.size]

    def consume(self, token_ids: list[int]) -> bool:
        consumed = token_ids
        if self._first is not None and token_ids and not self._num_tokens:
            self._begins_blank = token_ids[0] in self._first.blank
            first = [] if self._begins_blank else [self._first.inside_id(token_ids[0])]
            consumed = [*first, *token_ids[1:]]
        self._num_tokens += len(token_ids)
        return bool(self._matcher.consume_tokens(consumed))

    def go_back(self) -> None:
        self._num_tokens -= 1
        if self._num_tokens or not self._begins_blank:
            self._matcher.rollback(1)


def error_of(matcher: Any) -> str:
    return str(matcher.get_error()).partition("\n<state>")[0]


class Work:
    """CPU seconds spent on a compiled grammar, since llguidance does not report its memory."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.failed = False  # a sequence could not continue, so others may fail too


class CompiledGrammar:
    """Implements `messages.grammar.Grammar`. After a sequence fails it compiles again."""

    def __init__(
        self, make: Callable[[], Callable[[bool], Matcher]], *, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._make = make  # the matcher's argument is True at the start of a text
        self._eos_token_ids = eos_token_ids
        started = time.thread_time()
        self._new_matcher: Callable[[bool], Matcher] | None = make()
        self.work = Work(time.thread_time() - started)

    def begin(self, *, goes_on: bool = False) -> Constraint:
        new_matcher = self._new_matcher
        if new_matcher is None:
            new_matcher = self._new_matcher = self._make()
            self.work = Work()
        return GrammarState(
            new_matcher(not goes_on), self._eos_token_ids, work=self.work, fail=self._fail
        )

    def _fail(self, work: Work) -> None:
        work.failed = True
        if work is self.work:
            self._new_matcher = None


class GrammarState:
    """Implements `messages.grammar.Constraint`. fail: called if the matcher cannot continue."""

    def __init__(
        self,
        matcher: Matcher,
        eos_token_ids: tuple[int, ...],
        *,
        work: Work,
        fail: Callable[[Work], None],
    ) -> None:
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._work, self._fail = work, fail

    @property
    def num_free(self) -> int:
        return 0

    @property
    def failed(self) -> str:
        return self._matcher.error

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        started = time.thread_time()
        self._fill(tokens, parents, allowed)
        self._count(started)

    def _fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        allowed[:] = 0xFFFFFFFF
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        ids = tokens.tolist()
        # (node, True before its children). It avoids recursion, since a chain may be deep.
        todo = [(0, True)]
        while todo:
            node, is_new = todo.pop()
            if not is_new:
                self._matcher.go_back()
                continue
            if node:
                if not self._goes_on(ids[node], allowed[parents[node]]):
                    continue
                todo.append((node, False))
            self._matcher.fill(allowed[node])
            if self._matcher.error:
                allowed[:] = 0xFFFFFFFF
                return
            todo += [(child, True) for child in reversed(children.get(node, ()))]

    def _goes_on(self, token_id: int, allowed: np.ndarray) -> bool:
        word, bit = divmod(token_id, WORD_BITS)
        is_allowed = bool(int(allowed[word]) >> bit & 1) and token_id not in self._eos_token_ids
        return is_allowed and self._matcher.consume([token_id])

    def accept(self, token_ids: tuple[int, ...]) -> None:
        started = time.thread_time()
        self._matcher.consume(list(token_ids))
        self._count(started)

    def _count(self, started: float) -> None:
        self._work.seconds += time.thread_time() - started
        if self._matcher.error:
            self._fail(self._work)

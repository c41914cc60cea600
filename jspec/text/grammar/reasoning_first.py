"""A grammar that starts where a model's reasoning ends; before that any token is allowed, within a
budget. The end mark is found in the tokens' bytes on each path of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.messages.grammar import ENDLESS, WORD_BITS, Constraint, Grammar

EVERYTHING = 0xFFFFFFFF
GRAMMAR = -1  # a place: after the end mark
START = -2  # a place: before the answer's first token, which may be the opening mark
Place = int  # one of these, or the number of mark bytes at the text's end


class Mark:
    def __init__(self, text: str, tokens: Sequence[bytes]) -> None:
        self._mark, self._tokens = text.encode(), tokens
        self._glued = [
            i for i, token in enumerate(tokens) if self._mark[-1:] in token.rstrip()[:-1]
        ]
        self._forbidden: dict[Place, np.ndarray] = {}
        self._continues: dict[Place, int | None] = {}

    def after(self, place: Place, token_id: int) -> Place:
        """Return the place after one more token; GRAMMAR if the mark ends in it."""
        text = self._mark[:place] + self._bytes(token_id)
        if self._mark in text:
            return GRAMMAR
        longest = min(len(self._mark) - 1, len(text))
        return next(n for n in range(longest, -1, -1) if text.endswith(self._mark[:n]))

    def forbidden(self, place: Place) -> np.ndarray:
        """Return ids that end the mark and add text that the grammar would not see."""
        found = self._forbidden.get(place)
        if found is None:
            begun = self._mark[:place]
            texts = ((i, (begun + self._tokens[i]).partition(self._mark)) for i in self._glued)
            found = np.array([i for i, (_, mark, rest) in texts if mark and rest.strip()], np.int64)
            self._forbidden[place] = found
        return found

    def continues(self, place: Place) -> int | None:
        """Return the token that adds most of the mark and nothing after it, the lowest of several;
        if none can, the token that restarts it, or None."""
        if place not in self._continues:
            rest = self._mark[place:]
            adds = {i: self._adds(token, rest) for i, token in enumerate(self._tokens)}
            best = max(adds, key=lambda i: (adds[i], -i))
            if adds[best]:
                self._continues[place] = best
            else:
                self._continues[place] = self.continues(0) if place else None
        return self._continues[place]

    @staticmethod
    def _adds(token: bytes, rest: bytes) -> int:
        """Return how many bytes of `rest` a token adds; 0 if it adds other text."""
        ends = token.startswith(rest) and not token[len(rest) :].strip()
        return min(len(token), len(rest)) if ends or rest.startswith(token) else 0

    def _bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""


class AnyText:
    """A Grammar, and its Constraint, that allows every token."""

    num_free = ENDLESS
    failed = ""

    def begin(self, *, goes_on: bool = False) -> Constraint:
        del goes_on
        return self

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        del tokens, parents
        allowed[:] = EVERYTHING

    def accept(self, token_ids: tuple[int, ...]) -> None:
        del token_ids


class ReasoningFirst:
    """A Grammar after reasoning."""

    def __init__(
        self, grammar: Grammar, mark: Mark, *, opens: int | None = None, budget: int | None = None
    ) -> None:
        # opens: the token that starts the reasoning; None: it has started.
        # budget: the most tokens between the marks.
        self._grammar, self._mark, self._opens = grammar, mark, opens
        self._budget = ENDLESS if budget is None else budget

    def begin(self, *, goes_on: bool = False) -> Constraint:
        after = self._grammar.begin(goes_on=True)
        at_start = None if self._opens is None else self._grammar.begin(goes_on=goes_on)
        return _State(after, self._mark, self._opens, at_start, self._budget)


class _State:
    """Implements `messages.grammar.Constraint`: `inner` after reasoning, `at_start` without it."""

    def __init__(
        self,
        inner: Constraint,
        mark: Mark,
        opens: int | None,
        at_start: Constraint | None,
        budget: int,
    ) -> None:
        self._inner, self._mark, self._opens, self._at_start = inner, mark, opens, at_start
        self._place: Place = START if at_start is not None else 0
        self._left = budget  # tokens of reasoning

    @property
    def num_free(self) -> int:
        """The grammar's, even before the mark, since it may start at once; at most the budget."""
        free = self._inner.num_free
        return free if self._place == GRAMMAR else min(free, max(self._left, 0))

    @property
    def failed(self) -> str:
        return self._inner.failed or (self._at_start.failed if self._at_start is not None else "")

    def accept(self, token_ids: tuple[int, ...]) -> None:
        for i, token_id in enumerate(token_ids):
            if self._at_start is not None:
                if token_id != self._opens:
                    self._place, self._inner = GRAMMAR, self._at_start
                self._at_start = None
            if self._place == GRAMMAR:
                self._inner.accept(token_ids[i:])
                return
            self._left -= self._place != START
            self._place = self._after(self._place, token_id)

    def _after(self, place: Place, token_id: int) -> Place:
        return 0 if place == START else self._mark.after(place, token_id)

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        """Fill each node's mask by the place that its own path reached. Nodes after an end mark
        form a separate tree, at whose root the grammar starts."""
        if self._place == GRAMMAR:
            self._inner.fill(tokens, parents, allowed)
            return
        allowed[:] = EVERYTHING
        ids = tokens.tolist()
        places, trees = {0: self._place}, {0: [0]} if self._place == START else {}
        left = {0: self._left}
        root_of = dict.fromkeys(trees, 0)
        for node, parent in enumerate(parents.tolist()):
            if not node:
                continue
            above = places[parent]
            if above == GRAMMAR or (above == START and ids[node] != self._opens):
                places[node], root_of[node] = GRAMMAR, root_of[parent]
                trees[root_of[node]].append(node)
                continue
            places[node] = self._after(above, ids[node])
            left[node] = left[parent] - (above != START)
            if places[node] == GRAMMAR:
                trees[node], root_of[node] = [node], node
        for node, place in places.items():
            if place >= 0 and left[node] <= 0:
                token_id = self._mark.continues(place)
                assert token_id is not None  # `Grammars` checked it
                allowed[node] = 0
                allow(allowed[node], token_id)
            elif place >= 0 and self._inner.num_free == 0:
                clear(allowed[node], self._mark.forbidden(place))
        for root, nodes in trees.items():
            index = {node: i for i, node in enumerate(nodes)}
            above_each = [-1, *(index[int(parents[node])] for node in nodes[1:])]
            part = allowed[nodes]
            inner = self._inner if root or self._at_start is None else self._at_start
            inner.fill(tokens[nodes], np.array(above_each, np.int32), part)
            allowed[nodes] = part
        if self._place == START and self._opens is not None:
            allow(allowed[0], self._opens)


def allow(row: np.ndarray, token_id: int) -> None:
    word, bit = divmod(token_id, WORD_BITS)
    row[word] |= np.uint32(1 << bit)


def clear(row: np.ndarray, token_ids: np.ndarray) -> None:
    for token_id in token_ids.tolist():
        word, bit = divmod(token_id, WORD_BITS)
        row[word] &= np.uint32(~(1 << bit) & EVERYTHING)

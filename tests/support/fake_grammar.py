"""A grammar over token ids for tests without text; the allowed ids depend on the whole prefix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jspec.messages.grammar import Constraint


@dataclass(frozen=True)
class FakeGrammar:
    """A walk over NUM_STATES states, each of which forbids some ids.

    The end is allowed from `least` tokens on, and nothing else from `most` on.
    """

    vocab_size: int
    end_id: int
    least: int
    most: int

    NUM_STATES = 7

    def next_state(self, state: int, token_id: int) -> int:
        return (3 * state + token_id + 1) % self.NUM_STATES

    def allowed(self, state: int, num_tokens: int) -> np.ndarray:
        """Return bool[V]: ids allowed after `num_tokens` tokens that led to `state`."""
        ids = np.arange(self.vocab_size)
        allowed = (ids + state) % 3 == 0
        allowed[:] = allowed & (num_tokens < self.most)
        allowed[self.end_id] = num_tokens >= self.least
        return allowed

    def begin(self, *, goes_on: bool = False) -> Constraint:
        del goes_on  # ids have no text
        return FakeConstraint(self)


class FakeConstraint:
    """Implements `Constraint`; fails at a token that is not allowed."""

    num_free = 0

    def __init__(self, grammar: FakeGrammar) -> None:
        self._grammar = grammar
        self._at = (0, 0)
        self.failed = ""

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        allowed[:] = 0xFFFFFFFF
        places: dict[int, tuple[int, int]] = {0: self._at}
        for node, parent in enumerate(parents.tolist()):
            if node:
                above, token_id = places.get(parent), int(tokens[node])
                if above is None or token_id == self._grammar.end_id:
                    continue
                if not self._grammar.allowed(*above)[token_id]:
                    continue
                places[node] = self._grammar.next_state(above[0], token_id), above[1] + 1
            bits = np.packbits(self._grammar.allowed(*places[node]), bitorder="little")
            words = np.zeros(allowed.shape[1] * 4, np.uint8)
            words[: bits.size] = bits
            allowed[node] = words.view(np.uint32)

    def accept(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            state, count = self._at
            if not self._grammar.allowed(state, count)[token_id]:
                self.failed = f"token {token_id} is not allowed"
            self._at = self._grammar.next_state(state, token_id), count + 1

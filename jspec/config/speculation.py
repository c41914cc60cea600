"""Draft shapes S/K/N. Host data."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.config.drafting import Algorithm
from jspec.errors import ConfigError
from jspec.spec import indexing

MAX_LOOKUP_STEPS = 15  # each level is unrolled in the programs


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """S/K/N: num_steps levels, topk branches per level, num_draft_tokens nodes, root included.

    Plain decoding is 0/1/1, a tree of one node.
    """

    algorithm: Algorithm = Algorithm.NONE
    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    # Mean tokens emitted per verification, to measure speed; the text is then not the model's.
    simulate_acceptance: float | None = None
    # The draft model shares the nodes with K continuations of earlier matches in the row's text.
    lookup: bool = False

    def __post_init__(self) -> None:
        spec = f"S/K/N = {self.num_steps}/{self.topk}/{self.num_draft_tokens}"
        if self.algorithm == Algorithm.NONE:
            if (self.num_steps, self.topk, self.num_draft_tokens) != (0, 1, 1):
                raise ConfigError(f"{spec} without a draft model; expected 0/1/1")
            if self.simulate_acceptance is not None:
                raise ConfigError(
                    f"simulate_acceptance is {self.simulate_acceptance}, but "
                    f"speculative_algorithm is NONE; expected it unset"
                )
            return
        if self.num_steps < 1:
            raise ConfigError(f"speculative_num_steps is {self.num_steps}; expected at least 1")
        if self.topk < 1:
            raise ConfigError(f"speculative_eagle_topk is {self.topk}; expected at least 1")
        if self.is_chain and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError(
                f"{spec}: a chain (K = 1) verifies its S drafts and the root, so "
                f"speculative_num_draft_tokens must be {self.num_steps + 1}"
            )
        most, candidates = 1 + self.pool_size, self.algorithm.candidates
        if self.lookup:
            candidates += f" and {self.topk}*{self.lookup_steps}"
        if not 2 <= self.num_draft_tokens <= most:
            raise ConfigError(
                f"{spec}: the tree has {candidates} = {self.pool_size} "
                f"candidates, so speculative_num_draft_tokens must be from 2 to {most}"
            )
        self._check_simulation()

    def _check_simulation(self) -> None:
        value, most = self.simulate_acceptance, self.max_emitted
        if value is None:
            return
        is_number = isinstance(value, int | float) and value is not True
        if not (is_number and 1 <= value <= most):  # NaN is not
            raise ConfigError(
                f"simulate_acceptance is {value!r}; expected a number from 1 to S + 1 = {most}, "
                f"tokens emitted a verification, bonus included"
            )

    @classmethod
    def plain(cls) -> SpeculativeConfig:
        return cls()

    @property
    def is_plain(self) -> bool:
        return self.algorithm == Algorithm.NONE

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"

    def fits_within(self, other: SpeculativeConfig) -> bool:
        """Return True if plain, or of the same drafter and no larger than `other` in S, K and N."""
        return self.is_plain or (
            self.algorithm == other.algorithm
            and self.num_steps <= other.num_steps
            and self.topk <= other.topk
            and self.num_draft_tokens <= other.num_draft_tokens
            and self.simulate_acceptance == other.simulate_acceptance
            and self.lookup == other.lookup
        )

    @property
    def pool_size(self) -> int:
        own = self.algorithm.num_candidates(self.num_steps, self.topk)
        return own + self.topk * self.lookup_steps

    @property
    def is_chain(self) -> bool:
        return self.topk == 1 and not self.lookup

    @property
    def lookup_steps(self) -> int:
        """Levels that a lookup drafts: a path through all nodes, up to a bound."""
        return min(self.num_draft_tokens - 1, MAX_LOOKUP_STEPS) if self.lookup else 0

    @property
    def depth(self) -> int:
        return max(self.num_steps, self.lookup_steps)

    @property
    def keeps_ids(self) -> bool:
        return self.algorithm.keeps_ids or self.lookup

    @property
    def tokens_ahead(self) -> int:
        """n such that the drafter's cache at position i depends on tokens up to i + n."""
        return self.algorithm.tokens_ahead(self.num_steps, self.topk)

    @property
    def lag(self) -> int:
        """Slots by which the drafter's last layer lags behind the committed length."""
        return self.algorithm.lag(self.num_steps, self.topk)

    @property
    def max_emitted(self) -> int:
        return indexing.max_emitted(self.depth)

    @property
    def num_scratch_slots(self) -> int:
        algorithm = self.algorithm
        return indexing.num_scratch_slots(
            self.num_draft_tokens,
            propose_rows=algorithm.propose_slots(self.num_steps, self.topk),
            advance_rows=algorithm.advance_slots(self.depth, self.topk),
        )

    @property
    def num_root_slots(self) -> int:
        """KV slots that a drafter writes after a prompt: 1 if it keeps a slot for the root."""
        rows = self.algorithm.advance_slots(self.depth, self.topk)
        return max(rows - self.max_emitted, 0)

    def num_scratch_pages(self, page_size: int) -> int:
        """Return the pages of a pool for what a row writes after its last token.

        They hold all scratch except the root's slot, which is that token's own; 0 for plain
        decoding.
        """
        return indexing.num_pages(self.num_scratch_slots - 1, page_size)

    def reserved_tokens(self, committed: int, *, unread_rounds: int) -> int:
        """Return the positions that a row must own for its next round after unread rounds."""
        return indexing.reserved_tokens(
            committed,
            unread_rounds=unread_rounds,
            num_steps=self.depth,
            scratch_slots=self.num_scratch_slots,
        )

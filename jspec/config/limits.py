"""Static sizes of an engine, frozen. Independent of file formats and jax."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jspec.config.drafting import Algorithm as Algorithm
from jspec.config.shared_prefixes import SharingLimits
from jspec.config.speculation import SpeculativeConfig as SpeculativeConfig
from jspec.errors import ConfigError
from jspec.spec import indexing
from jspec.spec.hidden_rows import HiddenRows

MAX_CACHED_DRAFT_PREFILL = 4096
# Bounds of W, the most pending tokens of a row (speculative/drafters/pending.py), which is the page
# size within them. A draft prefill costs a launch, and pending tokens are not cached.
LEAST_PENDING, MOST_PENDING = 16, 64


@dataclass(frozen=True, slots=True, order=True)
class WindowSpace:
    window: int
    num_pages: int  # without the dummy page 0


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """Snapshots of rows' recurrent states, for the prefix cache."""

    count: int  # snapshot slots, without the dummy slot 0
    stride: int  # pages between two snapshots of a prompt

    def __post_init__(self) -> None:
        for name in ("count", "stride"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} of state snapshots is {value}; expected at least 1")


class PriorityOrder(enum.Enum):
    """The order of priorities: SGLang's is HIGH_FIRST, vLLM's LOW_FIRST."""

    OFF = "off"
    HIGH_FIRST = "high first"
    LOW_FIRST = "low first"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    num_slots: int  # rows of a data rank, without its dummy slot
    num_pages: int  # of the full space of a data rank, without its dummy page
    page_size: int
    context_length: int
    windows: tuple[WindowSpace, ...] = ()  # by ascending window
    snapshots: SnapshotLimits | None = None  # None: no recurrent layer, or no prefix cache
    num_ranks: int = 1  # data ranks, each with its own slots and pages

    def __post_init__(self) -> None:
        for name in ("page_size", "num_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        windows = [space.window for space in self.windows]
        if windows != sorted(set(windows)) or not all(window >= 1 for window in windows):
            raise ConfigError(f"the windows of page spaces are {windows}; expected them to ascend")

    @property
    def max_rows(self) -> int:
        return self.num_ranks * self.num_slots

    @property
    def all_slots(self) -> int:
        """Slots of all ranks, dummies included. Rank r has the r-th equal part of them."""
        return self.num_ranks * (self.num_slots + 1)

    def first_slot(self, rank: int) -> int:
        """Return the dummy slot of a rank; its other slots follow."""
        return rank * (self.num_slots + 1)

    def rank_of(self, slot: int) -> int:
        return slot // (self.num_slots + 1)

    def by_rank(self, slots: Iterable[int], counts: Sequence[int]) -> list[int]:
        """Return for each rank the sum of the counts of its slots."""
        if self.num_ranks == 1:
            return [sum(counts)]
        found = [0] * self.num_ranks
        for slot, count in zip(slots, counts, strict=True):
            found[self.rank_of(slot)] += count
        return found

    def pages_of(self, window: int | None) -> int:
        """Return the usable pages of layers with this window: of its space, or the full space."""
        own = [space.num_pages for space in self.windows if space.window == window]
        return own[0] if own else self.num_pages

    def tail_pages(self, window: int) -> int:
        """Return the most cached window pages that a row reuses for a first query at a page start.

        worked example: page_size 4, window 8: a query at 20 sees 13..20, on pages 3 and 4
        """
        return indexing.num_pages(window - 1, self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    decode_buckets: tuple[int, ...]  # B, ascending
    prefill_buckets: tuple[int, ...]  # T, ascending
    prefill_rows: int
    logprobs: bool = False
    vocab_size: int = 0  # V, for grammar masks; 0: no grammars
    hidden: HiddenRows | None = None  # encoding; None: cannot be requested
    sharing: SharingLimits | None = None  # when rows read shared prefixes once; None: never
    has_loras: bool = False  # rows may have LoRA adapters
    # (layers, experts of a layer) whose tokens steps count; None: they count none
    counted_experts: tuple[int, int] | None = None

    @property
    def chunk_size(self) -> int:
        return self.prefill_buckets[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    prefill_budget: int = 0  # prompt tokens between two decodes while rows decode; 0: chunk_size
    prefill_seconds: float | None = None  # replaces it once prefill times are known
    overlap_depth: int = 1
    num_rounds: int = 1  # verifications of one decode without the host in between
    max_queued_requests: int = 128
    priority_order: PriorityOrder = PriorityOrder.OFF
    prefix_cache: bool = False  # keep pages after their rows

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_depth <= 3:
            raise ConfigError(f"overlap_depth is {self.overlap_depth}; expected 0, 1, 2 or 3")
        if isinstance(self.num_rounds, bool) or not isinstance(self.num_rounds, int):
            raise ConfigError(f"num_rounds is {self.num_rounds!r}; expected an integer")
        if self.num_rounds < 1:
            raise ConfigError(f"num_rounds is {self.num_rounds}; expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Static sizes of one engine: what the host may plan and what the device has compiled."""

    draft_shape: SpeculativeConfig  # the largest; scratch for it suffices for all
    other_shapes: tuple[SpeculativeConfig, ...] = ()  # that a plan may choose instead
    pool: PoolLimits
    programs: ProgramLimits
    scheduling: SchedulingLimits = SchedulingLimits()

    def __post_init__(self) -> None:
        budget = self.scheduling.prefill_budget or self.programs.chunk_size
        scheduling = replace(self.scheduling, prefill_budget=budget)
        object.__setattr__(self, "scheduling", scheduling)
        for shape in self.other_shapes:
            if shape == self.draft_shape or not shape.fits_within(self.draft_shape):
                raise ConfigError(
                    f"other_shapes has {shape}; expected shapes of the same drafter, none larger "
                    f"than {self.draft_shape}, and not that one again"
                )
        reserved = self.draft_shape.reserved_tokens(1, unread_rounds=self.scheduling.overlap_depth)
        scratch = self.draft_shape.num_scratch_pages(self.pool.page_size)
        least = max(indexing.num_pages(reserved, self.pool.page_size), scratch + 1)
        if self.pool.num_pages < least:
            raise ConfigError(
                f"max_total_tokens gives {self.pool.num_pages} pages of {self.pool.page_size} "
                f"tokens; one request needs at least {least} pages"
            )
        if self.programs.decode_buckets[-1] != self.pool.num_slots:
            raise ConfigError(
                f"decode buckets {self.programs.decode_buckets} must end at max_running_requests "
                f"{self.pool.num_slots}"
            )
        self._check_windows()

    def _check_windows(self) -> None:
        for space in self.pool.windows:
            least = self.window_pages_per_row(space.window) + self.pages_of_chunks(
                self.programs.chunk_size
            )
            if space.num_pages < least:
                raise ConfigError(
                    f"the layers with a window of {space.window} tokens have {space.num_pages} "
                    f"pages; one request needs at least {least} pages"
                )

    @property
    def shapes(self) -> tuple[SpeculativeConfig, ...]:
        return (*self.other_shapes, self.draft_shape)

    @property
    def max_pending(self) -> int:
        """W, the most pending tokens of a row. 0: the drafter gets all tokens immediately."""
        if self.draft_shape.is_plain or not any(shape.is_plain for shape in self.shapes):
            return 0
        of_page = min(max(self.pool.page_size, LEAST_PENDING), MOST_PENDING)
        return max(of_page, self.scheduling.num_rounds)

    @property
    def cached_draft_prefill_size(self) -> int:
        return min(self.pool.context_length, MAX_CACHED_DRAFT_PREFILL)

    @property
    def max_total_tokens(self) -> int:
        """Most prompt and output tokens of one sequence in the pool, however it drafts."""
        return (
            self.pool.num_pages - self.draft_shape.num_scratch_pages(self.pool.page_size)
        ) * self.pool.page_size

    @property
    def pages_per_row(self) -> int:
        """P, the width of the page table: for the context and its scratch, or for the pool."""
        # Later rounds of a step may write past a row's end. No pages are reserved for them
        # (`budget.pages_for_decode`), so they write to page 0, but their index must be in the
        # table.
        widest = self.reserved_tokens_at_most(self.pool.context_length)
        after_end = (self.scheduling.num_rounds - 1) * self.draft_shape.max_emitted
        in_pool = self.pool.num_pages + indexing.num_pages(after_end, self.pool.page_size)
        return min(indexing.num_pages(widest, self.pool.page_size), in_pool)

    @property
    def grants_per_row(self) -> int:
        return indexing.num_pages(self.reserved_tokens_at_most(0), self.pool.page_size) + 1

    def window_pages_per_row(self, window: int) -> int:
        """Return the most pages of a window space that a row has between two plans, at any length.

        They cover the oldest key that its next query sees to the end of its reservation: window - 1
        tokens before the committed length (less pending tokens and the lag of the drafter's last
        layer), plus the reserved tokens after it, at any offset to the page boundaries.

            worked example: page_size 4, window 8, 10 reserved: 17 positions are on up to 5 pages
        """
        before = window - 1 + self.max_pending + self.draft_shape.lag
        span = before + self.reserved_tokens_at_most(0)
        return indexing.num_pages(span - 1, self.pool.page_size) + 1

    def window_grants_of_prefill(self, num_tokens: int) -> int:
        """Return the most page grants of one window space in a prefill of num_tokens."""
        found = self.scheduling.prefix_cache * max(
            (self.pool.tail_pages(s.window) for s in self.pool.windows), default=0
        )
        return self.pages_of_chunks(num_tokens) + found * self.programs.prefill_rows

    def pages_of_chunks(self, num_tokens: int) -> int:
        """Return the most pages that one prefill step's chunks of num_tokens in all start."""
        return indexing.num_pages(num_tokens, self.pool.page_size) + self.programs.prefill_rows

    def reserved_tokens_at_most(self, committed: int) -> int:
        """Return the most positions written, by a step's last round with all others unread."""
        unread = (self.scheduling.overlap_depth + 1) * self.scheduling.num_rounds - 1
        return self.draft_shape.reserved_tokens(committed, unread_rounds=unread)

"""Protocols between the host half and the device half, so that each can be tested alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jspec.config.limits import ServeLimits
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.weight_update import Model, WeightUpdate


@runtime_checkable
class Runner(Protocol):
    """Owner of all device state. One thread calls it and collects steps in order."""

    @property
    def limits(self) -> ServeLimits: ...

    def dispatch(self, plan: StepPlan) -> Any:
        """Enqueue one step without waiting for the device, and return its handle."""
        ...

    def collect(self, dispatched: Any) -> StepResult:
        """Wait for the step of a handle and return its result."""
        ...

    def restart(self) -> None:
        """Restart after a call raised: rows and pages are lost, weights and programs are kept.

        Earlier handles become invalid. If restarting fails, the error is raised and the caller may
        retry; EngineClosedError means that a retry cannot succeed.
        """
        ...

    def give_up(self) -> None:
        """Make a restart in progress fail soon. Any thread may call it; `close` follows."""
        ...

    def close(self) -> None:
        """Release all device memory. Idempotent; no other call may follow."""
        ...


class Weights(Protocol):
    @property
    def has_draft(self) -> bool: ...

    @property
    def draft_is_in_target(self) -> bool: ...

    def prepare(self, update: WeightUpdate) -> Any:
        """Read and check an update without changing the weights in service, from any thread, one at
        a time. Raises CheckpointError or ConfigError with all faults in one message."""
        ...

    def switch(self, prepared: Any) -> None:
        """Switch to the weights from `prepare`.

        Call it on the runner's thread with no step in flight; an adapter may be switched at any
        time from any thread. If it raises, the old weights stay in service, except after
        EngineClosedError, when none are.
        """
        ...

    def tensor(self, name: str, model: Model | None) -> Any:
        """Return a numpy array in checkpoint layout. Raises RequestError for an unknown name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCut:
    num_ids: int  # ids that belong to the output, up to a completed stop string
    text: str  # without a partial character or a possible start of a stop string
    matched: str | None = None  # the completed stop string, already trimmed


@runtime_checkable
class TextStream(Protocol):
    """Detokenizer and stop-string matcher of one growing sequence."""

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Append ids. With allow_stop False, a stop string inside them does not end the text."""
        ...

    def flush(self) -> str:
        """Return the text still held back at the end, which may complete a stop string."""
        ...

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, in push or in flush."""
        ...

    def watch(self) -> StopWatch | None:
        """Return a StopWatch for the same stop strings, so that another thread can detokenize; None
        if stopping depends on the text itself. Call it before the first push."""
        ...


class StopWatch(Protocol):
    """Finds the end of the output without producing text. min_new_tokens is not supported."""

    def passes(self, ids: Sequence[int]) -> bool:
        """Append ids and return True, or return False without appending if they end the output."""
        ...

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Like TextStream.push, with undefined text."""
        ...

    def flush(self) -> str:
        """Like TextStream.flush, with undefined text."""
        ...

    @property
    def matched(self) -> str | None: ...

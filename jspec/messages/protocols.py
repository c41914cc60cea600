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
    """Owner of all device state. Called from one thread; steps are collected in order."""

    @property
    def limits(self) -> ServeLimits: ...

    def dispatch(self, plan: StepPlan) -> Any:
        """Enqueue one step without waiting for the device; return its handle."""
        ...

    def collect(self, dispatched: Any) -> StepResult:
        """Wait for the step of a handle and return its result."""
        ...

    def restart(self) -> None:
        """Restart after a call raised, without rows and pages; weights and programs are kept.

        Earlier handles are void. Raises the error that prevents it, and may then be retried;
        EngineClosedError if it can never succeed.
        """
        ...

    def give_up(self) -> None:
        """Make a restart in progress fail soon; from any thread. `close` follows."""
        ...

    def close(self) -> None:
        """Release all device memory. The last call; idempotent."""
        ...


class Weights(Protocol):
    @property
    def has_draft(self) -> bool:
        """True if there is a draft with weights of its own."""
        ...

    @property
    def draft_is_in_target(self) -> bool:
        """True if the draft was read from the target's directory."""
        ...

    def prepare(self, update: WeightUpdate) -> Any:
        """Read and check an update; the weights in service stay. From any thread, one at a time.

        Raises CheckpointError or ConfigError, one error for all faults.
        """
        ...

    def switch(self, prepared: Any) -> None:
        """Switch to the weights from `prepare`, on the runner's thread, with no step in flight.

        An adapter may be switched at any time, from any thread.

        If it raises, the old weights stay in service; after EngineClosedError none are.
        """
        ...

    def tensor(self, name: str, model: Model | None) -> Any:
        """Return a numpy array in checkpoint layout. Raises RequestError for an unknown name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCut:
    num_ids: int  # that belong to the output, up to a completed stop string
    text: str  # final: no partial character, no possible start of a stop string
    matched: str | None = None  # the completed stop string, already trimmed


@runtime_checkable
class TextStream(Protocol):
    """Detokenizer and stop-string matcher of one growing sequence."""

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Append ids. With allow_stop False a stop string inside them does not end the text."""
        ...

    def flush(self) -> str:
        """Return the text still held back at the end; it may complete a stop string."""
        ...

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, completed by push or by flush."""
        ...

    def watch(self) -> StopWatch | None:
        """Return a StopWatch for the same stop strings, so that another thread can make the text.

        None if stopping needs the text itself. Call it before the first push.
        """
        ...


class StopWatch(Protocol):
    """Finds the end of the output without producing text.

    Used only where all stop strings count, that is without min_new_tokens.
    """

    def passes(self, ids: Sequence[int]) -> bool:
        """Append ids; return False, unchanged, if they complete a stop string."""
        ...

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Like TextStream.push; the text is unspecified."""
        ...

    def flush(self) -> str:
        """Like TextStream.flush; the text is unspecified."""
        ...

    @property
    def matched(self) -> str | None: ...

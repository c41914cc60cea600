"""What the host half asks of the device half, so that each can be tested without the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jspec.config.limits import ServeLimits
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.weight_update import Model, WeightUpdate


@runtime_checkable
class Runner(Protocol):
    """Owner of all device state. Calls come from one thread; results come back in order."""

    @property
    def limits(self) -> ServeLimits:
        """The static sizes that plans must respect."""
        ...

    def dispatch(self, plan: StepPlan) -> None:
        """Enqueues one step and returns without waiting for the device."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest dispatched step and returns its result."""
        ...

    def restart(self) -> None:
        """Begins anew, after a call raised: nothing is in flight, no row and no page has anything,
        weights and programs are as before. Raises what prevents it, and may be tried again; but
        EngineClosedError where it never can be."""
        ...

    def give_up(self) -> None:
        """Lets a restart that is under way fail soon; from any thread. `close` follows."""
        ...

    def close(self) -> None:
        """Lets go of all that is on the device. The last call; may come twice."""
        ...


class Weights(Protocol):
    """What serves, seen as weights that can be read and changed."""

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft with weights of its own."""
        ...

    @property
    def draft_is_in_target(self) -> bool:
        """Whether the draft was read from the target's own directory."""
        ...

    def prepare(self, update: WeightUpdate) -> Any:
        """Reads and checks all of it; what serves stays as it is. From any thread, one at a time.

        Raises CheckpointError or ConfigError, one for all that is wrong.
        """
        ...

    def switch(self, prepared: Any) -> None:
        """Serves what `prepare` gave, on the runner's thread, no step being in flight.

        If it raises, what served before does still; after EngineClosedError nothing does.
        """
        ...

    def tensor(self, name: str, model: Model | None) -> Any:
        """A numpy array, as a checkpoint would store it. Raises RequestError for an unknown name"""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCut:
    """What TextStream.push made of some ids.

    num_ids: how many of the pushed ids belong to the output (all of them, unless a stop string
    was completed: then through the id that completed it). text: new text that can no longer
    change (never half a character, never the beginning of a possible stop string).
    matched: the stop string that was completed, already trimmed from the text.
    """

    num_ids: int
    text: str
    matched: str | None = None


@runtime_checkable
class TextStream(Protocol):
    """The text of one sequence as it grows: detokenizer and stop-string matcher in one."""

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Appends ids. With allow_stop False a stop string inside them does not end the text."""
        ...

    def flush(self) -> str:
        """Text still held back, once no more ids will come; it may complete a stop string."""
        ...

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, whether push or flush completed it."""
        ...

    def watch(self) -> StopWatch | None:
        """What finds the same stop strings at the same ids by itself, so that the text can be made
        elsewhere and later; None where only the text can tell. Asked for before the first push."""
        ...


class StopWatch(Protocol):
    """A TextStream whose text nobody wants: it is asked only where the output ends.

    Without allow_stop False, where its stream would count otherwise."""

    def passes(self, ids: Sequence[int]) -> bool:
        """Appends ids if they complete no stop string; else nothing happens, and it is False."""
        ...

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """As TextStream.push, with any text."""
        ...

    def flush(self) -> str:
        """As TextStream.flush, with any text."""
        ...

    @property
    def matched(self) -> str | None:
        """As TextStream.matched."""
        ...

"""The columns of the table of steps (`engine.steps.table`), and the keys of compiled programs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.device.parallel import partition_spec
from jspec.messages.layout import PackedLayout
from jspec.messages.plan import StepKind, StepPlan, StepRun
from jspec.messages.request import SAMPLING_FIELDS
from jspec.messages.sampling_fields import SamplingTable
from jspec.messages.step_options import PLAIN, StepOption, StepOptions

Fields = dict[str, np.ndarray]
BY_RANK: Any = partition_spec(("rank",))


class ProgramKey(NamedTuple):
    """Identifies a compiled program.

    bucket: rows (B) or tokens (T), as the kind counts them
    shape: draft shape; None: the engine's own
    """

    kind: StepKind
    bucket: int
    options: StepOptions
    shape: SpeculativeConfig | None = None

    def __str__(self) -> str:
        options = "" if self.options == PLAIN else f" {self.options}"
        shape = "" if self.shape is None else f" {self.shape}"
        return f"{self.kind.value}={self.bucket}{shape}{options}"


class Turn(enum.IntEnum):
    """When a program is built, in ascending order; before an engine serves up to START."""

    NEEDED = enum.auto()  # together these run every plan
    START = enum.auto()  # these make common plans cheap
    DECODE = enum.auto()
    # Prefill by powers of two first: with those a prompt pads at most as many tokens as it has.
    PREFILL = enum.auto()
    BETWEEN = enum.auto()
    OPTIONS = enum.auto()
    SHAPES = enum.auto()  # other draft shapes; the engine's own serves until they are ready
    SHARING = enum.auto()
    ON_DEMAND = enum.auto()  # when the first request comes that needs them


class Wanted(NamedTuple):
    """A program that an engine compiles. asked: ON_DEMAND, the options that need it together."""

    key: ProgramKey
    turn: Turn
    asked: frozenset[StepOption] = frozenset()


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """The engine limits that a program's code depends on, apart from array shapes.

    `lower` receives no other limit and the program store's key contains no other, so changing a
    limit that only the host reads recompiles nothing.

    takes: shapes of the programs whose outputs it takes
    """

    kind: StepKind
    packed: PackedLayout
    num_rounds: int
    takes: tuple[ProgramShape, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """Inputs of packing, apart from plans."""

    limits: ServeLimits
    vocab_size: int = 0
    table: SamplingTable = SAMPLING_FIELDS


class Part(NamedTuple):
    """A program of a plan, to be packed. read: output of the program that it `reads`."""

    plan: StepPlan
    run: StepRun
    host: Host
    read: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDef:
    """A kind of step: which programs it has, their input and output, and their function.

    programs: the programs that an engine compiles
    options: that these may be compiled with; others do not concern this step
    layout: the fields of a packed array
    size: rows or tokens of a run, which its program's bucket holds
    smaller: the engine argument that bounds the bucket
    blank: writes neutral values into zeroed fields, once a program
    write: writes a part into neutral fields
    batch: the device function's batch, from the fields
    step: the device function, (program, params, state, batch, *taken) -> (state', output), and
        num_rounds if `has_rounds`
    takes: kinds that run before it in the plan, whose outputs it takes on the device
    reads: the one of them that `write` needs on the host
    gives: shardings of the output
    emits: the output has the columns of `layout.output_columns`
    has_rounds: a program has `SchedulingLimits.num_rounds` verifications
    is_decode: forwards run over bucket * N tokens, and XLA is set up for few
    is_timed: its draft shapes are chosen by their measured times
    """

    programs: Callable[[ServeLimits], Iterable[Wanted]]
    options: frozenset[StepOption] = frozenset()
    layout: Callable[[ProgramKey, Host], PackedLayout]
    size: Callable[[StepPlan, StepRun], int] = lambda plan, _: len(plan.rows)
    smaller: str = "max_running_requests"
    blank: Callable[[Fields, Host], None] | None = None
    write: Callable[[Fields, Part], None]
    batch: Callable[[dict[str, Any]], Any]
    step: Callable[..., Any]
    takes: tuple[StepKind, ...] = ()
    reads: StepKind | None = None
    gives: Any = BY_RANK
    emits: bool = False
    has_rounds: bool = False
    is_decode: bool = False
    is_timed: bool = False


def of_rows(key: ProgramKey, *names: str) -> PackedLayout:
    """Return the layout of one number a row, by names."""
    return PackedLayout(tuple((name, (key.bucket,)) for name in names))


def write_slots(fields: Fields, part: Part) -> None:
    fields["slots"][: len(part.plan.rows)] = [row.slot for row in part.plan.rows]


def window_grants(host: Host, num_grants: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the field of `num_grants` grants of each window space, if there are any."""
    windows = host.limits.pool.windows
    return (("window_grants", (len(windows), num_grants, 3)),) if windows else ()


def write_grants(field: np.ndarray, plan: StepPlan, *, space: int) -> None:
    """Write grants of one page space. field: i32[X, 3]. Raises ValueError if they do not fit."""
    grants = [
        (grant.slot, index, page)
        for grant in plan.grants
        if grant.space == space
        for index, page in enumerate(grant.pages, grant.index)
    ]
    if grants:
        field[: len(grants)] = grants


def write_window_grants(fields: Fields, part: Part) -> None:
    for i in range(len(part.host.limits.pool.windows)):
        write_grants(fields["window_grants"][i], part.plan, space=i + 1)

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
from jspec.messages.step_options import PLAIN, StepOption, StepOptions

Fields = dict[str, np.ndarray]
BY_RANK: Any = partition_spec(("rank",))


class ProgramKey(NamedTuple):
    kind: StepKind
    bucket: int  # rows (B) or tokens (T)
    options: StepOptions
    shape: SpeculativeConfig | None = None  # None: the engine's own

    def __str__(self) -> str:
        options = "" if self.options == PLAIN else f" {self.options}"
        shape = "" if self.shape is None else f" {self.shape}"
        return f"{self.kind.value}={self.bucket}{shape}{options}"


class Turn(enum.IntEnum):
    """The order in which programs are built; those up to START are built before serving."""

    NEEDED = enum.auto()  # together these run every plan
    START = enum.auto()  # these make common plans cheap
    DECODE = enum.auto()
    PREFILL = enum.auto()  # powers of two first, which bound padding by the prompt's length
    BETWEEN = enum.auto()
    OPTIONS = enum.auto()
    SHAPES = enum.auto()  # other draft shapes; the engine's own serves until they are ready
    SHARING = enum.auto()
    ON_DEMAND = enum.auto()  # at the first request that needs them


class Wanted(NamedTuple):
    key: ProgramKey
    turn: Turn
    asked: frozenset[StepOption] = frozenset()  # ON_DEMAND: the options that need it


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """The engine limits that a program's code depends on, apart from array shapes: the only ones in
    the program store's key."""

    kind: StepKind
    packed: PackedLayout
    num_rounds: int
    takes: tuple[ProgramShape, ...] = ()  # programs whose outputs it takes


@dataclass(frozen=True, slots=True)
class Host:
    limits: ServeLimits
    vocab_size: int = 0


class Part(NamedTuple):
    plan: StepPlan
    run: StepRun
    host: Host
    read: np.ndarray | None  # output of the program that it `reads`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDef:
    """A kind of step: its programs, their input and output, and their device function."""

    programs: Callable[[ServeLimits], Iterable[Wanted]]
    options: frozenset[StepOption] = frozenset()  # that its programs may be compiled with
    layout: Callable[[ProgramKey, Host], PackedLayout]  # the fields of a packed array
    # Rows or tokens of a run, which must fit the program's bucket.
    size: Callable[[StepPlan, StepRun], int] = lambda plan, _: len(plan.rows)
    smaller: str = "max_running_requests"  # the engine argument that bounds the bucket
    blank: Callable[[Fields, Host], None] | None = None  # writes neutral values into zeros
    write: Callable[[Fields, Part], None]  # writes a part into neutral fields
    batch: Callable[[dict[str, Any]], Any]  # the device function's batch, from the fields
    # (program, params, state, batch, *taken) -> (state', output); num_rounds if `has_rounds`.
    step: Callable[..., Any]
    takes: tuple[StepKind, ...] = ()  # earlier kinds whose outputs it takes
    reads: StepKind | None = None  # the kind among them whose output `write` needs on the host
    gives: Any = BY_RANK  # shardings of the output
    emits: bool = False  # the output has the columns of `layout.output_columns`
    has_rounds: bool = False  # SchedulingLimits.num_rounds verifications
    is_decode: bool = False  # over bucket * N tokens, with XLA options for few tokens
    is_timed: bool = False  # its draft shapes are chosen by measured times


def of_rows(key: ProgramKey, *names: str) -> PackedLayout:
    return PackedLayout(tuple((name, (key.bucket,)) for name in names))


def write_slots(fields: Fields, part: Part) -> None:
    fields["slots"][: len(part.plan.rows)] = [row.slot for row in part.plan.rows]


def window_grants(host: Host, num_grants: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
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

"""The programs to compile, their order, and the choice of one for each step of a plan."""

from __future__ import annotations

from collections.abc import Iterable

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.engine.steps.step_def import ProgramKey, Turn, Wanted
from jspec.engine.steps.table import STEPS
from jspec.errors import InvariantError
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN, StepOption, StepOptions

ON_DEMAND = {
    StepOption.GRAMMAR: "grammars and draft trees",
    StepOption.HIDDEN: "hidden states",
}


def wanted_programs(limits: ServeLimits) -> tuple[Wanted, ...]:
    """Return all programs that any request can need, each once, in the order of their turns."""
    every = [wanted for step in STEPS.values() for wanted in step.programs(limits)]
    every.sort(key=lambda wanted: wanted.turn)
    first = {wanted.key: wanted for wanted in reversed(every)}
    return tuple(wanted for wanted in every if first[wanted.key] is wanted)


def program_keys(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    return tuple(key for key, turn, _ in wanted_programs(limits) if turn < Turn.ON_DEMAND)


def programs_on_demand(limits: ServeLimits, asked: StepOptions) -> tuple[ProgramKey, ...]:
    """Return the additional programs that these options need, alone or batched with others."""
    every = wanted_programs(limits)
    return tuple(key for key, _, needs in every if needs and needs <= asked.members)


def programs_at_start(limits: ServeLimits, when: str) -> tuple[ProgramKey, ...]:
    """Return the programs to compile before an engine serves. when: "first": a few that serve every
    plan; "common": those of the engine's own shape, except on-demand ones; "all"."""
    every = wanted_programs(limits)
    if when == "first":
        return tuple(key for key, turn, _ in every if turn <= Turn.START)
    later = (Turn.SHAPES, Turn.ON_DEMAND) if when == "common" else ()
    return tuple(key for key, turn, _ in every if turn not in later)


def later_programs(limits: ServeLimits, ready: Iterable[ProgramKey]) -> tuple[ProgramKey, ...]:
    made = set(ready)
    return tuple(key for key in program_keys(limits) if key not in made)


def describe_ready(
    limits: ServeLimits, ready: Iterable[ProgramKey], *, building: StepOptions = PLAIN
) -> tuple[str, ...]:
    """Return lines on the compiled programs and on when the others will be compiled. building:
    options whose programs are being compiled for a request."""
    made = set(ready)
    num_later = len(later_programs(limits, made))
    lines = [f"programs: {len(made)} compiled, {num_later} more while serving"]
    for option, what in ON_DEMAND.items():
        keys = programs_on_demand(limits, StepOptions(frozenset({option})))
        when = "compiled at the first request for them"
        if made.issuperset(keys):
            when = "compiled"
        elif option in building:
            when = "being compiled; requests for them wait, others go on"
        lines.append(f"{what}: {when}")
    return tuple(lines)


def nearest_program(needed: ProgramKey, ready: Iterable[ProgramKey]) -> ProgramKey:
    """Return the cheapest ready program that can run `needed`: of its kind and shape, with the
    smallest bucket, then the fewest options that cover the needed ones. Raises InvariantError if
    none fits."""
    ready = tuple(ready)
    fit = [key for key in ready if _serves(key, needed)]
    if not fit:
        raise InvariantError(
            f"no program is ready for {needed}; expected one of its kind and shape that is as "
            f"large and has its options among {[str(key) for key in ready]}"
        )
    return min(fit, key=lambda key: (key.bucket, len(key.options)))


def _serves(key: ProgramKey, needed: ProgramKey) -> bool:
    return (
        key.kind is needed.kind
        and key.shape == needed.shape
        and key.bucket >= needed.bucket
        and key.options.covers(needed.options)
    )


def ready_shapes(
    limits: ServeLimits, ready: Iterable[ProgramKey], *, num_rows: int, options: StepOptions
) -> tuple[SpeculativeConfig, ...]:
    """Return the draft shapes that a decode of `num_rows` rows can use now, ordered as in `limits`:
    the own one, and those whose programs (also a plain one's DRAFT_PREFILL) do not pad more
    rows."""
    ready = tuple(ready)

    def bucket(kind: StepKind, shape: SpeculativeConfig | None, needs: StepOptions) -> int | None:
        needed = ProgramKey(kind, num_rows, needs, shape)
        found = [key.bucket for key in ready if _serves(key, needed)]
        return min(found, default=None)

    own = bucket(StepKind.DECODE, None, options)
    draft_prefill = bucket(StepKind.DRAFT_PREFILL, None, PLAIN)

    def is_ready(shape: SpeculativeConfig) -> bool:
        if shape == limits.draft_shape:
            return True
        found = bucket(StepKind.DECODE, shape, options)
        if found is None or own is None or found > own:
            return False
        return not shape.is_plain or (draft_prefill is not None and draft_prefill <= own)

    return tuple(shape for shape in limits.shapes if is_ready(shape))

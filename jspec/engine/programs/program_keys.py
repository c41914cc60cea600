"""Program keys: which programs to compile, in which order, and which one runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple, Protocol

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.errors import InvariantError
from jspec.messages.plan import StepKind, StepPlan
from jspec.messages.step_options import ALL, PLAIN, SAMPLING, StepOption, StepOptions

# An engine with at most this many step programs compiles all at the start: always on a CPU, where a
# later compilation would compete with serving for the same cores.
FEW_PROGRAMS = 10
# The programs of a decode in which a row follows a grammar, in order (decision 23).
CUT = (StepKind.PROPOSE, StepKind.SCORE, StepKind.SETTLE)


class ProgramKey(NamedTuple):
    """Identifies a compiled program.

    bucket: B rows of a decode, T tokens of a prefill or ids of a recall.
    shape: draft shape of a decode; None: the engine's own.
    """

    kind: StepKind
    bucket: int
    features: StepOptions
    shape: SpeculativeConfig | None = None

    def __str__(self) -> str:
        size = "T" if self.kind in (StepKind.PREFILL, StepKind.RECALL) else "B"
        features = "" if self.features == PLAIN else f" {self.features}"
        shape = "" if self.shape is None else f" {self.shape}"
        return f"{self.kind.value} {size}={self.bucket}{shape}{features}"


class HasBuckets(Protocol):
    """B and T of an engine's programs, ascending: ServeLimits, or a config without limits yet."""

    @property
    def decode_buckets(self) -> tuple[int, ...]: ...

    @property
    def prefill_buckets(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> bool: ...


def program_keys(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    return (
        *step_programs(limits),
        *recall_programs(limits),
        *shape_programs(limits),
        *sharing_programs(limits),
    )


def sharing_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Return large decodes with shared prefixes. Optional: plain ones serve too, but read more."""
    if limits.sharing is None:
        return ()
    sizes = [size for size in limits.decode_buckets if size >= limits.sharing.least_rows]
    return tuple(
        ProgramKey(StepKind.DECODE, batch, with_sharing(features))
        for features in (PLAIN, SAMPLING)
        for batch in reversed(sizes)
    )


def with_sharing(features: StepOptions) -> StepOptions:
    return StepOptions(features.members | {StepOption.SHARED})


def shape_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Return decodes of the other draft shapes; the engine's own serves until they are ready.
    DRAFT_PREFILL comes first: without it no step may be plain."""
    sizes = limits.decode_buckets
    draft_prefill = sizes if limits.max_pending else ()
    return (
        *(ProgramKey(StepKind.DRAFT_PREFILL, batch, PLAIN) for batch in draft_prefill),
        *(
            ProgramKey(StepKind.DECODE, batch, features, shape)
            for features in (PLAIN, SAMPLING)
            for shape in limits.shapes
            if shape != limits.spec
            for batch in sizes
        ),
    )


def step_programs(limits: HasBuckets) -> tuple[ProgramKey, ...]:
    """Return the prefill and decode programs.

    Prefill with all sampling features (decision 4), decode without and with them, and the largest
    of each with log-probabilities, which few requests need (decision 22).
    """
    decode = [
        ProgramKey(StepKind.DECODE, batch, features)
        for batch in limits.decode_buckets
        for features in (PLAIN, SAMPLING)
    ]
    prefill = [ProgramKey(StepKind.PREFILL, tokens, SAMPLING) for tokens in limits.prefill_buckets]
    if limits.logprobs:
        prefill.append(ProgramKey(StepKind.PREFILL, limits.prefill_buckets[-1], ALL))
        decode.append(ProgramKey(StepKind.DECODE, limits.decode_buckets[-1], ALL))
    return (*prefill, *decode)


def recall_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Return the recall program; empty without a prefix cache."""
    if not limits.prefix_cache:
        return ()
    return (ProgramKey(StepKind.RECALL, limits.recall_size, PLAIN),)


def grammar_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Return the programs of rows with a grammar, or whose draft trees are requested.

    Built when the first such request comes, unless built at the start. Prefill in three sizes;
    decode only as large as it gets.
    """
    features = StepOptions(frozenset({*(ALL if limits.logprobs else SAMPLING), StepOption.GRAMMAR}))
    sizes = limits.prefill_buckets
    middle = next(size for size in sizes if 8 * size >= sizes[-1])
    of_prompts = sorted({sizes[0], middle, sizes[-1]}, reverse=True)
    most = limits.decode_buckets[-1]
    return (
        *(ProgramKey(StepKind.PREFILL, size, features) for size in of_prompts),
        ProgramKey(StepKind.PROPOSE, most, PLAIN),
        ProgramKey(StepKind.SCORE, most, PLAIN),
        ProgramKey(StepKind.SETTLE, most, features),
    )


def hidden_programs(
    limits: ServeLimits, *, beside_grammars: bool = False
) -> tuple[ProgramKey, ...]:
    """Return the programs of rows whose hidden states are requested, of the largest size.

    Built when the first such request comes, unless built at the start. beside_grammars: rows with a
    grammar may share their batch.
    """
    features = StepOptions(frozenset({*(ALL if limits.logprobs else SAMPLING), StepOption.HIDDEN}))
    chunk, batch = limits.prefill_buckets[-1], limits.decode_buckets[-1]
    own = (
        ProgramKey(StepKind.PREFILL, chunk, features),
        ProgramKey(StepKind.DECODE, batch, features),
    )
    if not beside_grammars:
        return own
    both = StepOptions(features.members | {StepOption.GRAMMAR})
    settle = ProgramKey(StepKind.SETTLE, batch, both)
    return (*own, ProgramKey(StepKind.PREFILL, chunk, both), scored_for(settle), settle)


def scored_for(settle: ProgramKey) -> ProgramKey:
    """Return the SCORE program for SETTLE: it outputs hidden states if SETTLE reads them."""
    read = frozenset({StepOption.HIDDEN}) & settle.features.members
    return ProgramKey(StepKind.SCORE, settle.bucket, StepOptions(read))


def programs_on_demand(limits: ServeLimits, asked: StepOptions) -> tuple[ProgramKey, ...]:
    """Return the additional programs that requests for these features need."""
    grammars = StepOption.GRAMMAR in asked
    return (
        *(grammar_programs(limits) if grammars else ()),
        *(hidden_programs(limits, beside_grammars=grammars) if StepOption.HIDDEN in asked else ()),
    )


def first_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Return a few programs that serve every plan.

    The first two suffice, plus the recall program. The others make common plans cheap: a single
    row, many rows without filters or penalties, and prompts without log-probabilities.
    """
    most = ALL if limits.logprobs else SAMPLING
    wanted = (
        ProgramKey(StepKind.PREFILL, limits.prefill_buckets[-1], most),
        ProgramKey(StepKind.DECODE, limits.decode_buckets[-1], most),
        ProgramKey(StepKind.DECODE, limits.decode_buckets[0], PLAIN),
        ProgramKey(StepKind.DECODE, limits.decode_buckets[-1], PLAIN),
        ProgramKey(StepKind.PREFILL, limits.prefill_buckets[0], SAMPLING),
        ProgramKey(StepKind.PREFILL, limits.prefill_buckets[-1], SAMPLING),
        *recall_programs(limits),
    )
    return tuple(dict.fromkeys(wanted))


def programs_at_start(limits: ServeLimits, when: str) -> tuple[ProgramKey, ...]:
    """Return the programs to compile before an engine serves.

    when: "first": first_programs. "common": those of the engine's own shape, without on-demand
    ones. "all": every program that any request can need, alone or batched with other rows.
    """
    if when == "all":
        asked = StepOptions(frozenset({StepOption.GRAMMAR, StepOption.HIDDEN}))
        return tuple(dict.fromkeys((*program_keys(limits), *programs_on_demand(limits, asked))))
    if when == "common":
        return (*step_programs(limits), *recall_programs(limits), *sharing_programs(limits))
    return first_programs(limits)


def later_programs(limits: ServeLimits, ready: Iterable[ProgramKey]) -> tuple[ProgramKey, ...]:
    """Return the programs still to be built, in order of use.

    Plain decode, prefill, the rest, other draft shapes, shared prefixes. Prefill by powers of two
    first: with those a prompt pads at most as many tokens as it has.
    """
    missing = set(program_keys(limits)).difference(ready)

    def turn(key: ProgramKey) -> int:
        if StepOption.SHARED in key.features:
            return 5
        if key.shape is not None or key.kind is StepKind.DRAFT_PREFILL:
            return 4
        if key.kind is StepKind.PREFILL:
            return 1 if key.bucket.bit_count() == 1 else 2
        return 0 if key.features == PLAIN else 3

    return tuple(sorted((key for key in program_keys(limits) if key in missing), key=turn))


def needed_program(plan: StepPlan) -> ProgramKey:
    """Return the program that would fit the plan without padding; it need not exist."""
    size = len(plan.rows)
    if plan.kind is StepKind.PREFILL:
        size = sum(len(chunk.token_ids) for chunk in plan.chunks)
    return ProgramKey(plan.kind, size, plan.features, plan.shape)


def nearest_program(needed: ProgramKey, ready: Iterable[ProgramKey]) -> ProgramKey:
    """Return the cheapest ready program that can run `needed`: smallest bucket, fewest features.

    It has the same kind and shape, a bucket at least as large, and features that cover the needed
    ones. Ties go to the first of `ready`. Raises InvariantError if no program fits.
    """
    ready = tuple(ready)
    fit = [key for key in ready if _serves(key, needed)]
    if not fit:
        raise InvariantError(
            f"no program is ready for {needed}; expected one of its kind and shape that is as "
            f"large and has its features among {[str(key) for key in ready]}"
        )
    return min(fit, key=lambda key: (key.bucket, len(key.features)))


def program_for(
    plan: StepPlan, nearest: Callable[[ProgramKey], ProgramKey], ready: Container[ProgramKey]
) -> ProgramKey:
    """Return the ready program that runs a plan. nearest: `nearest_program` or a cached one. If
    rows share prefixes, prefer the variant that reads them once, if it is ready in that size."""
    key = nearest(needed_program(plan))
    if plan.shared:
        told = key._replace(features=with_sharing(key.features))
        return told if told in ready else key
    return key


def _serves(key: ProgramKey, needed: ProgramKey) -> bool:
    return (
        key.kind is needed.kind
        and key.shape == needed.shape
        and key.bucket >= needed.bucket
        and key.features.covers(needed.features)
    )


def ready_shapes(
    limits: ServeLimits, ready: Iterable[ProgramKey], *, num_rows: int, features: StepOptions
) -> tuple[SpeculativeConfig, ...]:
    """Return the draft shapes that a decode of `num_rows` rows can use now, ordered as in `limits`.

    Always the engine's own; another one if its program pads no more rows than the own one. A plain
    shape also needs a DRAFT_PREFILL program that pads no more rows.
    """
    ready = tuple(ready)

    def bucket(kind: StepKind, shape: SpeculativeConfig | None, needs: StepOptions) -> int | None:
        needed = ProgramKey(kind, num_rows, needs, shape)
        found = [key.bucket for key in ready if _serves(key, needed)]
        return min(found, default=None)

    own = bucket(StepKind.DECODE, None, features)
    told = bucket(StepKind.DRAFT_PREFILL, None, PLAIN)

    def is_ready(shape: SpeculativeConfig) -> bool:
        if shape == limits.spec:
            return True
        found = bucket(StepKind.DECODE, shape, features)
        if found is None or own is None or found > own:
            return False
        return not shape.is_plain or (told is not None and told <= own)

    return tuple(shape for shape in limits.shapes if is_ready(shape))

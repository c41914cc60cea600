"""Which programs an engine compiles, which of them first, and which ready one runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple, Protocol

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.errors import InvariantError
from jspec.messages.features import ALL, PLAIN, SAMPLING, Feature, StepFeatures
from jspec.messages.plan import StepKind, StepPlan

# So few steps are all compiled at the start: a CPU's engine always, which would otherwise compile
# beside its own serving on the same cores.
FEW_PROGRAMS = 10
# The programs of a decode in which a row follows a grammar, in their order (decision 23).
CUT = (StepKind.PROPOSE, StepKind.SCORE, StepKind.SETTLE)


class ProgramKey(NamedTuple):
    """A compiled program. bucket: B rows of a decode, T tokens of a prefill or ids of a recall.
    shape: of a decode, None: the engine's own."""

    kind: StepKind
    bucket: int
    features: StepFeatures
    shape: SpeculativeConfig | None = None

    def __str__(self) -> str:
        size = "T" if self.kind in (StepKind.PREFILL, StepKind.RECALL) else "B"
        features = "" if self.features == PLAIN else f" {self.features}"
        shape = "" if self.shape is None else f" {self.shape}"
        return f"{self.kind.value} {size}={self.bucket}{shape}{features}"


class HasBuckets(Protocol):
    """B and T of an engine's programs, ascending: ServeLimits, or a config that has none yet."""

    @property
    def decode_buckets(self) -> tuple[int, ...]: ...

    @property
    def prefill_buckets(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> bool: ...


def program_keys(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """All that an engine wants."""
    return (
        *step_programs(limits),
        *recall_programs(limits),
        *shape_programs(limits),
        *sharing_programs(limits),
    )


def sharing_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Decodes of many rows that are told of shared prefixes: the others serve them as well, and
    read more."""
    if limits.sharing is None:
        return ()
    sizes = [size for size in limits.decode_buckets if size >= limits.sharing.least_rows]
    return tuple(
        ProgramKey(StepKind.DECODE, batch, with_sharing(features))
        for features in (PLAIN, SAMPLING)
        for batch in reversed(sizes)
    )


def with_sharing(features: StepFeatures) -> StepFeatures:
    """These, told of shared prefixes."""
    return StepFeatures(features.members | {Feature.SHARED})


def shape_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Decodes of the shapes beside the engine's own, which serves until they are there. Catching
    up comes first: without it no step may be a plain one."""
    sizes = limits.decode_buckets
    catch_up = sizes if limits.deferred_tokens else ()
    return (
        *(ProgramKey(StepKind.CATCH_UP, batch, PLAIN) for batch in catch_up),
        *(
            ProgramKey(StepKind.DECODE, batch, features, shape)
            for features in (PLAIN, SAMPLING)
            for shape in limits.shapes
            if shape != limits.spec
            for batch in sizes
        ),
    )


def step_programs(limits: HasBuckets) -> tuple[ProgramKey, ...]:
    """Prefill with all of sampling (decision 4), decode with none and with all of it, and each
    once, as large as it gets, with log-probabilities: few ask for them (decision 22)."""
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
    """One, or none where nothing is cached."""
    if not limits.prefix_cache:
        return ()
    return (ProgramKey(StepKind.RECALL, limits.recall_size, PLAIN),)


def grammar_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """What rows with a grammar need, or whose draft trees are asked for: made when the first one
    comes, unless they were at the start. Three sizes of prompts; decodes as large as they get."""
    features = StepFeatures(frozenset({*(ALL if limits.logprobs else SAMPLING), Feature.GRAMMAR}))
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
    """What rows need whose hidden states are asked for: made when the first one comes, unless they
    were at the start, as large as they get. beside_grammars: rows with a grammar may share a batch
    with them."""
    features = StepFeatures(frozenset({*(ALL if limits.logprobs else SAMPLING), Feature.HIDDEN}))
    chunk, batch = limits.prefill_buckets[-1], limits.decode_buckets[-1]
    own = (
        ProgramKey(StepKind.PREFILL, chunk, features),
        ProgramKey(StepKind.DECODE, batch, features),
    )
    if not beside_grammars:
        return own
    both = StepFeatures(features.members | {Feature.GRAMMAR})
    settle = ProgramKey(StepKind.SETTLE, batch, both)
    return (*own, ProgramKey(StepKind.PREFILL, chunk, both), scored_for(settle), settle)


def scored_for(settle: ProgramKey) -> ProgramKey:
    """The program whose output SETTLE takes: it hands on hidden states where SETTLE reads them."""
    read = frozenset({Feature.HIDDEN}) & settle.features.members
    return ProgramKey(StepKind.SCORE, settle.bucket, StepFeatures(read))


def programs_on_demand(limits: ServeLimits, asked: StepFeatures) -> tuple[ProgramKey, ...]:
    """What rows need, beside what an engine has, if these features are asked for."""
    grammars = Feature.GRAMMAR in asked
    return (
        *(grammar_programs(limits) if grammars else ()),
        *(hidden_programs(limits, beside_grammars=grammars) if Feature.HIDDEN in asked else ()),
    )


def first_programs(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Few programs that serve every plan: the first two and the last do, the others make common
    plans cheap: one row alone, many rows without filters or penalties, and prompts of which no
    log-probabilities are asked for.
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
    """Programs compiled before an engine serves.

    when: "first": first_programs. "common": those of the engine's own shape that need no request to
    ask for them. "all": every program that any request can need, whatever other rows need with it.
    """
    if when == "all":
        asked = StepFeatures(frozenset({Feature.GRAMMAR, Feature.HIDDEN}))
        return tuple(dict.fromkeys((*program_keys(limits), *programs_on_demand(limits, asked))))
    if when == "common":
        return (*step_programs(limits), *recall_programs(limits), *sharing_programs(limits))
    return first_programs(limits)


def later_programs(limits: ServeLimits, ready: Iterable[ProgramKey]) -> tuple[ProgramKey, ...]:
    """What is still to be made beside `ready`: decode without features, prefill, then the rest,
    other shapes after all of it, and what reads shared prefixes once at last.

    Prefill by powers of two first: with each of those a prompt pads no more than it has tokens.
    """
    missing = set(program_keys(limits)).difference(ready)

    def turn(key: ProgramKey) -> int:
        if Feature.SHARED in key.features:
            return 5
        if key.shape is not None or key.kind is StepKind.CATCH_UP:
            return 4
        if key.kind is StepKind.PREFILL:
            return 1 if key.bucket.bit_count() == 1 else 2
        return 0 if key.features == PLAIN else 3

    return tuple(sorted((key for key in program_keys(limits) if key in missing), key=turn))


def needed_program(plan: StepPlan) -> ProgramKey:
    """The program that would fit the plan exactly, padding nothing; it need not exist."""
    size = len(plan.rows)
    if plan.kind is StepKind.PREFILL:
        size = sum(len(chunk.token_ids) for chunk in plan.chunks)
    return ProgramKey(plan.kind, size, plan.features, plan.shape)


def nearest_program(needed: ProgramKey, ready: Iterable[ProgramKey]) -> ProgramKey:
    """The cheapest ready program that can do what is needed: smallest bucket, fewest features.

    It is of the same kind and shape, its bucket is not below the needed one and its features cover
    the needed ones. Between equals the first of `ready`. Raises InvariantError if there is none.
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
    """The ready program that runs a plan. nearest: as nearest_program. Where rows share prefixes
    one that is told so, if it is there, has what they need and pads no more rows."""
    key = nearest(needed_program(plan))
    if plan.shared:
        told = key._replace(features=with_sharing(key.features))
        return told if told in ready else key
    return key


def _serves(key: ProgramKey, needed: ProgramKey) -> bool:
    """Whether that program can do what is needed."""
    return (
        key.kind is needed.kind
        and key.shape == needed.shape
        and key.bucket >= needed.bucket
        and key.features.covers(needed.features)
    )


def ready_shapes(
    limits: ServeLimits, ready: Iterable[ProgramKey], *, num_rows: int, features: StepFeatures
) -> tuple[SpeculativeConfig, ...]:
    """The shapes that a decode of so many rows can have now, in the order of `limits.shapes`.

    The engine's own always, another one where its program pads no more rows than that one's does;
    a plain one only if the drafter can be told later, which pads no more either.
    """
    ready = tuple(ready)

    def bucket(kind: StepKind, shape: SpeculativeConfig | None, needs: StepFeatures) -> int | None:
        needed = ProgramKey(kind, num_rows, needs, shape)
        found = [key.bucket for key in ready if _serves(key, needed)]
        return min(found, default=None)

    own = bucket(StepKind.DECODE, None, features)
    told = bucket(StepKind.CATCH_UP, None, PLAIN)

    def is_ready(shape: SpeculativeConfig) -> bool:
        if shape == limits.spec:
            return True
        found = bucket(StepKind.DECODE, shape, features)
        if found is None or own is None or found > own:
            return False
        return not shape.is_plain or (told is not None and told <= own)

    return tuple(shape for shape in limits.shapes if is_ready(shape))

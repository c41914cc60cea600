"""DECODE: rounds of propose, score and settle in one program.

DRAFT_PREFILL runs before it to advance the drafter over pending tokens. For rows with a grammar
PROPOSE, SCORE and SETTLE replace it (decision 23): the host computes masks of the drafted trees for
SETTLE while SCORE runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.device.batch import DraftPrefillBatch, Features, Scored, decode_batch, settle_batch
from jspec.device.parallel import partition_spec
from jspec.engine.steps.step_def import (
    BY_RANK,
    Fields,
    Host,
    Part,
    ProgramKey,
    StepDef,
    Turn,
    Wanted,
    of_rows,
    window_grants,
    write_grants,
    write_slots,
    write_window_grants,
)
from jspec.messages.grammar import num_words
from jspec.messages.layout import PackedLayout
from jspec.messages.plan import StepKind
from jspec.messages.step_options import ALL, PLAIN, SAMPLING, StepOption, StepOptions
from jspec.speculative.cut_step import propose_step, score_step, settle_step
from jspec.speculative.drafters.pending import draft_prefill_step
from jspec.speculative.step import speculative_rounds

HIDDEN, GRAMMAR = frozenset({StepOption.HIDDEN}), frozenset({StepOption.GRAMMAR})


def decodes(limits: ServeLimits) -> Iterator[Wanted]:
    """Yield decodes with and without sampling, the largest with log-probabilities (decision 22)."""
    sizes = limits.programs.decode_buckets
    most = ALL if limits.programs.logprobs else SAMPLING
    key = partial(ProgramKey, StepKind.DECODE)
    yield Wanted(key(sizes[-1], most), Turn.NEEDED)
    yield Wanted(key(sizes[0], PLAIN), Turn.START)
    yield Wanted(key(sizes[-1], PLAIN), Turn.START)
    for batch in sizes:
        yield Wanted(key(batch, PLAIN), Turn.DECODE)
        yield Wanted(key(batch, SAMPLING), Turn.OPTIONS)
    for options in (PLAIN, SAMPLING):
        for shape in limits.other_shapes:
            yield from (Wanted(key(batch, options, shape), Turn.SHAPES) for batch in sizes)
        if limits.programs.sharing is not None:  # optional: the others only read more
            large = [batch for batch in sizes if batch >= limits.programs.sharing.least_rows]
            shared = with_sharing(options)
            yield from (Wanted(key(batch, shared), Turn.SHARING) for batch in reversed(large))
    hidden = StepOptions(most.members | HIDDEN)
    yield Wanted(key(sizes[-1], hidden), Turn.ON_DEMAND, HIDDEN)


def with_sharing(options: StepOptions) -> StepOptions:
    return StepOptions(options.members | {StepOption.SHARED})


def layout(key: ProgramKey, host: Host) -> PackedLayout:
    batch, num_grants = key.bucket, key.bucket * host.limits.grants_per_row
    is_sharing = StepOption.SHARED in key.options
    return PackedLayout(
        (
            ("slots", (batch,)),
            ("grants", (num_grants, 3)),
            *window_grants(host, num_grants),
            *((("leaders", (batch,)), ("shared_keys", (batch,))) if is_sharing else ()),
        )
    )


def write(fields: Fields, part: Part) -> None:
    write_slots(fields, part)
    write_grants(fields["grants"], part.plan, space=0)
    write_window_grants(fields, part)
    if "leaders" in fields and part.plan.shared:
        shared = np.array(part.plan.shared, np.int32)
        fields["leaders"][: len(shared)], fields["shared_keys"][: len(shared)] = shared.T


DECODE = StepDef(
    programs=decodes,
    options=frozenset(StepOption) - GRAMMAR,
    layout=layout,
    write=write,
    batch=decode_batch,
    step=speculative_rounds,
    emits=True,
    has_rounds=True,
    is_decode=True,
    is_timed=True,
)


def draft_prefills(limits: ServeLimits) -> Iterator[Wanted]:
    for batch in limits.programs.decode_buckets if limits.max_pending else ():
        yield Wanted(ProgramKey(StepKind.DRAFT_PREFILL, batch, PLAIN), Turn.SHAPES)


def write_counts(fields: Fields, part: Part) -> None:
    write_slots(fields, part)
    fields["counts"][: len(part.plan.rows)] = part.plan.pending


DRAFT_PREFILL = StepDef(
    programs=draft_prefills,
    layout=lambda key, _: of_rows(key, "slots", "counts"),
    write=write_counts,
    batch=lambda fields: DraftPrefillBatch(**fields),
    step=lambda program, *arguments: draft_prefill_step(program.drafter, *arguments),
)


def cut_decodes(
    limits: ServeLimits, *, kind: StepKind, options: frozenset[StepOption]
) -> Iterator[Wanted]:
    """Yield the largest decode with each part of `options` that requests may need."""
    most = ALL if limits.programs.logprobs else SAMPLING
    for asked in (GRAMMAR, GRAMMAR | HIDDEN):
        needed = StepOptions((most.members | asked) & options)
        yield Wanted(
            ProgramKey(kind, limits.programs.decode_buckets[-1], needed), Turn.ON_DEMAND, asked
        )


def settle_layout(key: ProgramKey, host: Host) -> PackedLayout:
    nodes = host.limits.draft_shape.num_draft_tokens
    words = num_words(host.limits.programs.vocab_size)
    return PackedLayout((("slots", (key.bucket,)), ("allowed", (key.bucket, nodes, words))))


def write_masks(fields: Fields, part: Part) -> None:
    """Write the tokens that each grammar allows after each node of the trees, i32[3, B, N]."""
    assert part.read is not None
    write_slots(fields, part)
    tokens, parents, _ = part.read
    for r, constraint in enumerate(part.plan.constraints):
        if constraint is not None:
            constraint.fill(tokens[r], parents[r], fields["allowed"][r].view(np.uint32))


# Each shard keeps the logits of its part of the vocabulary.
_LOGITS: Any = partition_spec(("rank", None, None, "vocab"))
_SETTLED = frozenset(StepOption) - {StepOption.SHARED}
PROPOSE = StepDef(
    programs=partial(cut_decodes, kind=StepKind.PROPOSE, options=frozenset()),
    layout=layout,
    write=write,
    batch=decode_batch,
    step=propose_step,
    is_decode=True,
)
SCORE = StepDef(
    programs=partial(cut_decodes, kind=StepKind.SCORE, options=HIDDEN),
    options=HIDDEN,
    layout=lambda key, _: of_rows(key, "slots"),
    write=write_slots,
    batch=lambda fields: fields["slots"],
    step=score_step,
    takes=(StepKind.PROPOSE,),
    gives=Scored(logits=_LOGITS, features=Features(hidden=BY_RANK, aux_hidden=BY_RANK)),
    is_decode=True,
)
SETTLE = StepDef(
    programs=partial(cut_decodes, kind=StepKind.SETTLE, options=_SETTLED),
    options=_SETTLED,
    layout=settle_layout,
    blank=lambda fields, _: fields["allowed"].fill(-1),
    write=write_masks,
    batch=settle_batch,
    step=settle_step,
    takes=(StepKind.PROPOSE, StepKind.SCORE),
    reads=StepKind.PROPOSE,
    emits=True,
    is_decode=True,
)

"""PREFILL: prompt chunks of several rows. CACHED_DRAFT_PREFILL runs before it to store the ids of
cached prefixes in the state by slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.device.batch import CachedDraftPrefillBatch, prefill_batch
from jspec.engine.steps.step_def import (
    Fields,
    Host,
    Part,
    ProgramKey,
    StepDef,
    Turn,
    Wanted,
    window_grants,
    write_window_grants,
)
from jspec.messages.grammar import num_words
from jspec.messages.layout import PackedLayout
from jspec.messages.plan import PrefillChunk, StepKind
from jspec.messages.sampling_rows import packed_fields, write_neutral, write_request
from jspec.messages.step_options import ALL, PLAIN, SAMPLING, StepOption, StepOptions
from jspec.speculative.cached_draft_prefill import cached_draft_prefill_step
from jspec.speculative.step import prefill_step

# A tree of one node: its token (unused), and no parent.
ROOT, ABOVE_ROOT = np.zeros(1, np.int32), np.full(1, -1, np.int32)


def prefills(limits: ServeLimits) -> Iterator[Wanted]:
    """Yield prefills with all sampling options (decision 4), and few sizes for other options."""
    sizes = limits.programs.prefill_buckets
    most = ALL if limits.programs.logprobs else SAMPLING

    def wanted(
        size: int, options: StepOptions, turn: Turn, asked: frozenset[StepOption] = frozenset()
    ) -> Wanted:
        options = StepOptions(options.members | asked)
        return Wanted(ProgramKey(StepKind.PREFILL, size, options), turn, asked)

    yield wanted(sizes[-1], most, Turn.NEEDED)
    yield wanted(sizes[0], SAMPLING, Turn.START)
    yield wanted(sizes[-1], SAMPLING, Turn.START)
    for size in sizes:
        yield wanted(size, SAMPLING, Turn.PREFILL if size.bit_count() == 1 else Turn.BETWEEN)
    grammar, hidden = frozenset({StepOption.GRAMMAR}), frozenset({StepOption.HIDDEN})
    middle = next(size for size in sizes if 8 * size >= sizes[-1])
    for size in sorted({sizes[0], middle, sizes[-1]}, reverse=True):
        yield wanted(size, most, Turn.ON_DEMAND, grammar)
    yield wanted(sizes[-1], most, Turn.ON_DEMAND, hidden)
    yield wanted(sizes[-1], most, Turn.ON_DEMAND, hidden | grammar)


def layout(key: ProgramKey, host: Host) -> PackedLayout:
    limits, tokens, rows = host.limits, key.bucket, host.limits.programs.prefill_rows
    masks = (("allowed", (rows, num_words(limits.programs.vocab_size))),)
    loras = (("lora_slots", (rows,)),) if limits.programs.has_loras else ()
    return PackedLayout(
        (
            ("slots", (rows,)),
            ("starts", (rows,)),
            ("cu_q_lens", (rows + 1,)),
            ("is_final", (rows,)),
            ("next_ids", (rows,)),
            ("token_ids", (tokens,)),
            ("admitted", (rows,)),
            ("prompt_lens", (rows,)),
            ("page_table", (rows, limits.pages_per_row)),
            *window_grants(host, limits.window_grants_of_prefill(tokens)),
            *(masks if StepOption.GRAMMAR in key.options else ()),
            *loras,
            *packed_fields(rows),
        )
    )


def cached_layout(key: ProgramKey, host: Host) -> PackedLayout:
    rows = host.limits.programs.prefill_rows
    names = ("slots", "starts", "next_ids", "is_first", "prompt_lens")
    of_rows = tuple((name, (rows,)) for name in names)
    return PackedLayout((*of_rows, ("cu_q_lens", (rows + 1,)), ("token_ids", (key.bucket,))))


def blank(fields: Fields, host: Host) -> None:
    write_neutral(fields, vocab_size=host.vocab_size)
    if "allowed" in fields:
        fields["allowed"][:] = -1


def write(fields: Fields, part: Part) -> None:
    plan, host = part.plan, part.host
    write_window_grants(fields, part)
    _write_chunks(fields, plan.chunks)
    admissions = {admission.row: admission for admission in plan.admissions}
    pages_of = {grant.slot: grant.pages for grant in plan.grants if grant.space == 0}
    for r, chunk in enumerate(plan.chunks):
        fields["is_final"][r] = chunk.is_final
        admission = admissions.get(chunk.row)
        if admission is not None:
            fields["admitted"][r] = admission.row.slot
            fields["prompt_lens"][r] = admission.prompt_len
            pages = pages_of[admission.row.slot]
            fields["page_table"][r, : len(pages)] = pages
            if admission.request.lora is not None:
                fields["lora_slots"][r] = admission.request.lora.slot
            write_request(fields, r, admission.request, vocab_size=host.vocab_size)
    if "allowed" in fields:
        for r, constraint in enumerate(plan.constraints):
            if constraint is not None and plan.chunks[r].is_final:
                constraint.fill(ROOT, ABOVE_ROOT, fields["allowed"][r : r + 1].view(np.uint32))


def write_cached(fields: Fields, part: Part) -> None:
    _write_chunks(fields, part.run.chunks)
    prompt_lens = {admission.row: admission.prompt_len for admission in part.plan.admissions}
    for r, chunk in enumerate(part.run.chunks):
        fields["is_first"][r] = chunk.start == 0
        fields["prompt_lens"][r] = prompt_lens[chunk.row]


def _write_chunks(fields: Fields, chunks: Sequence[PrefillChunk]) -> None:
    end = 0
    for r, chunk in enumerate(chunks):
        fields["slots"][r] = chunk.row.slot
        fields["starts"][r] = chunk.start
        fields["next_ids"][r] = 0 if chunk.next_id is None else chunk.next_id
        offset, end = end, end + len(chunk.token_ids)
        fields["token_ids"][offset:end] = chunk.token_ids
        fields["cu_q_lens"][r + 1] = end
    fields["cu_q_lens"][len(chunks) + 1 :] = end


PREFILL = StepDef(
    programs=prefills,
    options=frozenset(StepOption) - {StepOption.SHARED},
    layout=layout,
    size=lambda plan, _: plan.num_prefill_tokens,
    smaller="chunked_prefill_size",
    blank=blank,
    write=write,
    batch=prefill_batch,
    step=prefill_step,
    emits=True,
)


def cached_draft_prefills(limits: ServeLimits) -> Iterator[Wanted]:
    if limits.scheduling.prefix_cache:
        yield Wanted(
            ProgramKey(StepKind.CACHED_DRAFT_PREFILL, limits.cached_draft_prefill_size, PLAIN),
            Turn.NEEDED,
        )


CACHED_DRAFT_PREFILL = StepDef(
    programs=cached_draft_prefills,
    layout=cached_layout,
    size=lambda _, run: sum(len(chunk.token_ids) for chunk in run.chunks),
    smaller="chunked_prefill_size",
    write=write_cached,
    batch=lambda fields: CachedDraftPrefillBatch(**fields),
    step=cached_draft_prefill_step,
)

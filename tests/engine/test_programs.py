"""The choice of a compiled program for a plan: the nearest ready one that covers its needs."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serve_drafts import few_programs
from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.config.shared_prefixes import UNIT, SharedPrefix, SharingLimits
from jspec.engine.plan_runner import ReadyPrograms
from jspec.engine.programs.program_keys import (
    later_programs,
    nearest_program,
    program_keys,
    programs_at_start,
    programs_on_demand,
    ready_shapes,
)
from jspec.engine.resolving import FEW_PROGRAMS, prefill_buckets
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import InvariantError
from jspec.messages.plan import RowRef, StepKind, StepPlan, StepRun
from jspec.messages.step_options import ALL, PLAIN, SAMPLING, StepOption, StepOptions
from jspec.scheduler.decode_planner import CUT
from tests.support.flat_limits import flat_limits, with_limits
from tests.support.plans import plan_of
from tests.support.programs import programs_of

FILTERS = StepOptions(frozenset({StepOption.FILTERS}))
PENALTIES = StepOptions(frozenset({StepOption.PENALTIES}))
SUBSETS = [
    StepOptions(frozenset(members))
    for n in range(len(ALL) + 1)
    for members in itertools.combinations(ALL, n)
]
KINDS = st.sampled_from([StepKind.PREFILL, StepKind.DECODE])  # of plans
SMALL = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=1, topk=1, num_draft_tokens=2)
SHAPES = st.sampled_from([None, None, SpeculativeConfig.plain(), SMALL])
KEYS = st.builds(ProgramKey, KINDS, st.integers(1, 9), st.sampled_from(SUBSETS), SHAPES)


def decode(bucket: int, options: StepOptions) -> ProgramKey:
    return ProgramKey(StepKind.DECODE, bucket, options)


def can_run(key: ProgramKey, needed: ProgramKey) -> bool:
    return (
        key.kind is needed.kind
        and key.shape == needed.shape
        and key.bucket >= needed.bucket
        and set(key.options) >= set(needed.options)
    )


@given(needed=KEYS, ready=st.lists(KEYS, max_size=12))
def test_the_nearest_program_covers_the_plan_at_the_least_cost(
    needed: ProgramKey, ready: list[ProgramKey]
) -> None:
    fit = [key for key in ready if can_run(key, needed)]
    if not fit:
        with pytest.raises(InvariantError, match="no program is ready for"):
            nearest_program(needed, ready)
        return
    found = nearest_program(needed, ready)
    assert found in fit
    for other in fit:
        assert found.bucket <= other.bucket
        if other.bucket == found.bucket:
            assert len(found.options) <= len(other.options)


def test_a_small_bucket_counts_before_few_features() -> None:
    ready = [decode(8, PLAIN), decode(8, FILTERS), decode(4, ALL), decode(8, ALL)]
    assert nearest_program(decode(3, PLAIN), ready) == decode(4, ALL)
    assert nearest_program(decode(5, PLAIN), ready) == decode(8, PLAIN)
    assert nearest_program(decode(5, FILTERS), ready) == decode(8, FILTERS)
    assert nearest_program(decode(5, PENALTIES), ready) == decode(8, ALL)


def test_the_error_names_what_is_needed_and_what_is_ready() -> None:
    ready = [decode(4, PLAIN), ProgramKey(StepKind.PREFILL, 8, ALL)]
    with pytest.raises(
        InvariantError, match=r"for decode B=3 filters; expected .*'decode B=4', 'prefill T=8 all'"
    ):
        nearest_program(decode(3, FILTERS), ready)


def limits_with(decode: tuple[int, ...], prefill: tuple[int, ...]) -> ServeLimits:
    return flat_limits(
        draft_shape=SpeculativeConfig.plain(),
        num_slots=decode[-1],
        num_pages=64,
        page_size=8,
        context_length=64,
        decode_buckets=decode,
        prefill_buckets=prefill,
        prefill_rows=2,
        prefix_cache=True,
        logprobs=True,
    )


BUCKETS = st.sets(st.integers(1, 12), min_size=1).map(sorted).map(tuple)
H200 = limits_with((1, 2, 4, 8, 16, 32, 48), prefill_buckets(8192, is_cpu=False))
CPU = limits_with((1, 4, 8), (32, 256))


@given(limits=st.builds(limits_with, BUCKETS, BUCKETS))
def test_the_first_programs_serve_every_plan_and_the_later_ones_are_the_rest(
    limits: ServeLimits,
) -> None:
    first, every = programs_at_start(limits, "first"), program_keys(limits)
    largest = {
        StepKind.DECODE: limits.programs.decode_buckets[-1],
        StepKind.PREFILL: limits.programs.prefill_buckets[-1],
    }
    for kind, size in largest.items():
        for needed in (ProgramKey(kind, n, f) for n in (1, size) for f in SUBSETS):
            assert can_run(nearest_program(needed, first[:3]), needed)
    later = later_programs(limits, first)
    assert sorted(map(str, first + later)) == sorted(map(str, every))
    assert later_programs(limits, every) == ()


def test_a_benchmark_of_greedy_requests_compiles_few_programs() -> None:
    """They run every greedy plan; those of one mode are compiled in half a minute on a card."""
    limits = limits_with((1, 8, 32, 64), (768, 1024, 2048, 8192))
    found = few_programs(PLAIN, limits)
    decodes = [f"decode B={size}" for size in (1, 8, 32, 64)]
    prompts = [f"prefill T={size} sampling" for size in (768, 1024, 2048, 8192)]
    assert sorted(map(str, found)) == sorted([*decodes, *prompts, "cached draft prefill T=64"])
    assert nearest_program(decode(9, PLAIN), found) == decode(32, PLAIN)
    sampling = few_programs(SAMPLING, limits)
    assert can_run(nearest_program(decode(9, SAMPLING), sampling), decode(9, SAMPLING))


def test_of_33_programs_seven_come_first_and_a_cpu_waits_for_all() -> None:
    assert [str(key) for key in programs_at_start(H200, "first")] == [
        "cached draft prefill T=64",
        "prefill T=8192 all",
        "decode B=48 all",
        "prefill T=128 sampling",
        "prefill T=8192 sampling",
        "decode B=1",
        "decode B=48",
    ]
    assert programs_at_start(H200, "common") == program_keys(H200)
    assert len(program_keys(H200)) == 33
    assert len(program_keys(CPU)) - 1 == FEW_PROGRAMS  # without the draft prefill of cached tokens
    assert programs_at_start(CPU, "common") == program_keys(CPU)
    assert [str(key) for key in later_programs(CPU, programs_at_start(CPU, "first"))] == [
        "decode B=4",
        "decode B=1 sampling",
        "decode B=4 sampling",
        "decode B=8 sampling",
    ]


def test_powers_of_two_come_before_what_lies_between() -> None:
    later = later_programs(H200, programs_at_start(H200, "first"))
    sizes = [key.bucket for key in later if key.kind is StepKind.PREFILL]
    assert sizes[:6] == [256, 512, 1024, 2048, 4096, 384]


SHARING = with_limits(H200, sharing=SharingLimits(rows_a_pack=4, pays_from=1, least_rows=16))


def test_many_rows_have_programs_that_are_told_of_shared_prefixes_made_last() -> None:
    told = [str(key) for key in program_keys(SHARING) if StepOption.SHARED in key.options]
    assert told == [
        *(f"decode B={size} shared prefixes" for size in (48, 32, 16)),
        *(f"decode B={size} filters+penalties+shared prefixes" for size in (48, 32, 16)),
    ]
    assert [str(key) for key in later_programs(SHARING, programs_at_start(SHARING, "first"))][
        -6:
    ] == told
    assert programs_at_start(SHARING, "common") == program_keys(SHARING)


@pytest.mark.parametrize("rows", [5, 17, 48])
@pytest.mark.parametrize("options", [PLAIN, FILTERS, ALL])
def test_a_plan_with_shared_prefixes_runs_where_it_is_told_if_that_pads_no_more(
    rows: int, options: StepOptions
) -> None:
    refs = tuple(RowRef(slot, 1) for slot in range(1, rows + 1))
    plan = plan_of(StepKind.DECODE, SHARING.draft_shape, options=options, rows=refs)
    shared = dataclasses.replace(plan, shared=tuple(SharedPrefix(0, UNIT) for _ in refs))
    (without,) = programs_of(plan, SHARING)
    assert without == nearest_program(decode(rows, options), program_keys(SHARING))
    assert StepOption.SHARED not in without.options
    (told,) = programs_of(shared, SHARING)
    assert told.bucket == without.bucket
    assert (StepOption.SHARED in told.options) == (rows > 8 and options != ALL)
    assert told.options.covers(without.options)
    assert programs_of(shared, SHARING, program_keys(H200)) == [without]  # not made yet


OWN_KEYS = KEYS.map(lambda key: key._replace(shape=None))  # these are always served


@given(needed=st.lists(OWN_KEYS, max_size=6), added=st.lists(KEYS, max_size=6))
def test_ready_programs_find_the_nearest_after_every_addition(
    needed: list[ProgramKey], added: list[ProgramKey]
) -> None:
    everything = {decode(9, ALL): "a", ProgramKey(StepKind.PREFILL, 9, ALL): "b"}
    programs = ReadyPrograms(everything)
    for key in [None, *added]:
        before = programs
        if key is not None:
            programs = programs.with_program(key, "c")
        for each in needed:
            assert programs.nearest(each) == nearest_program(each, programs.executables)
            assert programs.nearest(each) == programs.nearest(each)
            assert before.nearest(each) in before.executables
    assert everything == {decode(9, ALL): "a", ProgramKey(StepKind.PREFILL, 9, ALL): "b"}


@pytest.mark.parametrize("one", SUBSETS, ids=str)
@pytest.mark.parametrize("other", SUBSETS, ids=str)
def test_features_are_a_set(one: StepOptions, other: StepOptions) -> None:
    both = one.union([other])
    assert set(both) == set(one) | set(other)
    assert both.covers(one)
    assert both.covers(other)
    assert one.covers(other) is (both == one)
    assert ALL.covers(both)
    assert hash(both) == hash(other.union([one]))
    assert pickle.loads(pickle.dumps(both)) == both
    assert list(both) == [feature for feature in StepOption if feature in both]


def test_features_read_alike_in_every_process() -> None:
    """A stored program's name contains this text, but hashes of strings differ by process."""
    code = (
        "from jspec.messages.step_options import ALL, PLAIN; print(repr((ALL, PLAIN, list(ALL))))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert texts == {repr((ALL, PLAIN, list(ALL))) + "\n"}
    assert [str(options) for options in SUBSETS] == [
        "plain",
        "filters",
        "penalties",
        "logprobs",
        "sampling",
        "filters+logprobs",
        "penalties+logprobs",
        "all",
    ]


def test_a_shape_is_ready_where_its_program_pads_no_more_than_the_engines_own() -> None:
    off = SpeculativeConfig.plain()
    limits = with_limits(
        limits_with((1, 4, 8), (32,)),
        draft_shape=SpeculativeConfig(
            algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4
        ),
        other_shapes=(off, SMALL),
    )
    own = [decode(8, ALL), decode(4, PLAIN)]

    def ready(*more: ProgramKey, options: StepOptions = PLAIN) -> str:
        found = ready_shapes(limits, [*own, *more], num_rows=3, options=options)
        return " ".join(map(str, found))

    assert ready() == "3/1/4"
    assert ready(decode(8, PLAIN)._replace(shape=SMALL)) == "3/1/4"
    assert ready(decode(4, PLAIN)._replace(shape=SMALL)) == "1/1/2 3/1/4"
    assert ready(decode(4, PLAIN)._replace(shape=SMALL), options=FILTERS) == "3/1/4"
    plain = decode(4, PLAIN)._replace(shape=off)
    assert ready(plain) == "3/1/4"  # no program would give the drafter its pending tokens
    assert ready(plain, ProgramKey(StepKind.DRAFT_PREFILL, 4, PLAIN)) == "0/1/1 3/1/4"
    first, every = programs_at_start(limits, "common"), program_keys(limits)
    assert all(key.shape is None and key.kind is not StepKind.DRAFT_PREFILL for key in first)
    assert len(set(every)) == len(every) == len(first) + 3 + 2 * 2 * 3
    assert set(later_programs(limits, first)) == set(every) - set(first)
    assert set(every) < set(programs_at_start(limits, "all"))
    assert later_programs(limits, programs_at_start(limits, "all")) == ()


@pytest.mark.parametrize("logprobs", [True, False])
@given(limits=st.builds(limits_with, BUCKETS, BUCKETS), data=st.data())
def test_of_all_there_is_a_program_for_whatever_rows_ask_for_together(
    logprobs: bool, limits: ServeLimits, data: st.DataObject
) -> None:
    limits = with_limits(limits, logprobs=logprobs)
    every = programs_at_start(limits, "all")
    assert len(set(every)) == len(every)
    refused = {StepOption.SHARED} if logprobs else {StepOption.SHARED, StepOption.LOGPROBS}
    asked = StepOptions(data.draw(st.frozensets(st.sampled_from([*set(StepOption) - refused]))))
    tokens = data.draw(st.integers(1, limits.programs.prefill_buckets[-1]))
    rows = data.draw(st.integers(1, limits.programs.decode_buckets[-1]))
    needed = ProgramKey(StepKind.PREFILL, tokens, asked)
    assert can_run(nearest_program(needed, every), needed)
    refs = tuple(RowRef(slot, 1) for slot in range(1, rows + 1))
    kinds = CUT if StepOption.GRAMMAR in asked else (StepKind.DECODE,)
    runs = tuple(StepRun(kind, limits.draft_shape) for kind in kinds)
    keys = programs_of(StepPlan(step=1, runs=runs, options=asked, rows=refs), limits, every)
    assert keys[-1].options.covers(asked)
    assert {key.bucket for key in keys} == {keys[-1].bucket}
    if len(keys) > 1:  # SCORE outputs hidden states exactly if SETTLE reads them
        assert set(keys[1].options) == {StepOption.HIDDEN} & set(keys[2].options)
    assert not set(programs_on_demand(limits, asked)) - set(every)  # a request waits for no program

"""Speculative decoding equals plain decoding, token for token, in float32.

A covering array: every pair of settings meets in some case. Every case drafts with the dial
drafter and proves that it exercised what it claims to: each count from 0 to S was accepted, and in
a tree some accepted path ran through a later child while rows of one batch accepted differently.
A few of the cases, which together show every value of every setting, are fast; the others are slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING, StepOptions
from tests.speculative.covering import all_pairs, covering_array, every_level, pairs_of
from tests.speculative.engines import (
    DIAL_ACCEPTANCE,
    NUM_SLOTS,
    Served,
    build,
    dial_for,
    engine,
    make_request,
    plain_ids,
    serve,
    spec_of,
)
from tests.support.dial_drafter import dial_rank

SPECS = ((1, 1, 2), (3, 1, 4), (5, 1, 6), (1, 3, 4), (2, 2, 4), (3, 4, 16), (4, 3, 20))
FACTORS: dict[str, tuple[Any, ...]] = {
    "spec": SPECS,
    "page_size": (1, 16, 64),
    "batch": (1, 2, 5, 8),
    "chunk": (5, 8, 32),
    "depth": (0, 1, 2),
    "temperature": (0.0, 1.0),
    "filters": ("none", "top_k_top_p", "min_p"),
    "penalty": (False, True),
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k_top_p": {"top_k": 40, "top_p": 0.9},
    "min_p": {"min_p": 0.02},
}
MIXED = ((3, 1, 4), (2, 2, 4))  # where CI mixes all samplings
TOKENS_PER_CASE, FAST_TOKENS = 400, 240


@dataclass(frozen=True)
class Case:
    """One setting of every factor."""

    spec: tuple[int, int, int]
    page_size: int
    batch: int
    chunk: int
    depth: int
    temperature: float
    filters: str
    penalty: bool

    @property
    def name(self) -> str:
        s, k, n = self.spec
        return (
            f"{s}-{k}-{n}_p{self.page_size}_b{self.batch}_c{self.chunk}_d{self.depth}"
            f"_t{self.temperature:g}_{self.filters}{'_pen' if self.penalty else ''}"
        )


CASES = sorted(
    (Case(**case) for case in covering_array(FACTORS)),
    key=lambda case: (case.spec, case.page_size),
)
FAST = [
    Case(**case)
    for case in every_level([vars(case) for case in CASES], engine=("spec", "page_size"))
]


def requests_of(case: Case, num_tokens: int) -> list[Request]:
    """Prompts of unequal lengths; the batch together generates num_tokens or so."""
    new_tokens = min(num_tokens // case.batch, 265)
    sampling: dict[str, Any] = dict(FILTERS[case.filters])
    if case.penalty:
        sampling |= {"frequency_penalty": 0.4, "presence_penalty": 0.3}
    lengths = (11, 3, 40, 1, 17, 29, 8, 23)
    return [
        make_request(
            i,
            prompt_len=lengths[i],
            seed=1000 * case.batch + i + 31,
            temperature=case.temperature,
            max_new_tokens=new_tokens - 3 * i,
            ignore_eos=True,
            **sampling,
        )
        for i in range(case.batch)
    ]


def later_child_accepted(case: Case, requests: list[Request], served: Served) -> bool:
    """Whether some accepted draft was not its parent's first child.

    With K > 1 the dial puts the true token at a rank of its own at each position; an accepted
    draft at a position of rank > 0 went through a later child.
    """
    _, topk, _ = case.spec
    for request, steps in zip(requests, served.accepted, strict=True):
        position = len(request.prompt_ids) + 1
        ranks = np.asarray(
            dial_rank(
                np.uint32(request.seed & 0xFFFFFFFF),
                np.arange(len(request.prompt_ids) + sum(steps) + len(steps) + 1),
                topk=topk,
                acceptance=DIAL_ACCEPTANCE,
            )
        )
        for num_accepted in steps:
            if any(0 < ranks[position + d] < topk for d in range(num_accepted)):
                return True
            position += num_accepted + 1
    return False


def check(case: Case, num_tokens: int = TOKENS_PER_CASE) -> None:
    requests = requests_of(case, num_tokens)
    expected = [plain_ids(request) for request in requests]
    needed = requests[0].sampling.options
    served = serve(
        engine(case.spec, case.page_size, options=SAMPLING if needed else StepOptions()),
        requests,
        chunk_size=case.chunk,
        overlap_depth=case.depth,
        num_slots=max(case.batch, 1),
        dial=dial_for(requests, expected),
    )
    assert list(served.ids) == expected
    assert served.num_leaked_pages == 0
    histogram = served.counters.accept_histogram
    assert all(histogram), f"accepted counts {histogram}; expected each from 0 to S"
    if case.spec[1] > 1 and case.batch > 1:
        assert later_child_accepted(case, requests, served)
        assert any(len(set(counts)) > 1 for counts in served.accepted_together)


@pytest.mark.slow_cases("1-1-2", "1-3-4", "2-2-4", "3-1-4", "3-4-16_p1", "4-3-20", "5-1-6")
@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_speculative_equals_plain(case: Case) -> None:
    check(case, FAST_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if i % 4 else ())
        for i, case in enumerate(each for each in CASES if each not in FAST)
    ],
)
def test_speculative_equals_plain_in_the_rest_of_the_array(case: Case) -> None:
    check(case)


def every_sampling() -> list[dict[str, Any]]:
    """Each temperature with each filter, with and without penalties."""
    return [
        {
            "temperature": temperature,
            **FILTERS[filters],
            **({"frequency_penalty": 0.4, "presence_penalty": 0.3} if penalty else {}),
        }
        for temperature in FACTORS["temperature"]
        for filters in FACTORS["filters"]
        for penalty in FACTORS["penalty"]
    ]


def groups_of(size: int) -> list[list[Request]]:
    """All samplings, `size` requests at a time, with prompts of unequal lengths."""
    requests = [
        make_request(
            i,
            prompt_len=(11, 3, 40, 1, 17, 29, 8, 23)[i % 8],
            seed=7000 + i,
            max_new_tokens=40 - 2 * (i % 8),
            ignore_eos=True,
            **sampling,
        )
        for i, sampling in enumerate(every_sampling())
    ]
    return [
        [requests[(start + k) % len(requests)] for k in range(size)]
        for start in range(0, len(requests), size)
    ]


def batches_chunks_and_depths(shift: int) -> list[tuple[int, int, int]]:
    """A Latin square: any two of them meet; three shifts are all triples."""
    depths = FACTORS["depth"]
    return [
        (batch, chunk, depths[(i + j + shift) % len(depths)])
        for i, batch in enumerate(FACTORS["batch"])
        for j, chunk in enumerate(FACTORS["chunk"])
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=str(spec), marks=() if spec in MIXED else pytest.mark.exhaustive)
        for spec in SPECS
    ],
)
def test_samplings_mixed_in_a_batch(spec: tuple[int, int, int]) -> None:
    """Every sampling with every batch size, chunk and depth; page sizes by turns."""
    shift = SPECS.index(spec)
    page_size = FACTORS["page_size"][shift % 3]
    compiled = build(spec_of(*spec), page_size=page_size)
    histogram = np.zeros(spec[0] + 1, int)
    for batch, chunk, depth in batches_chunks_and_depths(shift):
        for requests in groups_of(batch):
            expected = [plain_ids(request) for request in requests]
            served = serve(
                compiled,
                requests,
                chunk_size=chunk,
                overlap_depth=depth,
                num_slots=batch,
                dial=dial_for(requests, expected),
            )
            assert list(served.ids) == expected, (batch, chunk, depth)
            assert served.num_leaked_pages == 0
            histogram += np.asarray(served.counters.accept_histogram)
    assert histogram.all(), f"accepted counts {histogram}; expected each from 0 to S"


def test_the_covering_array_covers_every_pair_and_stays_small() -> None:
    assert set().union(*(pairs_of(vars(case)) for case in CASES)) == all_pairs(FACTORS)
    assert len(CASES) <= 60
    assert set().union(*(vars(case).items() for case in FAST)) == {
        (name, level) for name, levels in FACTORS.items() for level in levels
    }
    assert len(FAST) <= 10
    assert len({(case.spec, case.page_size) for case in FAST}) == len(SPECS)
    assert max(FACTORS["batch"]) == NUM_SLOTS

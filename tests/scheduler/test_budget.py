"""Page arithmetic: the module's worked example, and the laws that keep a lone sequence running."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import ServeLimits
from jspec.errors import RequestError
from jspec.scheduler.pages import budget
from jspec.spec import indexing
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits

EXAMPLE = small_limits(steps_topk_nodes=(3, 1, 4), page_size=4, num_pages=6)
THREE_ROUNDS = with_limits(EXAMPLE, num_rounds=3)
FAR = 1000  # `last` of a sequence that does not end soon


def test_worked_example() -> None:
    assert EXAMPLE.max_total_tokens == 20
    assert budget.pages_for_admission(EXAMPLE, 10, num_tokens_left=12) == 4
    assert budget.pages_for_decode(EXAMPLE, 10, unread_tokens=0, last=FAR) == 4
    assert budget.pages_for_decode(EXAMPLE, 10, unread_tokens=4, last=FAR) == 5
    assert budget.clip_max_new_tokens(EXAMPLE, 10, 100) == 11


def test_worked_example_of_three_rounds() -> None:
    assert budget.pages_for_decode(THREE_ROUNDS, 10, unread_tokens=0, last=FAR) == 6
    last = budget.last_committed(10, 5)
    assert last == 13
    assert budget.pages_for_decode(THREE_ROUNDS, 10, unread_tokens=0, last=last) == 5
    assert budget.pages_for_admission(THREE_ROUNDS, 10, num_tokens_left=5) == 5
    # Unread rounds may all emit M; the first of this step after them is reserved for in full.
    assert budget.pages_for_decode(THREE_ROUNDS, 10, unread_tokens=12, last=last) == 7


@pytest.mark.parametrize("most", [None, 5, 100])
def test_rounds_never_shorten_what_may_be_asked_for(most: int | None) -> None:
    limits = with_limits(EXAMPLE, context_length=200)
    clipped = budget.clip_max_new_tokens(limits, 10, most)
    assert budget.clip_max_new_tokens(with_limits(limits, num_rounds=9), 10, most) == clipped


def test_the_last_token_needs_no_scratch() -> None:
    assert budget.pages_for_admission(EXAMPLE, 20, num_tokens_left=1) == 5
    assert budget.clip_max_new_tokens(EXAMPLE, 20, 100) == 1


def test_max_new_tokens_beyond_the_context_is_refused_and_the_default_is_clipped() -> None:
    limits = small_limits(context_length=32)
    assert [budget.clip_max_new_tokens(limits, 30, most) for most in (1, 2)] == [1, 2]
    with pytest.raises(
        RequestError, match=r"^max_new_tokens is 3 .* 30 tokens; expected at most 2"
    ):
        budget.clip_max_new_tokens(limits, 30, 3)
    assert budget.clip_max_new_tokens(limits, 30, None) == 2
    assert budget.clip_max_new_tokens(small_limits(num_pages=1000), 10, None) == 118
    roomy = small_limits(context_length=500, num_pages=1000)
    assert budget.clip_max_new_tokens(roomy, 10, None) == 128


@pytest.mark.parametrize(
    ("limits", "prompt_len", "message"),
    [
        (EXAMPLE, 0, "0 tokens"),
        (EXAMPLE, 21, "at most 20"),
        (small_limits(context_length=32), 32, "context length is 32"),
    ],
)
def test_what_can_never_run_is_refused(limits: ServeLimits, prompt_len: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        budget.clip_max_new_tokens(limits, prompt_len, 5)


# Keyword arguments of small_limits: dataclasses are built in the tests, not while data is drawn.
LIMITS = st.fixed_dictionaries(
    {
        "steps_topk_nodes": st.sampled_from([(0, 1, 1), (3, 1, 4), (2, 2, 4), (3, 4, 16)]),
        "page_size": st.sampled_from([1, 4, 16, 64]),
        "num_pages": st.integers(40, 80),
        "overlap_depth": st.integers(0, 2),
        "num_rounds": st.integers(1, 5),
    }
)


@given(knobs=LIMITS, prompt_len=st.integers(1, 127), wanted=st.integers(1, 200))
def test_a_lone_sequence_can_always_go_on_with_nothing_unread(
    knobs: dict[str, Any], prompt_len: int, wanted: int
) -> None:
    limits = small_limits(**knobs)
    if prompt_len > limits.max_total_tokens:
        return
    if prompt_len + wanted > limits.pool.context_length:
        with pytest.raises(RequestError, match="maximum context length is 128"):
            budget.clip_max_new_tokens(limits, prompt_len, wanted)
        return
    most = budget.clip_max_new_tokens(limits, prompt_len, wanted)
    last = budget.last_committed(prompt_len, most)
    assert 1 <= most <= wanted
    assert prompt_len + most <= limits.pool.context_length
    for num_out in range(most):
        fill_len, left = prompt_len + num_out, most - num_out
        pages = budget.pages_for_admission(limits, fill_len, num_tokens_left=left)
        assert pages <= limits.pool.num_pages
        if left > 1:  # the decode after this prefill, and every later one, starts within `last`
            assert fill_len <= last
            needed = budget.pages_for_decode(limits, fill_len, unread_tokens=0, last=last)
            assert needed == pages
            # Never more than what its last useful round needs.
            positions = last + limits.draft_shape.num_scratch_slots
            assert needed <= indexing.num_pages(positions, limits.pool.page_size)


@given(
    knobs=LIMITS, committed=st.integers(1, 126), unread=st.integers(0, 2), last=st.integers(1, 126)
)
def test_growth_of_one_step_fits_the_grants_and_the_table(
    knobs: dict[str, Any], committed: int, unread: int, last: int
) -> None:
    limits = small_limits(**knobs)
    if unread > limits.scheduling.overlap_depth:
        return
    before, after = (
        budget.pages_for_decode(
            limits,
            committed,
            unread_tokens=steps * limits.scheduling.num_rounds * limits.draft_shape.max_emitted,
            last=last,
        )
        for steps in (unread, unread + 1)
    )
    assert 0 <= after - before <= limits.grants_per_row
    assert min(before, limits.pool.num_pages) <= limits.pages_per_row  # a row never owns more


@given(knobs=LIMITS, committed=st.integers(1, 126), last=st.integers(1, 126))
def test_headroom_never_asks_for_less_than_the_next_step_or_more_than_the_end(
    knobs: dict[str, Any], committed: int, last: int
) -> None:
    limits = small_limits(**knobs)
    ahead = budget.pages_ahead(limits, committed, last=last)
    end = max(committed, last)
    assert ahead >= budget.pages_for_decode(limits, committed, unread_tokens=0, last=last)
    assert ahead <= budget.pages_for_decode(limits, end, unread_tokens=0, last=last)


@given(
    knobs=LIMITS, committed=st.integers(1, 126), unread=st.integers(0, 10), last=st.integers(1, 126)
)
def test_every_useful_round_is_reserved_for_and_one_round_is_as_ever(
    knobs: dict[str, Any], committed: int, unread: int, last: int
) -> None:
    limits = small_limits(**knobs)
    most, size = limits.draft_shape.max_emitted, limits.pool.page_size
    ahead = unread * most
    owned = size * budget.pages_for_decode(limits, committed, unread_tokens=ahead, last=last)
    for later in range(limits.scheduling.num_rounds):
        start = committed + (unread + later) * most
        if later == 0 or start <= last:
            assert start + limits.draft_shape.num_scratch_slots <= owned
        else:  # it starts at most here; it is useful if it starts at `last` or before
            assert last + limits.draft_shape.num_scratch_slots <= owned
    single = small_limits(**{**knobs, "num_rounds": 1})
    alone = budget.pages_for_decode(single, committed, unread_tokens=ahead, last=last)
    reserved = single.draft_shape.reserved_tokens(committed, unread_rounds=unread)
    assert alone == indexing.num_pages(reserved, size)

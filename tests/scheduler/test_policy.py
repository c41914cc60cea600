"""Admission, packing and victims, on sequences built by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.messages.plan import RowRef
from jspec.messages.request import Request, SamplingParams
from jspec.scheduler import policy
from jspec.scheduler.outputs.token_history import TokenHistory
from jspec.scheduler.pages.page_space import RowPages
from jspec.scheduler.row_table import RowTable
from jspec.scheduler.sequence import Sequence, SequenceState, Tenancy
from tests.support.fake_runner import small_limits
from tests.support.fake_text import FakeTextStream
from tests.support.flat_limits import with_limits

LIMITS = small_limits(page_size=4, chunk_size=8, prefill_rows=2)


def make_sequence(prompt_len: int, *, max_new_tokens: int = 100, arrival: int = 0) -> Sequence:
    request = Request(
        request_id=f"r{arrival}",
        prompt_ids=tuple(range(100, 100 + prompt_len)),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=0,
    )
    return Sequence(
        request=request,
        arrival=arrival,
        max_new_tokens=max_new_tokens,
        text_stream=FakeTextStream(),
        history=TokenHistory(request, LIMITS.draft_shape, stream=None),
    )


def seat(sequence: Sequence, *, num_filled: int = 0, num_pages: int = 0) -> Tenancy:
    tenancy = Tenancy.begin(RowRef(sequence.arrival + 1, 1), sequence, RowTable.empty(LIMITS))
    tenancy.pages = (RowPages(num_pages, pages=list(range(1, num_pages + 1))),)
    tenancy.num_filled = num_filled
    sequence.tenancy = tenancy
    is_filled = num_filled == len(tenancy.fill_ids)
    sequence.state = SequenceState.RUNNING if is_filled else SequenceState.PREFILLING
    return tenancy


GPU = with_limits(
    small_limits(num_slots=64, num_pages=4096, context_length=9000, prefill_rows=16),
    prefill_buckets=(*range(128, 1025, 128), 1536, 2048, 3072, 4096, 8192),
    prefill_budget=2048,
)


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_decoding", "since_decode", "expected"),
    [
        (1, 8000, 0, 0, 8192),  # alone a prompt is not cut
        (1, 8000, 1, 0, 2048),  # while rows decode it is
        (1, 8000, 1, 2048, 0),  # and then it is their turn
        (1, 700, 40, 700, 1348),  # the rest of the budget
        (1, 8000, 40, 700, 1024),  # the part of it without padding
        (1, 700, 40, 1900, 0),  # scraps
        (2, 1500, 40, 0, 1024),  # the first of two does not wait for the second
        (5, 3800, 40, 1024, 1024),
        (5, 3800, 40, 2048, 0),
        (
            11,
            8000,
            20,
            2048,
            4096,
        ),  # four budgets, 8 * 10 / 20, in steps of half of the waiting tokens
        (11, 8000, 20, 4 * 2048, 0),
        (60, 46_000, 4, 0, 8192),  # twelve budgets at most
        (60, 46_000, 4, 12 * 2048, 0),
        (60, 46_000, 0, 99_999, 8192),
    ],
)
def test_the_room_of_a_prefill(
    num_rows: int, num_tokens: int, num_decoding: int, since_decode: int, expected: int
) -> None:
    unfilled = policy.Unfilled(num_rows=num_rows, num_tokens=num_tokens)
    room = policy.prefill_room(GPU, unfilled, num_decoding=num_decoding, since_decode=since_decode)
    assert room == expected


@given(
    buckets=st.sets(st.integers(1, 40), min_size=1).map(sorted).map(tuple),
    budget=st.integers(0, 60),
    num_rows=st.integers(1, 9),
    more_tokens=st.integers(0, 90),
    num_decoding=st.integers(0, 9),
    since_decode=st.integers(0, 99),
)
def test_every_prompt_gets_its_turn_and_no_step_is_too_large(
    buckets: tuple[int, ...],
    budget: int,
    num_rows: int,
    more_tokens: int,
    num_decoding: int,
    since_decode: int,
) -> None:
    limits = with_limits(GPU, prefill_buckets=buckets, prefill_budget=budget)
    unfilled = policy.Unfilled(num_rows=num_rows, num_tokens=num_rows + more_tokens)

    def room(since: int) -> int:
        return policy.prefill_room(limits, unfilled, num_decoding=num_decoding, since_decode=since)

    assert 0 <= room(since_decode) <= limits.programs.chunk_size
    assert room(0) > 0
    if num_decoding:
        most = policy.MOST_SHARES * limits.scheduling.prefill_budget
        assert since_decode + room(since_decode) <= most or not room(since_decode)
        assert room(most) == 0


def test_packing_the_worked_example() -> None:
    packer = policy.ChunkPacker(LIMITS.programs, 8, num_rows=1, num_tokens=5)
    chunk = packer.pack(seat(make_sequence(10), num_filled=4))
    assert (chunk.start, chunk.token_ids, chunk.next_id) == (4, (104, 105, 106), 107)
    assert not packer.has_room


def test_the_final_chunk_has_no_next_id() -> None:
    packer = policy.ChunkPacker(LIMITS.programs, 8)
    chunk = packer.pack(seat(make_sequence(5), num_filled=2))
    assert (chunk.start, chunk.token_ids, chunk.next_id) == (2, (102, 103, 104), None)
    assert packer.has_room


def test_a_prefill_is_full_by_rows_too() -> None:
    packer = policy.ChunkPacker(LIMITS.programs, 8)
    packer.pack(seat(make_sequence(1)))
    packer.pack(seat(make_sequence(1)))
    assert not packer.has_room


def test_alone_a_newcomer_needs_its_first_decode_only() -> None:
    newcomer = make_sequence(8)  # 8 + 4 positions: 3 pages
    assert policy.may_admit(LIMITS, newcomer, (), num_free_pages=3)
    assert not policy.may_admit(LIMITS, newcomer, (), num_free_pages=2)


def test_beside_others_a_newcomer_leaves_their_headroom() -> None:
    # Headroom is 9 rounds of 4 tokens, depth 1 included. The newcomer: 8 + 36 + 4 positions, 12
    # pages. The other, at 8 with 5 pages: 12 - 5 = 7 more.
    newcomer, other = make_sequence(8, arrival=1), make_sequence(8)
    seat(other, num_filled=8, num_pages=5)
    assert policy.may_admit(LIMITS, newcomer, (other,), num_free_pages=19)
    assert not policy.may_admit(LIMITS, newcomer, (other,), num_free_pages=18)


def test_headroom_ends_where_the_sequence_ends() -> None:
    # max_new_tokens 2: the last decode starts at L = 8 and needs 12 positions, 3 pages.
    newcomer, other = (
        make_sequence(8, max_new_tokens=2, arrival=1),
        make_sequence(8, max_new_tokens=2),
    )
    seat(other, num_filled=8, num_pages=3)
    assert policy.may_admit(LIMITS, newcomer, (other,), num_free_pages=3)


def test_the_newest_gives_way() -> None:
    sequences = [make_sequence(4, arrival=arrival) for arrival in (2, 7, 5)]
    assert policy.choose_victim(LIMITS.scheduling, sequences) is sequences[1]

"""The cut: stop string, then stop token, then length, in one place, whatever the steps were."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import SpeculativeConfig
from jspec.messages.protocols import TextCut
from jspec.messages.request import FinishKind, FinishReason, Request, SamplingParams, SpecCounters
from jspec.scheduler.outputs.token_history import Tally, TokenHistory, surviving_drafts
from jspec.scheduler.sequence import Sequence, first_stop
from tests.support.fake_runner import scripted_tokens, small_limits
from tests.support.fake_text import FakeTextStream, expected_output, ids_of, text_of

CHAIN = small_limits(steps_topk_nodes=(3, 1, 4)).draft_shape
EOS = ids_of("z")


def make_sequence(sampling: SamplingParams, *, max_new_tokens: int | None = None) -> Sequence:
    request = Request(
        request_id="r", prompt_ids=(1, 2, 3), sampling=sampling, seed=1, eos_token_ids=EOS
    )
    return Sequence(
        request=request,
        arrival=0,
        max_new_tokens=max_new_tokens or sampling.wanted_tokens,
        text_stream=FakeTextStream.for_request(request),
        history=TokenHistory(request, CHAIN, stream=None),
    )


def stop_at(matched: str | int) -> FinishReason:
    return FinishReason(kind=FinishKind.STOP, matched=matched)


def length(count: int) -> FinishReason:
    return FinishReason(kind=FinishKind.LENGTH, length=count)


Z = EOS[0]
# name, sampling, steps, ids kept of the last step, whole text, finish
CUTS = [
    ("nothing ends", {}, ["ab", "cd"], "cd", "abcd", None),
    ("eos alone", {}, ["ab", "z"], "z", "ab", stop_at(Z)),
    ("eos inside a step", {}, ["a", "bzcd"], "bz", "ab", stop_at(Z)),
    ("eos first", {}, ["zabc"], "z", "", stop_at(Z)),
    ("eos is ignored", {"ignore_eos": True}, ["azbc"], "azbc", "azbc", None),
    ("stop token", {"stop_token_ids": (2,)}, ["abcd"], "abc", "ab", stop_at(2)),
    ("first of two stop tokens", {"stop_token_ids": (2,)}, ["azcd"], "az", "a", stop_at(Z)),
    ("length at the end of a step", {"max_new_tokens": 4}, ["ab", "cd"], "cd", "abcd", length(4)),
    ("length inside a step", {"max_new_tokens": 3}, ["ab", "cdef"], "c", "abc", length(3)),
    ("eos on the last token allowed", {"max_new_tokens": 3}, ["ab", "zc"], "z", "ab", stop_at(Z)),
    ("eos past the length", {"max_new_tokens": 3}, ["ab", "cz"], "c", "abc", length(3)),
    ("stop string in one step", {"stop": ("cd",)}, ["abcdef"], "abcd", "ab", stop_at("cd")),
    (
        "stop string across steps",
        {"stop": ("cde",)},
        ["abc", "d", "efg"],
        "e",
        "ab",
        stop_at("cde"),
    ),
    ("half a stop string is held back", {"stop": ("cde",)}, ["abcd"], "abcd", "ab", None),
    ("then given back", {"stop": ("cde",)}, ["abcd", "x"], "x", "abcdx", None),
    (
        "held-back text at the length",
        {"stop": ("cde",), "max_new_tokens": 4},
        ["abcd"],
        "abcd",
        "abcd",
        length(4),
    ),
    ("held-back text at eos", {"stop": ("cde",)}, ["abcdz"], "abcdz", "abcd", stop_at(Z)),
    (
        "stop string on the last token allowed",
        {"stop": ("cd",), "max_new_tokens": 4},
        ["abcdef"],
        "abcd",
        "ab",
        stop_at("cd"),
    ),
    ("stop string before eos", {"stop": ("ab",)}, ["xabz"], "xab", "x", stop_at("ab")),
    ("eos before stop string", {"stop": ("ab",)}, ["xzab"], "xz", "x", stop_at(Z)),
    ("stop string that names eos", {"stop": ("bz",)}, ["abz"], "abz", "ab", stop_at(Z)),
    (
        "eos among the first tokens",
        {"min_new_tokens": 3},
        ["az", "zbzc"],
        "zbz",
        "azzb",
        stop_at(Z),
    ),
    ("eos right after the first tokens", {"min_new_tokens": 2}, ["abzc"], "abz", "ab", stop_at(Z)),
    (
        "stop string among the first tokens",
        {"min_new_tokens": 2, "stop": ("ab",)},
        ["abab"],
        "abab",
        "ab",
        stop_at("ab"),
    ),
    (
        "length before the minimum",
        {"min_new_tokens": 3, "max_new_tokens": 3},
        ["zz", "zz"],
        "z",
        "zzz",
        length(3),
    ),
]


@pytest.mark.parametrize(
    ("sampling", "steps", "kept", "text", "finish"), [c[1:] for c in CUTS], ids=[c[0] for c in CUTS]
)
def test_cut(
    sampling: dict[str, object],
    steps: list[str],
    kept: str,
    text: str,
    finish: FinishReason | None,
) -> None:
    sequence = make_sequence(SamplingParams.from_mapping(sampling))
    cuts = [sequence.absorb(ids_of(step)) for step in steps]
    assert [cut.finish for cut in cuts[:-1]] == [None] * (len(cuts) - 1)
    assert text_of(cuts[-1].ids) == kept
    assert "".join(cut.text or "" for cut in cuts) == text
    assert cuts[-1].finish == finish
    assert sequence.emitted_ids == [token_id for cut in cuts for token_id in cut.ids]


SAMPLINGS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 12),
        "min_new_tokens": st.integers(0, 6),
        "stop": st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 3), max_size=1),
        "ignore_eos": st.booleans(),
    }
)


@given(
    knobs=SAMPLINGS,
    script=st.lists(st.sampled_from(ids_of("abcdz")), min_size=12, max_size=12),
    lens=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_the_cut_does_not_depend_on_the_steps(
    knobs: dict[str, Any], script: list[int], lens: list[int]
) -> None:
    low = min(knobs["min_new_tokens"], knobs["max_new_tokens"])
    sampling = SamplingParams.from_mapping({**knobs, "min_new_tokens": low})
    sequence = make_sequence(sampling)
    token_at = scripted_tokens({"r": tuple(script)})
    expected = expected_output(sequence.request, token_at, max_new_tokens=sampling.wanted_tokens)
    rest, text = script, ""
    for step_len in lens:
        cut = sequence.absorb(tuple(rest[:step_len]))
        rest, text = rest[step_len:], text + (cut.text or "")
        if cut.finish is not None:
            break
    assert tuple(sequence.emitted_ids) == expected.ids
    assert text == expected.text
    assert cut.finish == expected.finish


class LateStream:
    """Text that becomes final only at the flush, like a run of byte tokens; stops at "b"."""

    def watch(self) -> None:
        pass

    def __init__(self) -> None:
        self._text = ""
        self.matched: str | None = None

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        self._text += text_of(ids) if allow_stop else ""
        return TextCut(num_ids=len(ids), text="")

    def flush(self) -> str:
        text, stop, _ = self._text.partition("b")
        self.matched = stop or None
        return text


@pytest.mark.parametrize(
    ("steps", "kept", "text", "finish"),
    [
        (["ab", "cd"], "cd", "a", stop_at("b")),  # the length ends it, on the 4th token
        (["ab", "cz"], "c", "a", stop_at("b")),  # EOS ends it, and is not kept after a stop string
        (["ab", "z"], "", "a", stop_at("b")),
        (["ac", "dz"], "dz", "acd", stop_at(Z)),
        (["ac", "de"], "de", "acde", length(4)),
    ],
)
def test_a_stop_string_that_the_flush_completes_is_a_stop(
    steps: list[str], kept: str, text: str, finish: FinishReason
) -> None:
    sampling = SamplingParams(max_new_tokens=4)
    sequence = dataclasses.replace(make_sequence(sampling), text_stream=LateStream())
    cuts = [sequence.absorb(ids_of(step)) for step in steps]
    assert "".join(cut.text or "" for cut in cuts) == text
    assert text_of(cuts[-1].ids) == kept
    assert cuts[-1].finish == finish
    assert text_of(tuple(sequence.emitted_ids)) == "".join(steps[:-1]) + kept


@pytest.mark.parametrize(
    ("ids", "begin", "expected"),
    [((5, 9, 9), 0, 1), ((5, 9, 9), 1, 1), ((5, 9, 9), 2, 2), ((5, 9, 9), 3, 3), ((5, 9), -4, 1)],
)
def test_first_stop(ids: tuple[int, ...], begin: int, expected: int) -> None:
    assert first_stop(ids, (9).__eq__, begin=begin) == expected


@pytest.mark.parametrize(
    ("num_emitted", "num_kept", "expected"), [(1, 1, 0), (3, 3, 2), (3, 2, 2), (3, 1, 1), (4, 4, 3)]
)
def test_surviving_drafts(num_emitted: int, num_kept: int, expected: int) -> None:
    assert surviving_drafts(num_emitted, num_kept) == expected


def test_a_truncated_verification_is_counted_but_not_in_the_acceptance_length() -> None:
    tally = Tally(CHAIN)
    tally.add(num_emitted=4, num_kept=4)
    tally.add(num_emitted=1, num_kept=1)
    tally.add(num_emitted=4, num_kept=2)
    counters = tally.counters
    assert counters == SpecCounters(
        verify_ct=3,
        num_accepted=3 + 0 + 2,
        num_proposed=9,
        accept_histogram=(1, 0, 1, 1),
        full_verify_ct=2,
        full_num_emitted=5,
    )
    assert counters.acceptance_length == 2.5


def test_plain_decoding_counts_no_verification() -> None:
    tally = Tally(SpeculativeConfig.plain())
    tally.add(num_emitted=1, num_kept=1)
    tally.add_whole([0, 5])
    assert tally.counters == SpecCounters()


def test_whole_verifications_count_as_one_by_one() -> None:
    one_by_one, at_once = Tally(CHAIN), Tally(CHAIN)
    for num_emitted in (1, 4, 4, 2):
        one_by_one.add(num_emitted=num_emitted, num_kept=num_emitted)
    at_once.add_whole([0, 1, 1, 0, 2])
    assert at_once.counters == one_by_one.counters


def test_a_step_may_say_how_many_drafts_it_verified() -> None:
    one_by_one, at_once = Tally(CHAIN), Tally(CHAIN)
    for num_emitted in (1, 3, 2):
        one_by_one.add(num_emitted=num_emitted, num_kept=num_emitted, num_proposed=2)
    at_once.add_whole([0, 1, 1, 1], num_proposed=2)
    assert at_once.counters == one_by_one.counters
    assert at_once.counters.num_proposed == 6


def test_a_plain_step_is_no_verification() -> None:
    tally = Tally(CHAIN)
    tally.add(num_emitted=1, num_kept=1, num_proposed=0)
    tally.add_whole([0, 5], num_proposed=0)
    assert (tally.counters.verify_ct, tally.counters.full_num_emitted) == (0, 0)


def test_the_chunk_reports_the_cut() -> None:
    sequence = make_sequence(SamplingParams(max_new_tokens=3))
    chunk = sequence.piece(sequence.absorb(ids_of("abcd")), num_emitted=4).chunk()
    assert dataclasses.asdict(chunk) == {
        "request_id": "r",
        "new_ids": ids_of("abc"),
        "num_accepted": 3,
        "text": "abc",
        "finish": dataclasses.asdict(length(3)),
        "prompt_tokens": 3,
        "num_retractions": 0,
        "cached_tokens": 0,
        "weight_version": "default",
        "counters": {
            "verify_ct": 1,
            "num_accepted": 3,
            "num_proposed": 3,
            "accept_histogram": (0, 0, 0, 1),
            "full_verify_ct": 0,
            "full_num_emitted": 0,
        },
        "logprobs": (),
        "prompt_logprobs": (),
        "hidden_states": (),
        "draft_tree": None,
    }

"""SGLang's speculation fields, calculated by hand."""

from __future__ import annotations

import pytest

from jspec.messages.request import SpecCounters
from jspec.messages.response import spec_fields


def counters(histogram: tuple[int, ...], *, num_cut: int = 0) -> SpecCounters:
    """Return counters of a chain of three drafts; num_cut verifications emitted no bonus token."""
    return SpecCounters(
        verify_ct=sum(histogram),
        num_accepted=sum(depth * count for depth, count in enumerate(histogram)),
        num_proposed=3 * sum(histogram),
        accept_histogram=histogram,
        full_verify_ct=sum(histogram) - num_cut,
    )


def test_an_accept_length_is_completion_tokens_over_verifications() -> None:
    """One prompt token, then verifications of 1, 2 and 4 tokens, the last cut to 3."""
    found = spec_fields(counters((1, 1, 0, 1), num_cut=1), completion_tokens=7)
    assert found["spec_accept_length"] == pytest.approx(7 / 3)
    assert found["spec_accept_rate"] == pytest.approx(4 / 9)


def test_tokens_of_plain_steps_are_no_verification_s() -> None:
    """The counters are equal with 150 plain steps between, which an adaptive engine may run."""
    found = spec_fields(counters((1, 1, 0, 1), num_cut=1), completion_tokens=157)
    assert found["spec_accept_length"] == pytest.approx(7 / 3)
    found = spec_fields(counters((1, 1, 0, 1)), completion_tokens=158)
    assert found["spec_accept_length"] == pytest.approx(8 / 3)

"""Whole steps with the TPU's kernels, run by the interpreter, give plain decoding's tokens.

This covers all of a step on a TPU except the chip itself: prefill, tree attention, compaction and
the gather of the output, with the kernels' own pool layout.
"""

from __future__ import annotations

import pytest

from jspec.messages.step_options import StepOptions
from jspec.pallas_kernels.bundles import OPS
from tests.speculative.engines import build, dial_for, make_request, plain_ids, serve, spec_of

PROMPT_LENS = (19, 1)  # several chunks across a page, none but a root's


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((0, 1, 1), marks=pytest.mark.exhaustive),
        pytest.param((3, 1, 4), marks=pytest.mark.exhaustive),
        (2, 2, 4),
    ],
)
def test_interpreted_tpu_kernels_equal_plain_decoding(shape: tuple[int, int, int]) -> None:
    requests = [
        make_request(i, prompt_len=n, seed=40 + i, max_new_tokens=6, temperature=float(i % 2))
        for i, n in enumerate(PROMPT_LENS)
    ]
    expected = [plain_ids(request) for request in requests]
    ops = OPS["tpu_interpret"]
    compiled = build(spec_of(*shape), page_size=16, variants=(StepOptions(),), ops=ops)
    dial = dial_for(requests, expected) if shape[0] else None
    served = serve(compiled, requests, num_slots=4, dial=dial)
    assert list(served.ids) == expected
    assert served.num_leaked_pages == 0
    if shape[0]:
        assert max(max(counts) for counts in served.accepted) == shape[0]

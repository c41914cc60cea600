"""Each pass of the threshold search on an H200 reads the logits once, and no other large array."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of


@pytest.mark.slow
@needs_cuda_compiler
def test_a_pass_reads_the_logits_alone_on_an_h200() -> None:
    """One operation of the loop reads [B, N, V], and none writes it."""
    output = output_of("tests.sampling.threshold_gpu_compile")
    expected = [f"{v} [(['f32[64,4,{v}]'], [])]" for v in (128_256, 64_128, 151_936)]
    assert output.splitlines() == expected

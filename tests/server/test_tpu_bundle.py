"""The whole server with the TPU's kernels, interpreted, over four devices: all but the chip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.files.checkpoint import load_target
from tests.models.dense_forward import dense_forward
from tests.support.tiny_models import TinyPair, write_tiny_pair

ROOT = Path(__file__).resolve().parents[2]
PROMPT, NUM_NEW = list(range(5, 25)), 5  # as in the server


def most_likely(pair: TinyPair) -> list[int]:
    """Continue the prompt by a dense forward of the whole text for each token."""
    spec = pair.target_config
    params = load_target(pair.target_path, spec, dtype=jnp.float32)
    ids = np.array(PROMPT + [0] * NUM_NEW)
    for at in range(len(PROMPT), len(ids)):
        ids[at] = int(dense_forward(spec, params, ids, aux_layer_ids=())[0][at - 1].argmax())
    return [int(each) for each in ids[len(PROMPT) :]]


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/speculative/test_tpu_kernels.py has the kernels without a server
@pytest.mark.timeout(1200)
def test_a_request_is_answered_by_interpreted_tpu_kernels_over_four_devices(
    tmp_path: Path,
) -> None:
    """Plain, chain and tree give the text of a dense forward, and every program has kernels."""
    pair = write_tiny_pair(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.tpu_bundle_server", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_tpu_bundle"]
    assert all(found["with_kernels"].values()), found["with_kernels"]
    assert len(found["with_kernels"]) == 4  # prompts; plain, chain and tree
    assert list(found["texts"]) == ["0/1/1", "1/1/2", "1/2/3"]
    assert set(map(tuple, found["texts"].values())) == {tuple(most_likely(pair))}

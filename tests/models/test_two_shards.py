"""Two shards give the logits of one, for every family.

The golden logits are those of transformers, which one shard also gives (test_families.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jspec.device.parallel import Parallel
from jspec.models.registry import FAMILIES
from tests.models.family_checkpoints import FAMILY_CHECKPOINTS, checkpoint_of, logits_over
from tests.support.golden_arrays import arrays_of

# Their layers are split like those of the others.
REPETITIONS = (
    *("qwen2", "qwen3", "qwen3_moe_mixed", "mistral", "mimo"),
    *("qwen3_5", "qwen3_5_moe"),
    *("deepseek_v2", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "mistral4", "ministral3"),
    *("gemma4_moe", "gemma4_unified"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in REPETITIONS else ())
        for name in FAMILY_CHECKPOINTS
    ],
)
def test_two_shards_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    path = checkpoint_of(name, tmp_path)
    golden = arrays_of(path / "outputs.npz")
    logits = logits_over(Parallel(tensor=2), path, golden["token_ids"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4)


def test_every_family_is_split() -> None:
    """tests/engine/test_runner.py covers Llama."""
    families = {name.removesuffix("_mixed") for name in FAMILY_CHECKPOINTS}
    families -= {"qwen3_5_moe", "kimi_k2", "ministral3", "gemma4_moe", "gemma4_unified"}
    assert families == {family.name for family in FAMILIES} - {"llama"}

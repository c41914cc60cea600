"""The small checkpoints beside which transformers' numbers lie, one of each family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
FAMILY_CHECKPOINTS = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "mistral",
    "gpt_oss",
    "step3p5",
    "glm4_moe",
    "mimo",
    "mimo_v2",
)


def checkpoint_of(name: str, folder: Path) -> Path:
    """Where it lies. MiMo-7B's, whose target is Qwen2's and which transformers does not have, is
    written into `folder`: Qwen2's with its name.
    """
    if name != "mimo":
        return GOLDEN / name
    path = folder / name
    shutil.copytree(GOLDEN / "qwen2", path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (path / "config.json").write_text(json.dumps(config))
    return path

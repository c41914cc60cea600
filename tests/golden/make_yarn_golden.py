"""Write tests/golden/yarn.npz: transformers' frequencies and attention factors of scaled RoPE.

Run by hand where torch and transformers (5) are installed; the tests read only the output:

    python tests/golden/make_yarn_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LENGTH = "original_max_position_embeddings"
# name: (head_dim, rope_parameters); as published where a model is named.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt_oss": (
        64,
        {"rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
        | {"truncate": False, LENGTH: 4096},
    ),
    "qwen3": (128, {"rope_theta": 1e6, "factor": 4.0, LENGTH: 32768}),
    "both_mscales": (
        64,
        {"rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, LENGTH: 4096},
    ),
    "stated_factor": (
        32,
        {"rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.5, "beta_fast": 64.0}
        | {"beta_slow": 2.0, LENGTH: 1024},
    ),
    "short_context": (8, {"rope_theta": 150000.0, "factor": 32.0, "truncate": False, LENGTH: 16}),
    "kimi_k2": (
        64,
        {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, LENGTH: 4096},
    ),
    "linear": (128, {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}),
    "dynamic": (128, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "one_step": (8, {"rope_theta": 1e4, "factor": 4.0, LENGTH: 6}),
}


def main() -> None:
    found: dict[str, Any] = {}
    for name, (head_dim, parameters) in CASES.items():
        table = {"rope_type": "yarn", **parameters}
        config = LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=1 << 17,
            rope_parameters=dict(table),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[table["rope_type"]](config)
        found[f"{name}.table"] = np.array(json.dumps(table))
        found[f"{name}.frequencies"] = frequencies.numpy()
        found[f"{name}.attention_factor"] = np.float64(factor)
    np.savez_compressed(Path(__file__).parent / "yarn.npz", **found)


if __name__ == "__main__":
    main()

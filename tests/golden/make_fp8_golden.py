"""Write tests/golden/families/*_fp8: checkpoints of make_families_golden.py with fp8 products.

Run by hand where torch, transformers (5), accelerate and compressed-tensors are installed:

    python tests/golden/make_fp8_golden.py

It also writes what transformers computes from them. `qwen3_moe_fp8` has blocks of 8 x 8 that share
a scale (DeepSeek's form; 128 x 128 as published), `mistral_fp8` a scale per row
(compressed-tensors). transformers unpacks both without a GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FAMILIES = Path(__file__).parent / "families"
BLOCK = 8
LARGEST = 448.0  # of e4m3
DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": None,
            "output_activations": None,
        }
    },
}


def by_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (n // BLOCK for n in weight.shape)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape)
    return codes.to(torch.float8_e4m3fn), scales


def by_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / LARGEST
    return (weight / scales).to(torch.float8_e4m3fn), scales


@torch.no_grad()
def write(source: str, config: dict[str, Any], end: str, pack: Any) -> None:
    folder = FAMILIES / f"{source}_fp8"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors = {}
    for name, value in load_file(FAMILIES / source / "model.safetensors").items():
        tensors[name] = value
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name + end] = (x.contiguous() for x in pack(value))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((FAMILIES / source / "config.json").read_text())
    values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    token_ids = torch.from_numpy(np.load(FAMILIES / source / "outputs.npz")["token_ids"])[None]
    output = model(token_ids, output_hidden_states=True)
    np.savez_compressed(
        folder / "outputs.npz",
        token_ids=token_ids[0].numpy(),
        logits=output.logits[0].numpy(),
        hidden_states=np.stack([hidden[0].numpy() for hidden in output.hidden_states]),
    )


if __name__ == "__main__":
    write("qwen3_moe", DEEPSEEK, "_scale_inv", by_blocks)
    write("mistral", COMPRESSED, "_scale", by_rows)

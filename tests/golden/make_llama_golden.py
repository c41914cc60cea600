"""Write tests/golden/llama: tiny random checkpoints, and what transformers computes from them.

Run by hand where torch and transformers are installed; the tests read only the output:

    python tests/golden/make_llama_golden.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

OUT = Path(__file__).parent / "llama"
NUM_TOKENS = 40  # past the 16 positions that the llama3 variant calls "original"

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def models() -> dict[str, PreTrainedModel]:
    """Together they cover GQA, a wide head_dim, llama3 scaling, tied embeddings, biases,
    Mistral."""
    torch.manual_seed(0)
    return {
        "plain": LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=2, eos_token_id=2)),
        "llama3_tied": LlamaForCausalLM(
            LlamaConfig(
                **COMMON,
                num_hidden_layers=3,
                head_dim=16,
                tie_word_embeddings=True,
                rope_parameters=LLAMA3_ROPE,
                eos_token_id=[2, 3],
            )
        ),
        "bias": LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=2, attention_bias=True)),
        "mistral": MistralForCausalLM(
            MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=None, rms_norm_eps=1e-5)
        ),
    }


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draw weights large enough for attention to matter; norms away from 1, biases from 0."""
    for name, value in model.named_parameters():
        if "norm" in name:
            value.uniform_(0.5, 1.5)
        elif "bias" in name:
            value.normal_(std=0.3)
        else:
            value.normal_(std=value.shape[-1] ** -0.5)


@torch.no_grad()
def main() -> None:
    for name, model in models().items():
        model = model.float().eval()
        randomize(model)
        token_ids = torch.randint(0, COMMON["vocab_size"], (1, NUM_TOKENS))
        output = model(token_ids, output_hidden_states=True)
        sharded = {"max_shard_size": "60KB"} if name == "llama3_tied" else {}
        model.save_pretrained(OUT / name, **sharded)
        np.savez_compressed(
            OUT / name / "outputs.npz",
            token_ids=token_ids[0].numpy(),
            logits=output.logits[0].numpy(),
            hidden_states=np.stack([hidden[0].numpy() for hidden in output.hidden_states]),
        )


if __name__ == "__main__":
    main()

"""Write tests/golden/eagle3: tiny random EAGLE-3 heads, and what speculators computes from them.

Run by hand where torch and speculators (0.9) are installed; the tests read only the output:

    python tests/golden/make_eagle3_golden.py

speculators runs a head only as training does, over all positions at once: step 0 is a prefill, and
step s continues every position's chain by one forced token. Row t of step s is therefore the s-th
draft forward after the prefix of t + 1 rows, with the tokens of the text in place of drafts.
`hidden` is the last layer's output, before the final norm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

OUT = Path(__file__).parent / "eagle3"
NUM_ROWS = 20
NUM_STEPS = 5  # 3 in those that were made first
VOCAB_SIZE, DRAFT_VOCAB_SIZE, SIZE = 96, 40, 32

# Settings of the head's config, and of its layers: all that speculators supports.
VARIANTS: dict[str, tuple[type, dict[str, object], dict[str, object]]] = {
    "plain": (LlamaConfig, {}, {}),
    "norm_before_residual": (LlamaConfig, {"norm_before_residual": True}, {}),
    "norm_before_fc": (
        LlamaConfig,
        {"norm_before_fc": True},
        {"attention_bias": True, "mlp_bias": True, "hidden_size": 16},
    ),
    "fc_norm": (LlamaConfig, {"fc_norm": True, "norm_output": True}, {"hidden_size": 16}),
    "qwen3_layers": (
        Qwen3Config,
        {"norm_before_residual": True, "fc_norm": True},
        {"num_hidden_layers": 2, "hidden_size": 16},
    ),
    "llama3_rope": (
        LlamaConfig,
        {},
        {
            "hidden_size": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "yarn_rope": (
        LlamaConfig,
        {"draft_vocab_size": VOCAB_SIZE},
        {
            "hidden_size": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}


def head(style: type, of_head: dict[str, object], of_layers: dict[str, object]) -> Eagle3DraftModel:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": SIZE,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }
    layer = style(**(sizes | of_layers))
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            **({"draft_vocab_size": DRAFT_VOCAB_SIZE, "norm_before_residual": False} | of_head),
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)],
                default_proposal_method="greedy",
                verifier=verifier,
            ),
        )
    )


@torch.no_grad()
def randomize(model: Eagle3DraftModel) -> None:
    for name, value in model.named_parameters():
        if "norm" in name:
            value.uniform_(0.5, 1.5)
        elif value.ndim == 1:  # a bias
            value.normal_(std=0.5)
        else:
            value.normal_(std=value.shape[-1] ** -0.5)
    if model.d2t is None:  # the whole vocabulary
        return
    target_ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
    model.d2t.copy_(target_ids - torch.arange(DRAFT_VOCAB_SIZE))
    model.t2d.fill_(False)
    model.t2d[target_ids] = True


@torch.no_grad()
def main() -> None:
    for name, variant in VARIANTS.items():
        if (OUT / name).exists():  # delete a folder to make it again
            continue
        torch.manual_seed(0)
        model = head(*variant).float().eval()
        randomize(model)
        aux_hidden = torch.randn(1, NUM_ROWS, 3 * model.hidden_size)
        token_ids = torch.randint(0, VOCAB_SIZE, (1, NUM_ROWS))
        logits: list[np.ndarray] = []
        hidden: list[np.ndarray] = []
        model.lm_head.register_forward_hook(
            lambda _m, _i, out, kept=logits: kept.append(out[0].numpy())
        )
        model.layers[-1].register_forward_hook(
            lambda _m, _i, out, kept=hidden: kept.append(out[0].numpy())
        )
        model(
            aux_hidden,
            token_ids,
            document_ids=torch.zeros(1, NUM_ROWS, dtype=torch.long),
            position_ids=torch.arange(NUM_ROWS)[None],
            ttt_steps=NUM_STEPS,
        )
        model.save_pretrained(OUT / name)
        (OUT / name / "config.py").unlink()  # a copy of the library's source, not ours to keep
        np.savez_compressed(
            OUT / name / "outputs.npz",
            token_ids=token_ids[0].numpy(),
            aux_hidden=aux_hidden[0].numpy(),
            logits=np.stack(logits),
            hidden=np.stack(hidden),
        )


if __name__ == "__main__":
    main()

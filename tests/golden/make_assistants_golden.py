"""Write tests/golden/assistants: assistants of the target in families/gemma4, and their drafts.

Run by hand after make_families_golden.py, with the same packages:

    python tests/golden/make_assistants_golden.py

The keys of layers with a window are those that transformers' cache holds: one less than the window.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from make_families_golden import COMMON, OUT, WINDOW, randomize
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

FOLDER = Path(__file__).parent / "assistants"
LENGTHS, NUM_STEPS = (5, 17), 3
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 2}
GROUP = COMMON["vocab_size"] // ORDERED["num_centroids"]


def assistant(target: Gemma4ForCausalLM, **more: object) -> Gemma4AssistantForCausalLM:
    sizes = COMMON | {"hidden_size": 16, "intermediate_size": 12}
    text = Gemma4TextConfig(
        **sizes,
        head_dim=8,
        global_head_dim=12,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=target.config.rope_parameters,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=3,
    )
    text._attn_implementation = "eager"
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=24, **more)
    model = Gemma4AssistantForCausalLM(config).float().eval()
    randomize(model)
    if model.masked_embedding is not None:
        order = torch.randperm(COMMON["vocab_size"])
        model.masked_embedding.token_ordering.copy_(order)
    return model


def drafts(
    target: Gemma4ForCausalLM, model: Gemma4AssistantForCausalLM, ids: torch.Tensor, length: int
) -> np.ndarray:
    """Return the logits [S, V] of a greedy chain after ids[:length] and the root ids[length]."""
    output = target.model(ids[:, :length], use_cache=False, return_shared_kv_states=True)
    caches = {
        kind: tuple(x[:, :, -(WINDOW - 1) :] if kind.startswith("sliding") else x for x in pair)
        for kind, pair in output.shared_kv_states.items()
    }
    hidden, token = output.last_hidden_state[:, -1:], ids[:, length : length + 1]
    logits = []
    for _ in range(NUM_STEPS):
        given = torch.cat([target.model.embed_tokens(token), hidden], dim=-1)
        found = model(
            inputs_embeds=given,
            position_ids=torch.tensor([[length]]),
            shared_kv_states=caches,
        )
        hidden, token = found.last_hidden_state, found.logits.argmax(dim=-1)
        logits.append(found.logits[0, 0].numpy())
    return np.stack(logits)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shutil.rmtree(FOLDER, ignore_errors=True)
    target = Gemma4ForCausalLM.from_pretrained(OUT / "gemma4", attn_implementation="eager").eval()
    ids = torch.from_numpy(np.load(OUT / "gemma4" / "outputs.npz")["token_ids"])[None]
    for name, more in (("gemma4", {}), ("gemma4_ordered", ORDERED)):
        model = assistant(target, **more)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            FOLDER / name / "outputs.npz",
            lengths=np.asarray(LENGTHS),
            logits=np.stack([drafts(target, model, ids, length) for length in LENGTHS]),
        )


if __name__ == "__main__":
    main()

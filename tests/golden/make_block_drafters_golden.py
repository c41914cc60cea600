"""Writes tests/golden/blocks: tiny random block drafters, and what their libraries compute of them.

Run by hand where torch, speculators (0.9) and transformers (5.24) are installed; the tests read
only what it wrote:

    python tests/golden/make_block_drafters_golden.py

outputs.npz: features [T, n * E] and token_ids [T] of a text; embed and lm_head of its target, where
the files lack them; roots [A], positions; logits [A, R, U] of the block whose root is the token
there, after the context of all tokens before it. A Markov head is given the text's own tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

OUT = Path(__file__).parent / "blocks"
VOCAB_SIZE, DRAFT_VOCAB_SIZE, SIZE = 64, 24, 16
NUM_TOKENS, BLOCK, MASK = 24, 5, 63
ROOTS = (1, 6, 13)
LAYER_IDS = (2, 4, 5)  # inputs of layers; transformers counts outputs
LAYERS: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}

# Of speculators: the kind, what is given to the config of the head, and of its layers.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {"draft_vocab_size": DRAFT_VOCAB_SIZE}, {}),
    "dflash_window": ("dflash", {}, WINDOWS | {"attention_bias": True}),
    "dflash_both_ways": (
        "dflash",
        {"sliding_window_non_causal": True, "sample_from_anchor": True},
        WINDOWS,
    ),
    "dspark_vanilla": ("dspark", {"draft_vocab_size": DRAFT_VOCAB_SIZE, "markov_rank": 6}, {}),
    "dspark_gated": (
        "dspark",
        {"markov_rank": 6, "markov_head_type": "gated", "sample_from_anchor": False},
        {"num_hidden_layers": 1},
    ),
    "dspark_rnn": (
        "dspark",
        {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False},
        {"num_hidden_layers": 1},
    ),
    "dflash2": (
        "dflash2",
        {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7},
        WINDOWS,
    ),
}


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    for name, value in model.named_parameters():
        if "norm" in name:
            value.uniform_(0.5, 1.5)
        elif value.ndim == 1:  # a bias
            value.normal_(std=0.5)
        else:
            value.normal_(std=value.shape[-1] ** -0.5)
    if getattr(model, "d2t", None) is None:  # the whole vocabulary
        return
    target_ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
    model.d2t.copy_(target_ids - torch.arange(DRAFT_VOCAB_SIZE))
    model.t2d.fill_(False)
    model.t2d[target_ids] = True


def keep(name: str, model: Any, **outputs: Any) -> None:
    model.save_pretrained(OUT / name)
    (OUT / name / "config.py").unlink(missing_ok=True)  # a copy of the library's source
    (OUT / name / "generation_config.json").unlink(missing_ok=True)
    arrays = {k: v.detach().numpy() for k, v in outputs.items() if v is not None}
    np.savez_compressed(OUT / name / "outputs.npz", roots=np.array(ROOTS), **arrays)


def of_speculators(name: str) -> None:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.model import SpeculatorModel
    from speculators.models.dflash import core
    from speculators.models.dflash2 import core as dflash2
    from speculators.models.dspark import core as dspark
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    kind, of_head, of_layers = VARIANTS[name]
    layer = Qwen3Config(vocab_size=VOCAB_SIZE, attn_implementation="eager", **LAYERS | of_layers)
    model_class = SpeculatorModel.registry[kind]
    config = model_class.config_class(
        transformer_layer_config=layer,
        **{"draft_vocab_size": VOCAB_SIZE, "block_size": BLOCK} | of_head,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=list(LAYER_IDS),
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = model_class(config).float().eval()
    randomize(model)
    features = torch.randn(1, NUM_TOKENS, len(LAYER_IDS) * SIZE)
    token_ids = torch.randint(0, VOCAB_SIZE, (1, NUM_TOKENS))
    core.select_anchors = lambda *_: (torch.tensor(ROOTS), torch.ones(len(ROOTS), dtype=torch.bool))
    inputs = (
        features,
        token_ids,
        torch.ones(1, NUM_TOKENS),
        torch.zeros(1, NUM_TOKENS, SIZE),
        torch.zeros(1, NUM_TOKENS, dtype=torch.long),
    )
    found: dict[str, Any] = {}

    def kept(logits: torch.Tensor | None = None, *_: Any, **_named: Any) -> Any:
        found.setdefault("logits", logits)
        return torch.zeros(()), {}

    core.compute_metrics = dspark.compute_metrics = dflash2.compute_metrics = kept
    if kind == "dflash2":
        selector = model.candidate_selector

        def selected(logits: torch.Tensor, hidden: torch.Tensor, before: Any, ids: Any) -> Any:
            """The scores of the candidates; other tokens have none."""
            del selector.score_candidates, ids
            chosen, scores = selector.select(logits, hidden, before)
            found["logits"] = torch.full_like(logits, -torch.inf).scatter(-1, chosen, scores)
            return scores

        selector.score_candidates = selected
    model(*inputs, max_anchors=len(ROOTS))
    is_whole = config.draft_vocab_size == VOCAB_SIZE
    keep(
        name,
        model,
        features=features[0],
        token_ids=token_ids[0],
        embed=model.embed_tokens.weight,
        lm_head=model.lm_head.weight if is_whole else None,
        logits=found["logits"].reshape(len(ROOTS), BLOCK, -1),
    )


def of_parallel(name: str) -> None:
    """P-EAGLE: pairs (token i + 1, feature i), and after those before a root a mask for each level
    but the first."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(vocab_size=VOCAB_SIZE, attn_implementation="eager", **LAYERS)
    model = PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=DRAFT_VOCAB_SIZE,
            norm_before_residual=True,
            norm_before_fc=True,
            eagle_aux_hidden_state_layer_ids=list(LAYER_IDS),
            mask_token_id=MASK,
            speculators_config=SpeculatorsConfig(
                algorithm="peagle",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    model = model.float().eval()
    randomize(model)
    features = torch.randn(1, NUM_TOKENS, len(LAYER_IDS) * SIZE)
    token_ids = torch.randint(0, VOCAB_SIZE, (1, NUM_TOKENS))
    pairs = torch.arange(NUM_TOKENS - 1)
    last = torch.tensor(ROOTS) - 1
    core.generate_cod_sample_indices = lambda **_: (
        torch.cat((pairs, last.repeat(BLOCK - 1))),
        torch.cat((0 * pairs, torch.arange(1, BLOCK).repeat_interleave(len(ROOTS)))),
    )
    core.compute_metrics = lambda **_: (torch.zeros(()), {})
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _m, _i, out: found.append(out[0]))
    model(
        features[:, :-1],
        token_ids[:, 1:],
        document_ids=torch.zeros(1, NUM_TOKENS - 1, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, NUM_TOKENS - 1, SIZE),
    )
    masks = found[0][len(pairs) :].reshape(BLOCK - 1, len(ROOTS), -1).swapaxes(0, 1)
    keep(
        name,
        model,
        features=features[0],
        token_ids=token_ids[0],
        logits=torch.cat((found[0][last][:, None], masks), dim=1),
    )


def of_transformers(name: str) -> None:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    config = MuseGlimmerAssistantConfig(
        **LAYERS | {"layer_types": WINDOWS["layer_types"], "sliding_window": 4},
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[each - 1 for each in LAYER_IDS],
        attn_implementation="eager",
    )
    model = MuseGlimmerAssistantModel(config).float().eval()
    randomize(model)
    features = torch.randn(1, NUM_TOKENS, len(LAYER_IDS) * SIZE)
    token_ids = torch.randint(0, VOCAB_SIZE, (1, NUM_TOKENS))
    embed = torch.randn(VOCAB_SIZE, SIZE)
    lm_head = torch.randn(VOCAB_SIZE, SIZE) * SIZE**-0.5
    cache, logits, begin = DFlashCache(config=config), [], 0
    cache.activate_past_recording()
    for root in ROOTS:  # as the generator drives it
        cache.set_previous_accepted_tokens(root - begin)
        if begin:
            cache.crop(-BLOCK)
        ids = torch.full((1, BLOCK), MASK)
        ids[0, 0] = token_ids[0, root]
        out = model(
            noise_embeds=embed[ids],
            context_hidden_states=features[:, begin:root],
            position_ids=torch.arange(begin, root + BLOCK)[None],
            cache=cache,
        )
        logits.append(out.last_hidden_state[0] @ lm_head.T)
        begin = root
    keep(
        name,
        model,
        features=features[0],
        token_ids=token_ids[0],
        embed=embed,
        lm_head=lm_head,
        logits=torch.stack(logits),
    )


def main() -> None:
    makers = {
        "assistant": of_transformers,
        "peagle": of_parallel,
        **dict.fromkeys(VARIANTS, of_speculators),
    }
    for name, make in makers.items():
        if (OUT / name).exists():  # delete what is to be made again
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            make(name)


if __name__ == "__main__":
    main()

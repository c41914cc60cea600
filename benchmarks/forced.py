"""A head's chain compared with texts of its target, without an engine: what rejection sampling and
other shapes of the tree would accept. `benchmarks.acceptance --forced` writes it beside its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.heldout import bootstrap_interval
from jspec.engine.weights.loading import BUNDLED
from jspec.files.json_files import read_object
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.heads.block_config import load_block_config
from jspec.models.heads.dflash import load_block
from jspec.models.heads.eagle3 import load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.layer import Params
from jspec.models.registry import BLOCKS
from jspec.training.draft_loss import make_frozen
from jspec.training.heads.draft_head import DraftHead
from jspec.training.heads.head_block import TrainedBlock
from jspec.training.heads.head_eagle3 import TrainedEagle3
from jspec.training.heads.head_parallel import TrainedParallel
from recipes.bundled_pair.acceptance import (
    accepted_of_caterpillar,
    accepted_of_chain,
    emitted_by_rejection,
    emitted_per_verification,
    make_compared,
)

ROWS = 10  # of a forward


@dataclass(frozen=True, slots=True)
class Texts:
    """Rows sampled with seeds 0, 1, ...: prompts of one length, and what the target said."""

    ids: np.ndarray  # i32[R, T]
    prompt_len: int
    temperature: float


def compare(folder: Path, texts: Texts, *, num_steps: int) -> dict[str, Any]:
    """Return mean tokens a verification, with 95% intervals over rows, of a chain of S drafts.

    chain: with shared noise, as the engine measures it. caterpillar: with a leaf beside every node.
    rejection: the expectation of rejection sampling with the draft's distribution (p/q), at
    temperatures above 0
    """
    spec = load_model_spec(BUNDLED / "target")
    target = load_target(BUNDLED / "target", spec, dtype=np.float32)
    target = jax.tree.map(jnp.asarray, target)
    head, params, draft_ids = read_head(folder, spec, target)
    run = make_compared(
        spec,
        head,
        length=texts.ids.shape[1],
        num_steps=num_steps,
        dtype=jnp.float32,
        first=texts.prompt_len - 1,
    )
    found: dict[str, list[tuple[float, float]]] = {}
    frozen = make_frozen(target, draft_ids)
    for start in range(0, len(texts.ids), ROWS):
        ids = texts.ids[start : start + ROWS]
        seeds = np.stack((np.zeros(len(ids)), start + np.arange(len(ids))), axis=1)
        heat = np.full(len(ids), texts.temperature, np.float32)
        ranks, ratios = run(params, frozen, jnp.asarray(ids), heat, seeds.astype(np.uint32))
        for row_ranks, row_ratios in zip(np.asarray(ranks), np.asarray(ratios), strict=True):
            for name, accepted in (
                ("chain", accepted_of_chain(row_ranks)),
                ("caterpillar", accepted_of_caterpillar(row_ranks)),
            ):
                emitted = emitted_per_verification(accepted[None], np.ones(1))
                found.setdefault(name, []).append((sum(emitted), len(emitted)))
            if texts.temperature:
                pair = emitted_by_rejection(row_ratios.astype(np.float64), 0)
                found.setdefault("rejection", []).append(pair)
    return {name: interval(pairs) for name, pairs in found.items()}


def interval(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    mean, low, high = bootstrap_interval(pairs)
    return {"mean": round(mean, 3), "interval_95": [round(low, 3), round(high, 3)]}


def read_head(folder: Path, spec: Any, target: Params) -> tuple[DraftHead, Params, np.ndarray]:
    """Return (head, trained params, draft ids) of a block drafter, EAGLE-3 or P-EAGLE."""
    config = read_object(folder / "config.json")
    kind = config.get("speculators_model_type") or config["architectures"][0]
    how: dict[str, Any] = {"target_params": target, "dtype": np.float32}
    head: DraftHead
    if kind in BLOCKS:
        block = load_block_config(folder, target=spec)
        head, params = TrainedBlock(block), load_block(folder, block, **how)
    else:
        eagle = load_eagle3_config(folder, target=spec)
        trained = TrainedEagle3 if eagle.mask_token_id is None else TrainedParallel
        head, params = trained(eagle), load_eagle3(folder, eagle, **how)
        params.pop("embed")
    draft_ids = np.asarray(params.pop("draft_ids"))
    return head, jax.tree.map(jnp.asarray, params), draft_ids

"""The settings of one run of `jspec train-draft`, and the head they give."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspec.errors import ConfigError
from jspec.spec.head_spec import default_aux_layer_ids
from jspec.spec.model_spec import ModelSpec
from jspec.training.data.examples import LossOn
from jspec.training.draft_recipe import HeadRecipe
from jspec.training.heads.draft_head import DraftHead, inner_size
from jspec.training.heads.head_eagle1 import eagle1_head
from jspec.training.heads.head_eagle3 import eagle3_head
from jspec.training.heads.head_mtp import mtp_head

DRAFT_VOCAB = 32000  # as in published EAGLE-3 heads


class Kind(enum.Enum):
    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    NEXTN = "NEXTN"  # layers for multi-token prediction, one per depth


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftJob:
    """The settings of a run. None: derived while preparing."""

    target: Path
    data: Path
    out: Path
    kind: Kind
    recipe: HeadRecipe
    held_out: Path | None = None
    skips_bad_lines: bool = False
    chat_template: str | None = None
    loss_on: LossOn = LossOn.ALL
    num_own_samples: int = 0
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    is_chained: bool = False
    aux_layer_ids: tuple[int, ...] | None = None
    features_dir: Path | None = None
    num_devices: int | None = None
    num_held_out_rows: int = 64
    export_dtype: Any = ml_dtypes.bfloat16

    def settings(self) -> dict[str, Any]:
        words = {
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in asdict(replace(self, out=Path())).items()
            if name not in ("out", "features_dir", "skips_bad_lines")  # the rows are compared
        }
        words["export_dtype"] = np.dtype(self.export_dtype).name
        words["recipe"]["compute_dtype"] = np.dtype(self.recipe.compute_dtype).name
        flat = json.loads(json.dumps(words, default=str))
        loop, recipe = flat["recipe"].pop("loop"), flat.pop("recipe")
        for unimportant in ("log_every", "eval_every", "checkpoint_every"):
            del loop[unimportant]
        loop["learning_rate"] = loop.pop("peak_learning_rate")  # the flag's name
        return {**flat, **recipe, **loop}


def make_head(job: DraftJob, spec: ModelSpec) -> DraftHead:
    """Return the requested head. Raise ConfigError for settings that do not fit this target."""
    inner = job.intermediate_size or inner_size(spec)
    if job.is_chained and job.kind is not Kind.NEXTN:
        raise ConfigError(
            f"chained is set, but the head is {job.kind.value}; expected it unset: it belongs to "
            "NEXTN, whose layers it chains"
        )
    if job.kind is not Kind.EAGLE3:
        for name in ("draft_vocab_size", "aux_layer_ids"):
            if getattr(job, name) is not None:
                raise ConfigError(
                    f"{name} is {getattr(job, name)}, but the head is {job.kind.value}; expected "
                    "it unset: it belongs to EAGLE3"
                )
    if job.kind is Kind.EAGLE:
        return eagle1_head(spec, intermediate_size=inner)
    if job.kind is Kind.NEXTN:
        return mtp_head(
            spec,
            num_layers=job.recipe.num_depths,
            intermediate_size=inner,
            chained=job.is_chained,
        )
    size = job.draft_vocab_size or min(DRAFT_VOCAB, spec.vocab_size)
    if not 1 <= size <= spec.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}; expected 1 to {spec.vocab_size}, the target's vocabulary"
        )
    ids = job.aux_layer_ids or default_aux_layer_ids(spec.num_layers)
    if not all(0 <= i <= spec.num_layers for i in ids) or ids[0] == 1:
        raise ConfigError(
            f"aux_layer_ids is {ids}; expected ids in [0, {spec.num_layers}], the first not 1, "
            "which readers take for the output of a layer"
        )
    return eagle3_head(
        spec, draft_vocab_size=size, intermediate_size=inner, aux_layer_ids=tuple(ids)
    )

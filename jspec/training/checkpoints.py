"""Orbax checkpoints of (state, best EMA parameters, progress), for resuming a run."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jspec.errors import OutputError
from jspec.files.output_files import remove
from jspec.models.files.orbax_files import reason_of_orbax, without_tracebacks
from jspec.models.layer import Params
from jspec.training.train_state import Progress, Resumed, TrainState


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        )

    def save(self, state: TrainState, best: Params, progress: Progress) -> None:
        """Write a whole checkpoint in a thread of its own, which an interrupt does not stop."""
        with ThreadPoolExecutor(1, "checkpoint") as pool:
            pool.submit(self._save, state, best, progress).result()

    def _save(self, state: TrainState, best: Params, progress: Progress) -> None:
        record = {
            "seconds": progress.seconds,
            "best_loss": progress.best_loss if math.isfinite(progress.best_loss) else None,
            "best_step": progress.best_step,
            "curve": list(progress.curve),
        }
        try:
            with without_tracebacks():
                self._manager.save(
                    int(state.step),
                    args=ocp.args.Composite(
                        arrays=ocp.args.StandardSave({"state": _as_dict(state), "best": best}),
                        progress=ocp.args.JsonSave(record),
                    ),
                )
                self._manager.wait_until_finished()
        except Exception as error:  # orbax and its storage raise arbitrary exceptions
            for part in self._folder.glob("*.orbax-checkpoint-tmp"):
                remove(part)
            raise OutputError(
                f"{self._folder}: the checkpoint of step {int(state.step)} cannot be written: "
                f"{reason_of_orbax(error)}; the one before is kept"
            ) from error

    def restore(self, like: TrainState) -> Resumed | None:
        """Return the last checkpoint, or None; `like` gives shapes and dtypes."""
        step = self._manager.latest_step()
        if step is None:
            return None
        template = {"state": _as_dict(like), "best": like.ema}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore()
            ),
        )
        record = dict(restored.progress)
        if record["best_loss"] is None:
            record["best_loss"] = math.inf
        record["curve"] = tuple(record.get("curve", ()))
        arrays = restored.arrays
        return TrainState(**arrays["state"]), arrays["best"], Progress(**record)

    def close(self) -> None:
        self._manager.close()


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {
        "params": state.params,
        "ema": state.ema,
        "opt_state": state.opt_state,
        "step": state.step,
    }

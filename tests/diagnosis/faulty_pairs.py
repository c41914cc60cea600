"""The bundled pair with one fault each: checkpoints and arguments, by the fault's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
import numpy as np
from safetensors.numpy import load_file, save_file

from jspec.cli.diagnosis.templates import CHATML
from jspec.engine.weights.loading import BUNDLED

Tensors = dict[str, np.ndarray]
INPUT, HIDDEN = "input_layernorm.weight", "hidden_norm.weight"


def copied(directory: Path, what: str) -> Path:
    """Copy the bundled target or draft."""
    return Path(shutil.copytree(BUNDLED / what, directory / what))


def with_config(path: Path, **changed: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def with_tensors(path: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    file = path / "model.safetensors"
    tensors = {name: change(name, x) for name, x in load_file(file).items()}
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, file)


def is_matrix(name: str, x: np.ndarray) -> bool:
    return x.ndim == 2 and "embed" not in name


def quantized(x: np.ndarray, bits: int) -> np.ndarray:
    """Quantize symmetrically, with one scale per output."""
    wide = x.astype(np.float32)
    scale = np.abs(wide).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(wide / scale) * scale).astype(x.dtype)


def healthy(directory: Path) -> dict[str, Any]:
    del directory
    return {}


def layer_ids(directory: Path) -> dict[str, Any]:
    draft = copied(directory, "draft")
    names = {"eagle_aux_hidden_state_layer_ids": [3, 6, 8], "use_aux_hidden_state": True}
    with_config(draft, eagle_config=names)
    return of_draft(draft)


def rope_theta(directory: Path) -> dict[str, Any]:
    draft = copied(directory, "draft")
    with_config(draft, rope_theta=500000.0)
    return of_draft(draft)


def window(directory: Path) -> dict[str, Any]:
    target = copied(directory, "target")
    with_config(
        target, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8
    )
    return of_draft(BUNDLED / "draft", target=target)


def template(directory: Path) -> dict[str, Any]:
    file = directory / "chatml.jinja"
    file.write_text(CHATML)
    return {"chat_template": str(file)}


def norm(directory: Path) -> dict[str, Any]:
    draft = copied(directory, "draft")
    tensors = load_file(draft / "model.safetensors")
    a = next(name for name in tensors if name.endswith(INPUT))
    b = next(name for name in tensors if name.endswith(HIDDEN))
    other = {a: tensors[b], b: tensors[a]}
    with_tensors(draft, lambda name, x: other.get(name, x))
    return of_draft(draft)


def vocabulary(directory: Path) -> dict[str, Any]:
    """Shift d2t by one, except for the last ids, which would leave the vocabulary."""
    draft = copied(directory, "draft")
    tensors = load_file(draft / "model.safetensors")
    count = len(tensors["d2t"])
    ids = np.arange(count) + tensors["d2t"]
    shifted = np.minimum(ids + 1, 4096 - count + np.arange(count))
    d2t = shifted - np.arange(count)
    t2d = np.zeros(4096, np.bool_)
    t2d[shifted] = True
    with_tensors(draft, lambda name, x: {"d2t": d2t, "t2d": t2d}.get(name, x))
    return of_draft(draft)


def embedding(directory: Path) -> dict[str, Any]:
    """Give the head the embedding of another model: each token has another token's row."""
    draft = copied(directory, "draft")
    table = load_file(BUNDLED / "target" / "model.safetensors")["model.embed_tokens.weight"]
    file = draft / "model.safetensors"
    other = np.ascontiguousarray(table[np.random.default_rng(0).permutation(len(table))])
    save_file(load_file(file) | {"embed_tokens.weight": other}, file)
    return of_draft(draft)


def tensors(directory: Path) -> dict[str, Any]:
    """Zero half of the head's weights."""
    draft, rng = copied(directory, "draft"), np.random.default_rng(0)

    def half(name: str, x: np.ndarray) -> np.ndarray:
        return x * (rng.random(x.shape) < 0.5).astype(x.dtype) if is_matrix(name, x) else x

    with_tensors(draft, half)
    return of_draft(draft)


def stale(directory: Path) -> dict[str, Any]:
    """Return another version of the target: the same function with its hidden dimensions
    permuted."""
    target = copied(directory, "target")
    order = np.random.default_rng(0).permutation(256)

    def reordered(name: str, x: np.ndarray) -> np.ndarray:
        if name.endswith(("o_proj.weight", "down_proj.weight")) or x.ndim == 1:
            return x[order]
        return x[:, order]

    with_tensors(target, reordered)
    return of_draft(BUNDLED / "draft", target=target)


def quantized_twice(directory: Path) -> dict[str, Any]:
    draft = copied(directory, "draft")
    with_tensors(draft, lambda name, x: quantized(quantized(x, 4), 3) if is_matrix(name, x) else x)
    return of_draft(draft)


def of_draft(draft: Path, *, target: Path = BUNDLED / "target") -> dict[str, Any]:
    return {
        "model_path": str(target),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft),
    }


# Each with the kind of finding that names it.
FAULTS: dict[Callable[[Path], dict[str, Any]], str] = {
    layer_ids: "layer_ids",
    rope_theta: "rope_theta",
    window: "window",
    template: "template",
    norm: "norm",
    vocabulary: "vocabulary",
    embedding: "embedding",
    tensors: "tensors",
    stale: "unfit",
    quantized_twice: "unfit",
}

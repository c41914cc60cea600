"""Model pairs for the rate of first divergence, and their prompts.

The Hopper kernels do not support the bundled pair's heads of 32, so there are two more: the same
pair with its heads padded to 128, and random weights with heads of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.heldout import heldout_prompts
from benchmarks.workloads import WORKLOADS, Workload
from jspec.config.engine_args import EngineArgs
from jspec.engine.resolving import CheckpointFacts, DeviceFacts, head_dims_of, resolve
from jspec.engine.weights.loading import BUNDLED
from jspec.errors import ConfigError
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.files.tensor_files import HostArray, open_tensors, write_checkpoint
from jspec.models.heads.eagle3_config import eagle3_config_json, load_eagle3_config
from jspec.models.registry import family_named
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import ModelSpec
from jspec.text.tokenizer.tokenizer import Tokenizer

Ids = tuple[int, ...]

# Heads four times as wide: the scale 1/sqrt(D) halves, and doubling the queries is exact.
WIDENING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Target and draft: engine arguments, the layers that a backend must support, prompts."""

    name: str
    arguments: Mapping[str, Any]
    draft_arguments: Mapping[str, Any]
    layers: tuple[ModelSpec, ...]
    prompts: tuple[Ids, ...] = ()


def backend_problem(pair: Pair, arguments: Mapping[str, Any]) -> str | None:
    """Return why this platform does not support the pair with the requested backend, or None."""
    devices = jax.devices()[:1]
    args = EngineArgs.from_mapping(arguments)
    checkpoint = CheckpointFacts(
        model_path=pair.name,
        tokenizer_path=pair.name,
        max_position=pair.layers[0].max_position,
        head_dims=head_dims_of(pair.layers),
    )
    try:
        resolve(args, checkpoint, DeviceFacts.of(devices))
    except ConfigError as error:
        return str(error)
    return None


def make_pair(name: str, directory: Path, *, num_prompts: int, prompt_tokens: int) -> Pair:
    """Make the pair of PAIRS with this name, with its files in `directory`."""
    pair, shape = PAIRS[name](directory), (num_prompts, prompt_tokens)
    is_dummy = "load_format" in pair.arguments
    return replace(pair, prompts=random_prompts(pair, shape) if is_dummy else python_prompts(shape))


def bundled_pair(_: Path) -> Pair:
    target, draft = bundled_configs()
    return Pair(name="bundled", arguments={}, draft_arguments={}, layers=(target, draft.layer))


def bundled_configs() -> tuple[ModelSpec, HeadSpec]:
    target = load_model_spec(BUNDLED / "target")
    return target, load_eagle3_config(BUNDLED / "draft", target=target)


def python_prompts(shape: tuple[int, int]) -> tuple[Ids, ...]:
    """Return prompts from held-out modules of this Python."""
    tokenizer = Tokenizer.from_directory(BUNDLED / "target")
    return tuple(heldout_prompts(tokenizer, count=shape[0], length=shape[1], seed=2))


def random_prompts(pair: Pair, shape: tuple[int, int]) -> tuple[Ids, ...]:
    ids = np.random.default_rng(2).integers(0, pair.layers[0].vocab_size, shape)
    return tuple(tuple(row) for row in ids.tolist())


# The bundled pair with wide heads.


def wide_pair(directory: Path) -> Pair:
    """Make the bundled pair with heads 128 wide: mathematically the same function."""
    target, draft = bundled_configs()
    wide_target = wide_config(target)
    wide_draft = replace(draft, layer=wide_config(draft.layer))
    configs = {
        "target": family_named(wide_target.family).to_json(wide_target)
        | {"torch_dtype": "bfloat16"},
        "draft": eagle3_config_json(wide_draft, dtype="bfloat16"),
    }
    head_dim = target.one_layer.attention.head_dim
    for name, config in configs.items():
        with open_tensors(BUNDLED / name) as tensors:
            wide = {
                key: wide_tensor(key, tensors.read(key), head_dim=head_dim)
                for key in tensors.sources
            }
        write_checkpoint(directory / name, config, wide)
    return Pair(
        name="wide",
        arguments={"model_path": str(directory / "target")},
        draft_arguments={"speculative_draft_model_path": str(directory / "draft")},
        layers=(wide_target, wide_draft.layer),
    )


def wide_config(config: ModelSpec) -> ModelSpec:
    """Return the config for wide heads: RoPE's pair i turns by theta ** (-2i / D), so theta
    changes.

    In:  D 32, theta 1e4    Out: D 128, theta 1e16: 1e16 ** (-2i / 128) = 1e4 ** (-2i / 32)
    """
    heads = config.one_layer.attention
    rope = replace(heads.rope, theta=heads.rope.theta**WIDENING)
    return with_heads(config, head_dim=WIDENING * heads.head_dim, rope=rope)


def with_heads(config: ModelSpec, **changes: Any) -> ModelSpec:
    layer = config.one_layer
    layer = replace(layer, attention=replace(layer.attention, **changes))
    return replace(config, layers=(layer,) * config.num_layers)


def wide_tensor(name: str, weight: HostArray, *, head_dim: int) -> HostArray:
    """Return a projection into or out of heads zero-padded; other tensors as they are."""
    if name.endswith("o_proj.weight"):
        return np.ascontiguousarray(wide_heads(weight.T, head_dim=head_dim).T)
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return wide_heads(weight, head_dim=head_dim)
    if name.endswith("q_proj.weight"):
        return wide_heads(weight, head_dim=head_dim) * weight.dtype.type(WIDENING**0.5)
    return weight


def wide_heads(weight: HostArray, *, head_dim: int) -> HostArray:
    """Pad [H*D, in] to [H*4D, in]. RoPE turns i with i + D/2, so each half is padded by itself.

    In:  D 4, rows a b c d    Out: a b 0 0 0 0 0 0  c d 0 0 0 0 0 0
    """
    half, width = head_dim // 2, weight.shape[1]
    halves = weight.reshape(-1, half, width)
    padded = np.pad(halves, ((0, 0), (0, (WIDENING - 1) * half), (0, 0)))
    return padded.reshape(-1, width)


# Random weights.


def random_pair(directory: Path) -> Pair:
    """Make the bundled pair's architecture with random weights, heads of 64 and an untied lm_head:
    a tied one would only repeat the last token, by a wide margin.
    """
    target, draft = bundled_configs()
    workload = replace(
        WORKLOADS["tiny"],
        name="random",
        target=replace(with_heads(target, head_dim=64), tie_word_embeddings=False),
        draft=replace(draft, layer=with_heads(draft.layer, head_dim=64)),
        dtype="bfloat16",
    )
    return dummy_pair(workload, directory)


def dummy_pair(workload: Workload, directory: Path) -> Pair:
    """Make random weights with the sizes of `workload`."""
    workload.write_configs(directory)
    return Pair(
        name=workload.name,
        arguments={"model_path": str(directory / "target"), "load_format": "dummy"},
        draft_arguments={"speculative_draft_model_path": str(directory / "draft")},
        layers=(workload.target, workload.draft.layer),
    )


PAIRS: Mapping[str, Callable[[Path], Pair]] = {
    "bundled": bundled_pair,
    "wide": wide_pair,
    "random": random_pair,
}

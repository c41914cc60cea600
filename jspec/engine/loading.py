"""Checkpoints onto devices: configs, weights, and the static models that go with them.

With `load_format` "dummy" only the configs are read, and random weights are made on the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.core import sharding
from jspec.core.config import Algorithm, Eagle3Config, TransformerConfig
from jspec.core.config_io import load_eagle3_config, load_transformer_config
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import CheckpointError, ConfigError
from jspec.engine.dummy_weights import dummy_params
from jspec.engine.memory import KERNEL_PAGE_SIZE
from jspec.layers.linear import Shard
from jspec.models.hf_eagle3 import load_eagle3
from jspec.models.hf_llama import load_llama
from jspec.models.llama import Params
from jspec.models.paged import PagedEagle3, PagedLlama
from jspec.pallas_kernels.dispatch import gpu_problem
from jspec.pallas_kernels.paged_attention import Backend, choose_backend
from jspec.speculative.draft import Drafter, EagleDrafter, NoDrafter

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPaths:
    """Directories of the target, the tokenizer, and the draft if there is one."""

    target: Path
    tokenizer: Path
    draft: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModels:
    """Static target and drafter, and their params on the mesh; the draft's layer, if any.

    backend: what runs attention, chosen for these models on these devices.
    """

    backend: Backend
    target: PagedLlama
    drafter: Drafter
    params: dict[str, Any]
    target_config: TransformerConfig
    draft_layer: TransformerConfig | None = None


def resolve_paths(args: EngineArgs) -> ModelPaths:
    """Where the checkpoints are. Raises CheckpointError for a directory that does not exist."""
    named = args.speculative_draft_model_path
    if args.model_path is None:
        named = str(BUNDLED / "draft")
    target = BUNDLED / "target" if args.model_path is None else Path(args.model_path)
    draft = None if named is None else Path(named)
    tokenizer = Path(args.tokenizer_path) if args.tokenizer_path is not None else target
    is_drafted = args.algorithm is not Algorithm.NONE
    paths = ModelPaths(target=target, tokenizer=tokenizer, draft=draft if is_drafted else None)
    for name, path in (
        ("model_path", paths.target),
        ("tokenizer_path", paths.tokenizer),
        ("speculative_draft_model_path", paths.draft),
    ):
        if path is not None and not path.is_dir():
            raise CheckpointError(
                f"{name} is {str(path)!r}; expected a directory with a checkpoint in Hugging "
                f"Face's layout (config.json, model.safetensors, tokenizer.json)"
            )
    return paths


def load_models(
    args: EngineArgs, paths: ModelPaths, *, mesh: Mesh, dtype: DTypeLike
) -> LoadedModels:
    """Reads, checks and places target and draft.

    Raises CheckpointError or ConfigError naming the tensor, file or number that does not fit.
    """
    target_config = load_transformer_config(paths.target)
    shard = Shard(mesh.size, sharding.TENSOR_AXIS)
    check_divisible(target_config, shards=mesh.size)
    if paths.draft is None:
        backend = resolve_backend(args, mesh, dtype=dtype, layers=(target_config,))
        target, abstract = PagedLlama.create(target_config, shard=shard, dtype=dtype)
        placed = _target_params(args, paths.target, target_config, abstract, mesh=mesh)
        return LoadedModels(
            backend=backend,
            target=target,
            drafter=NoDrafter(),
            params={"target": placed, "draft": {}},
            target_config=target_config,
        )
    draft_config = _draft_config(args, paths.draft, target_config, shards=mesh.size)
    layers = (target_config, draft_config.layer)
    backend = resolve_backend(args, mesh, dtype=dtype, layers=layers)
    # A verification multiplies many tokens at once, which the Hopper kernel does best so; decoding
    # one token a row is slower by 1% (docs/kernels.md), and plain decoding stays with [in, out].
    by_columns = backend == "gpu" and jnp.dtype(dtype) == jnp.bfloat16
    target, abstract = PagedLlama.create(
        target_config,
        shard=shard,
        dtype=dtype,
        aux_layer_ids=draft_config.aux_layer_ids,
        by_columns=by_columns,
    )
    placed = _target_params(
        args, paths.target, target_config, abstract, mesh=mesh, by_columns=by_columns
    )
    head, abstract = PagedEagle3.create(
        draft_config, shard=shard, dtype=dtype, by_columns=by_columns
    )
    draft = _draft_params(
        args, paths.draft, draft_config, abstract, placed, mesh=mesh, by_columns=by_columns
    )
    drafter = EagleDrafter(
        head, args.speculative, backend, draft_noise=args.speculative_draft_noise
    )
    return LoadedModels(
        backend=backend,
        target=target,
        drafter=drafter,
        params={"target": placed, "draft": draft},
        target_config=target_config,
        draft_layer=draft_config.layer,
    )


def resolve_backend(
    args: EngineArgs, mesh: Mesh, *, dtype: DTypeLike, layers: tuple[TransformerConfig, ...]
) -> Backend:
    """What runs attention here: the platform's kernels where they serve, unless told otherwise.

    Raises ConfigError for kernels asked for by name that do not serve.
    """
    device = mesh.devices.flat[0]
    problem = None
    if device.platform == "gpu":
        problem = gpu_problem(
            compute_capability=getattr(device, "compute_capability", "unknown"),
            dtype=dtype,
            page_size=args.page_size or KERNEL_PAGE_SIZE,
            head_dims=tuple(layer.head_dim for layer in layers),
        )
    return choose_backend(device.platform, args.attention_backend, gpu_problem=problem)


def _draft_config(
    args: EngineArgs, path: Path, target_config: TransformerConfig, *, shards: int
) -> Eagle3Config:
    """The head's config, checked against the arguments that it must fit."""
    draft_config = load_eagle3_config(
        path, target=target_config, draft_rope_theta=args.speculative_draft_rope_theta
    )
    if args.speculative.topk > draft_config.draft_vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk is {args.speculative.topk}; expected at most "
            f"{draft_config.draft_vocab_size}, the draft vocabulary"
        )
    if draft_config.draft_vocab_size % shards:
        raise ConfigError(
            f"tp_size is {shards}; expected a divisor of the draft vocabulary "
            f"{draft_config.draft_vocab_size}"
        )
    return draft_config


def _target_params(
    args: EngineArgs,
    path: Path,
    config: TransformerConfig,
    abstract: Params,
    *,
    mesh: Mesh,
    by_columns: bool = False,
) -> Params:
    """The target's params on the mesh, in the dtype of `abstract`: read, or made."""
    if args.load_format == "dummy":
        return dummy_params(
            {"target": abstract},
            mesh=mesh,
            vocab_size=config.vocab_size,
            by_columns=by_columns,
        )["target"]
    dtype = abstract["embed"]["table"].dtype
    weights = load_llama(path, config, dtype=np.dtype(dtype), shards=mesh.size)
    return place(mesh, {"target": weights}, by_columns=by_columns)["target"]


def _draft_params(
    args: EngineArgs,
    path: Path,
    config: Eagle3Config,
    abstract: Params,
    target_params: Params,
    *,
    mesh: Mesh,
    by_columns: bool,
) -> Params:
    """The head's params on the mesh; a dummy head reads the target's embedding, as most do."""
    if args.load_format == "dummy":
        own = {name: value for name, value in abstract.items() if name != "embed"}
        vocab_size = config.layer.vocab_size
        made = dummy_params(
            {"draft": own}, mesh=mesh, vocab_size=vocab_size, by_columns=by_columns
        )["draft"]
        return {**made, "embed": target_params["embed"]}
    dtype = abstract["fc"]["kernel"].dtype
    weights = load_eagle3(
        path, config, target_params=target_params, dtype=np.dtype(dtype), shards=mesh.size
    )
    return place(mesh, {"draft": weights}, by_columns=by_columns)["draft"]


def place(mesh: Mesh, params: dict[str, Any], *, by_columns: bool = False) -> dict[str, Any]:
    """Puts each array where its rule says (core.sharding)."""
    places = sharding.param_places(mesh, params, by_columns=by_columns)
    # Waits: what another order in memory takes meanwhile is gone before the pool is sized.
    placed: dict[str, Any] = jax.block_until_ready(jax.device_put(params, places))
    return placed


def check_divisible(config: TransformerConfig, *, shards: int) -> None:
    """Raises ConfigError naming the first size that `shards` does not divide."""
    sizes = {
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % shards:
            raise ConfigError(f"tp_size is {shards}; expected a divisor of {name} {size}")
    groups = config.num_kv_heads
    if groups % shards and shards % groups:
        raise ConfigError(
            f"tp_size is {shards}; expected a divisor or a multiple of num_key_value_heads {groups}"
        )

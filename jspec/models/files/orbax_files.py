"""Orbax checkpoints: a flat tree of tensors under their published names, in their own types."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jspec.errors import CheckpointError, OutputError, shown
from jspec.models.files.array_tensors import HostArray, LazyFile, LazyHeader, LazyTensor, dtype_name

_SYSTEM_ERROR = re.compile(r"([^:\[\]]+) \[os_error_code")


def open_orbax(path: Path) -> LazyFile:
    """Open an orbax directory, reading shapes only. Raises CheckpointError."""
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        metadata = checkpointer.metadata(path.resolve()).item_metadata
        tree: Mapping[str, Any] = metadata.tree
        described = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}
    except Exception as error:  # orbax and its storage raise arbitrary exceptions
        raise CheckpointError(
            f"{path}: cannot be read: {error}; expected a checkpoint that jspec convert wrote"
        ) from error
    lock = threading.Lock()  # a checkpointer is not thread-safe
    tensors = {
        name: LazyTensor(
            shape, dtype_name(dtype), partial(_restore, checkpointer, lock, path, name, shape)
        )
        for name, (shape, dtype) in described.items()
    }
    return LazyFile(path, LazyHeader(tensors))


def _restore(
    checkpointer: Any, lock: threading.Lock, path: Path, name: str, shape: tuple[int, ...]
) -> HostArray:
    asked = ocp.args.PyTreeRestore(
        item={name: 0},
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
        partial_restore=True,
    )
    try:
        with lock:
            found = np.asarray(checkpointer.restore(path.resolve(), args=asked)[name])
    except Exception as error:
        raise CheckpointError(f"{path}: cannot read {name}: {error}") from error
    if found.shape != shape:
        raise CheckpointError(f"{path}: {name} has shape {found.shape}; expected {shape}")
    return found


def save_orbax(path: Path, tensors: Mapping[str, HostArray]) -> None:
    try:
        with without_tracebacks():
            ocp.PyTreeCheckpointer().save(path.resolve(), dict(tensors))
    except Exception as error:
        raise OutputError(f"{path}: cannot be written: {reason_of_orbax(error)}") from error


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Suppress what orbax's threads print about an error that it also raises, even later."""
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level

    def say(found: sys.UnraisableHookArgs) -> None:
        if not isinstance(found.exc_value, RuntimeError) or "loop is closed" not in str(
            found.exc_value
        ):
            hook(found)

    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = say
    try:
        yield
        sys.unraisablehook = hook
    finally:
        logger.setLevel(level)


def reason_of_orbax(error: Exception) -> str:
    """Return the system's message in an orbax storage error, else the start of the error."""
    found = _SYSTEM_ERROR.search(str(error))
    return found[1].strip() if found else f"{type(error).__name__}: {shown(str(error))}"

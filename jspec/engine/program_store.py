"""Compiled step programs on disk: a second start neither traces, lowers nor compiles.

jax's own cache is asked with the lowered program, and lowering an 8B model's 21 programs takes a
minute. This one is asked with all that a program is made from: the sources that trace it, the
static program, the limits, shapes and places, the compiler's options, versions, flags and devices.
What is not found, or cannot be read, is compiled. The directory may be deleted at any time; like
jax's, it must be as trustworthy as the code, since what is loaded from it is run.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

log = logging.getLogger(__name__)

# What can change a program; text, server and scheduler cannot.
SOURCES = ("core", "engine", "layers", "models", "pallas_kernels", "sampling", "speculative")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ProgramStore:
    """Executables by a digest of what they were made from."""

    directory: Path

    def path(self, *parts: Any, mesh: Mesh, arrays: Any) -> Path | None:
        """Where the program made from `parts` (by their repr) for `arrays` on `mesh` belongs.

        None if a part cannot be told from another one: its repr is an address in memory.
        """
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(arrays)]
        text = repr((parts, shapes, str(jax.tree.structure(arrays)), surroundings(mesh)))
        if " at 0x" in text:
            return None
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()}.program"

    def load(self, path: Path, *, mesh: Mesh, inputs: Any, outputs: Any) -> Any | None:
        """The executable, or None where there is none that can be read.

        inputs: a tuple like its arguments, outputs like its results; only their structure counts.
        """
        try:
            digest, payload = _split(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %r", path, error)
            return None
        if hashlib.sha256(payload).digest() != digest:
            log.warning("%s is damaged and will be written again", path)
            return None
        try:
            return serialize_executable.deserialize_and_load(
                payload,
                jax.tree.structure((inputs, {})),
                jax.tree.structure(outputs),
                execution_devices=list(mesh.devices.flat),
            )
        except Exception as error:  # whatever a library finds wrong with it, compiling helps
            log.warning("%s cannot be loaded and will be written again: %r", path, error)
            return None

    def save(self, path: Path, executable: Any) -> None:
        """Writes it whole or not at all. One that cannot be written costs the next start, no more.

        `executable` must have been compiled here: one out of jax's cache may not be complete.
        """
        try:
            payload, _, _ = serialize_executable.serialize(executable)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(hashlib.sha256(payload).digest() + payload)
            part.replace(path)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            log.warning("%s could not be written: %r", path, error)


def _split(content: bytes) -> tuple[bytes, bytes]:
    return content[:DIGEST_BYTES], content[DIGEST_BYTES:]


def surroundings(mesh: Mesh) -> tuple[Any, ...]:
    """All that is not an argument: sources, versions, flags, settings, devices."""
    devices = list(mesh.devices.flat)
    client = devices[0].client
    return (
        _sources_digest(),
        [metadata.version(name) for name in ("jax", "jaxlib", "flax")],
        platform.python_version(),
        [os.environ.get(flag, "") for flag in FLAGS],
        [getattr(jax.config, name, None) for name in SETTINGS],
        (client.platform, client.platform_version),
        [(device.device_kind, device.id) for device in devices],
        _processor() if client.platform == "cpu" else "",
    )


@functools.cache
def _sources_digest() -> str:
    found = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(path for name in SOURCES for path in (root / name).rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _processor() -> str:
    """What the CPU can do: a program for one may not run on another."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        return platform.processor()
    lines = flags.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

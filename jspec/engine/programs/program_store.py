"""Compiled step programs on disk, so that a second start neither traces, lowers nor compiles.

jax's own cache is keyed by the lowered program; this store by all inputs of a program: sources,
static program, shapes and shardings, compiler options, versions, flags and devices. Its directory
may be deleted at any time. Files that another user may have written are not loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jspec.device.hosts import is_one_process
from jspec.engine.programs.program_bucket import ProgramBucket
from jspec.engine.programs.source_digest import sources_digest
from jspec.engine.programs.trusted_files import distrust

log = logging.getLogger(__name__)

# name prefixes of libraries whose versions are part of the key
LIBRARIES = ("jax", "flax", "libtpu", "nvidia-", "jspec")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
DIGEST_BYTES = 32
PART, PART_SECONDS = ".part", 3600.0  # suffix of a program being written, and its maximum age


@dataclass(frozen=True, slots=True)
class ProgramStore:
    """Executables by a digest of their inputs. Open it early, before sources may change."""

    directory: Path
    sources: str | None  # digest; None: no source files, or not those of the running code
    bucket: ProgramBucket | None = None  # shares programs

    @classmethod
    def open(cls, directory: Path, bucket: ProgramBucket | None = None) -> ProgramStore:
        """Open a store: digest the sources, and remove old partial files of killed writers."""
        for part in directory.glob(f"*{PART}"):
            with contextlib.suppress(OSError):  # another start may have removed it
                if time.time() - part.stat().st_mtime > PART_SECONDS:
                    part.unlink()
        return cls(directory, sources_digest(), bucket)

    def path(self, *parts: Any, mesh: Mesh, arrays: Any) -> Path | None:
        """Return the path of the program made from `parts` (by their repr) for `arrays` on `mesh`;
        None if the sources are unknown, or a repr contains a memory address."""
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(arrays)]
        around = (self.sources, surroundings(mesh))
        text = repr((parts, shapes, str(jax.tree.structure(arrays)), around))
        if self.sources is None or " at 0x" in text:
            return None
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()}.program"

    def paths(
        self, makings: dict[Any, tuple[Any, ...]], *, mesh: Mesh, arrays: Any
    ) -> dict[Any, Path]:
        found = {key: self.path(*m, mesh=mesh, arrays=arrays) for key, m in makings.items()}
        known = {key: path for key, path in found.items() if path is not None}
        return known if len(known) == len(found) else {}

    def fetch(self, path: Path) -> None:
        if self.bucket is not None:
            self.bucket.fetch(path)

    @staticmethod
    def load(path: Path, *, mesh: Mesh, inputs: Any, outputs: Any) -> Any | None:
        """Return the executable, or None if it is missing, unreadable or another user's. inputs,
        outputs: its arguments and results, of which only the tree structure is used."""
        try:
            with path.open("rb") as file:
                why = distrust(os.fstat(file.fileno()))
                content = b"" if why else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %r", path, error)
            return None
        if why:
            _warn_of_file(path.parent, why)
            return None
        payload = content[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != content[:DIGEST_BYTES]:
            log.warning("%s is damaged and will be written again", path)
            return None
        try:
            return serialize_executable.deserialize_and_load(
                payload,
                jax.tree.structure((inputs, {})),
                jax.tree.structure(outputs),
                backend=mesh.devices.flat[0].client,
                execution_devices=list(mesh.devices.flat),
            )
        except Exception as error:  # compiling works around any loading error
            log.warning("%s cannot be loaded and will be written again: %r", path, error)
            return None

    def save(self, path: Path, executable: Any) -> None:
        """Write the executable atomically; a failure only costs the next start. It must have been
        compiled here: one from jax's cache may be incomplete."""
        if sources_digest() != self.sources:
            log.warning("jspec's sources have changed since the start; %s is not written", path)
            return
        try:
            payload, _, _ = serialize_executable.serialize(executable)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=PART)
            part = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(payload).digest() + payload)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            if self.bucket is not None:
                self.bucket.keep(path)
        # e.g. a callback cannot be serialized, or the disk is full; the program still runs
        except Exception as error:
            log.warning("%s could not be written: %r", path, error)


@functools.cache  # warn once, not once per program
def _warn_of_file(folder: Path, why: str) -> None:
    log.warning("a program in %s %s: all such programs will be written again", folder, why)


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """Return the inputs of a program that are neither arguments nor sources, by name."""
    devices = list(mesh.devices.flat)
    client = devices[0].client
    return {
        "libraries": _libraries(),
        "python": platform.python_version(),
        "flags": {flag: os.environ.get(flag, "") for flag in FLAGS},
        "settings": {name: getattr(jax.config, name, None) for name in SETTINGS},
        "platform": (client.platform, client.platform_version),
        "mesh": dict(mesh.shape),
        "devices": [(device.device_kind, device.id) for device in devices],
        "processor": _processor() if client.platform == "cpu" else "",
        **({} if is_one_process(mesh) else {"process": client.process_index()}),
    }


@functools.cache
def _libraries() -> tuple[tuple[str, str], ...]:
    named = ((d.metadata["Name"] or "", d.version) for d in metadata.distributions())
    return tuple(sorted({pair for pair in named if pair[0].lower().startswith(LIBRARIES)}))


def _processor() -> str:
    """Return the CPU's feature flags, since a program for one CPU may not run on another."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        return platform.processor()
    lines = flags.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

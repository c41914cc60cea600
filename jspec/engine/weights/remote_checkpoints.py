"""Remote checkpoints: gs://bucket/path (by gcsfs), and org/name on the Hugging Face hub (by
huggingface_hub). A local directory has precedence."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jspec.engine.programs.program_bucket import GS
from jspec.errors import CheckpointError, NoCheckpointError, reason_of, shown
from jspec.models.files.checkpoint import LAYOUT, check_directory
from jspec.models.files.lora_files import LAYOUT as ADAPTER_LAYOUT

log = logging.getLogger(__name__)
A_REPOSITORY = "a repository of Hugging Face's hub"
LISTING = ".listing.json"  # written last, so all that it lists is complete
_REPOSITORY = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Files of a repository to fetch; torch's only if it has no safetensors.
_FILES = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model")
_TORCH_FILES = ("*.bin", "*.pt")


def local_directories(named: Mapping[str, str]) -> dict[str, Path]:
    """Return each value's directory, checking all before a download. Raises CheckpointError."""
    ways = {name: _way(name, value) for name, value in named.items()}
    return {name: way(name, named[name]) for name, way in ways.items()}


def _layout(name: str) -> str:
    return ADAPTER_LAYOUT if name == "lora_path" else LAYOUT


def _way(name: str, value: str) -> Callable[[str, str], Path]:
    try:
        is_here = Path(value).is_dir()
    except OSError as error:  # e.g. a name that is too long, or no permission
        raise NoCheckpointError(
            f"{name} is {shown(value)}: {reason_of(error)}; expected a directory with "
            f"{_layout(name)}"
        ) from error
    if is_here:
        return _from_here
    if value.startswith(GS):
        _library("gcsfs", name, value, extra="gs", what="a bucket")
        return _from_bucket
    if _REPOSITORY.fullmatch(value):
        _library("huggingface_hub", name, value, extra="hub", what=A_REPOSITORY)
        return _from_hub
    raise NoCheckpointError(f"{name} is {value!r}; expected a directory with {_layout(name)}")


def _library(module: str, name: str, value: str, *, extra: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise NoCheckpointError(
            f"{name} is {value!r}: there is no such directory here, and {what} is read by "
            f"{module}, which is not installed; expected a directory with {_layout(name)}, or "
            f"pip install 'jspec[{extra}]'"
        ) from None


def _from_here(name: str, value: str) -> Path:
    path = Path(value)
    if name not in ("tokenizer_path", "lora_path"):  # which have no config.json
        check_directory(name, path)
    return path


@functools.cache
def _from_hub(name: str, value: str) -> Path:
    hub = importlib.import_module("huggingface_hub")
    found = _REPOSITORY.fullmatch(value)
    assert found is not None
    log.info("fetching %s of Hugging Face's hub", value)

    def fetch(patterns: tuple[str, ...]) -> Path:
        return Path(
            hub.snapshot_download(
                found["id"],
                revision=found["revision"],
                allow_patterns=list(patterns),
                # A checkpoint's files are at the top level, except for additional chat templates.
                ignore_patterns=[f"*/{pattern}" for pattern in patterns if pattern != "*.jinja"],
            )
        )

    try:
        directory = fetch(_FILES)
        if not any(directory.glob("*.safetensors")):
            directory = fetch((*_FILES, *_TORCH_FILES))
    except Exception as error:  # the library and its dependencies raise many kinds
        raise CheckpointError(
            f"{name} is {value!r}: there is no such directory here, and {A_REPOSITORY} could not "
            f"be fetched by that name ({type(error).__name__}: {_first_line(error)}); expected a "
            f"directory with {_layout(name)}, or org/name, or org/name@revision"
        ) from error
    return directory


@functools.cache
def _from_bucket(name: str, value: str) -> Path:
    gcsfs = importlib.import_module("gcsfs")
    try:
        bucket = gcsfs.GCSFileSystem()
        files = bucket.find(value.removeprefix(GS).rstrip("/"), detail=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} is {value!r}, which could not be listed ({type(error).__name__}: "
            f"{_first_line(error)}); expected {GS}BUCKET/PATH of {_layout(name)}"
        ) from error
    if not files:
        raise CheckpointError(f"{name} is {value!r}, which holds no file; expected {_layout(name)}")
    return _copied(name, value, bucket, files)


def _copied(name: str, value: str, bucket: Any, files: Mapping[str, Mapping[str, Any]]) -> Path:
    base = value.removeprefix(GS).rstrip("/")
    digest = hashlib.sha256(base.encode()).hexdigest()[:12]
    last = base.rsplit("/", 1)[-1]
    directory = Path.home() / ".cache" / "jspec" / "models" / f"{last}-{digest}"
    listing = json.dumps(
        {path: [entry["size"], str(entry.get("generation", ""))] for path, entry in files.items()},
        sort_keys=True,
    )
    kept = directory / LISTING
    if kept.is_file() and kept.read_text(encoding="utf-8") == listing:
        return directory
    gib = sum(entry["size"] for entry in files.values()) / 2**30
    log.info("copying %.1f GiB of %s to %s", gib, value, directory)
    try:
        shutil.rmtree(directory, ignore_errors=True)
        for path in files:
            to = directory / path.removeprefix(base).lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            bucket.get_file(path, str(to))
        kept.write_text(listing, encoding="utf-8")
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)  # free the space of an incomplete copy
        raise CheckpointError(
            f"{name} is {value!r}, which could not be copied to {str(directory)!r} "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error
    return directory


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]

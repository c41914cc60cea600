"""An engine's device memory is free once it is shut down, or once its start has failed.

Reference counts must suffice: a garbage collection may come after the process is out of memory maps
(each compiled program takes hundreds on a CPU), or after the next engine needs the memory.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import BUNDLED, load_models, resolve_paths
from jspec.errors import CheckpointError
from jspec.serving.engine import Engine
from tests.support.tiny_models import write_tiny_pair


@dataclass(frozen=True)
class Held:
    """The memory that the process uses."""

    num_arrays: int
    num_programs: int
    num_maps: int

    @classmethod
    def now(cls) -> Held:
        maps = Path("/proc/self/maps")
        return cls(
            num_arrays=len(jax.live_arrays()),
            num_programs=sum(type(x) is jax.stages.Compiled for x in gc.get_objects()),
            num_maps=len(maps.read_text().splitlines()) if maps.exists() else 0,
        )


@dataclass(frozen=True)
class Failed:
    """A start that failed after it had compiled everything, and the memory in use around it."""

    arguments: dict[str, Any]
    before: Held
    after: Held


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failed]:
    """Fail as late as possible; the programs are stored by then."""
    settings: Any = jax.config
    directory = settings.jax_compilation_cache_dir
    folder = tmp_path_factory.mktemp("release")
    pair = write_tiny_pair(folder, max_position=64)
    arguments = {
        "model_path": str(pair.target_path),
        "max_running_requests": 1,
        "chunked_prefill_size": 8,
        "disable_logprobs": True,
        "max_total_tokens": 64,
        "dtype": "float32",
        "compilation_cache_dir": str(folder / "programs"),
    }
    gc.collect()
    gc.disable()
    before = Held.now()
    error = start_and_fail(arguments)
    yield Failed(arguments, before, Held.now())
    assert error.__traceback__ is not None
    gc.enable()
    jax.config.update("jax_compilation_cache_dir", directory)


def start_and_fail(arguments: dict[str, Any]) -> RuntimeError:
    """Fail after the last program."""

    def fail(done: int, total: int, _what: str, _how: str) -> None:
        if done == total:
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own") as caught:
        Engine(**arguments, progress=fail)
    return caught.value


def use(arguments: dict[str, Any]) -> Engine:
    """Start an engine, generate, and shut it down."""
    engine = Engine(**arguments)
    engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})
    engine.shutdown()
    return engine


@pytest.mark.slow
def test_a_start_that_failed_keeps_no_programs_though_its_error_is_kept(
    first_start: Failed,
) -> None:
    assert first_start.after.num_programs == first_start.before.num_programs


@pytest.mark.slow
def test_engines_that_were_shut_down_hold_nothing_though_they_are_kept(
    first_start: Failed,
) -> None:
    kept = [use(first_start.arguments)]  # the first run makes jax's own constants
    before = Held.now()
    kept += [use(first_start.arguments) for _ in range(2)]
    errors = [start_and_fail(first_start.arguments)]
    after = Held.now()
    assert (after.num_arrays, after.num_programs) == (before.num_arrays, before.num_programs)
    assert after.num_maps < before.num_maps + 100  # one engine's programs take about 400
    assert all(engine.is_closed for engine in kept)
    assert all(error.__traceback__ is not None for error in errors)
    assert kept[0].get_server_info()["num_programs"] == 4


def test_a_head_that_cannot_be_read_leaves_nothing_of_its_target_though_its_error_is_kept(
    tmp_path: Path,
) -> None:
    """The error shows only after the target is read: the head's names and shapes are right."""
    shutil.copytree(BUNDLED / "draft", tmp_path / "draft")
    (stored,) = (tmp_path / "draft").glob("*.safetensors")
    tensors = load_file(stored)
    tensors["d2t"] = np.zeros_like(tensors["d2t"]) - 5
    save_file(tensors, stored)
    args = EngineArgs(
        model_path=str(BUNDLED / "target"),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(tmp_path / "draft"),
    )
    mesh = Parallel().mesh(jax.devices()[:1])
    gc.collect()
    gc.disable()
    try:
        before = bytes_on_devices()
        with pytest.raises(CheckpointError, match="d2t gives target ids from -5 ") as caught:
            load_models(args, resolve_paths(args), mesh=mesh)
        assert caught.value.__traceback__ is not None
        assert bytes_on_devices() == before
        placed = load_models(EngineArgs(), resolve_paths(EngineArgs()), mesh=mesh)
        assert bytes_on_devices() > before  # so that the figure means something
        del placed
    finally:
        gc.enable()


def bytes_on_devices() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())

"""An engine that serves with few programs gets the others while it serves."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.config.limits import SpeculativeConfig
from jspec.device.parallel import Parallel
from jspec.engine.programs import build_programs
from jspec.engine.programs.compilation import Recipe
from jspec.engine.programs.program_growth import (
    DEVICE_MEMORY,
    MODULE,
    BuildError,
    Made,
    ProcessMaker,
    ProgramGrowth,
    ThreadMaker,
    child_environment,
    maker_of,
)
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.runner import DeviceRunner, init_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.messages.plan import RowRef, StepKind
from jspec.messages.step_options import ALL, PLAIN
from jspec.models.decoder import Decoder
from jspec.models.placement import abstract_params
from jspec.models.registry import family_named
from jspec.pallas_kernels.bundles import OPS
from jspec.serving.engine import Engine
from jspec.spec.axes import MODEL
from jspec.speculative.drafter import NoDrafter
from jspec.speculative.step import StepProgram
from tests.support.flat_limits import flat_limits
from tests.support.plans import plan_of
from tests.support.tiny_models import tiny_target_config

PATIENCE = 120.0
CONFIG = tiny_target_config(num_layers=1)
LIMITS = flat_limits(
    draft_shape=SpeculativeConfig.plain(),
    num_slots=2,
    num_pages=8,
    page_size=8,
    context_length=32,
    decode_buckets=(2,),
    prefill_buckets=(8,),
    prefill_rows=2,
)
KEY = ProgramKey(StepKind.DECODE, 2, PLAIN)
OTHER = ProgramKey(StepKind.DECODE, 2, ALL)
MESH = Parallel().mesh(jax.devices("cpu")[:1])


def recipe() -> Recipe:
    target = Decoder(CONFIG, OPS["xla"], Shard(1, MODEL))
    program = StepProgram(target=target, drafter=NoDrafter(), draft_shape=LIMITS.draft_shape)
    return Recipe.of(
        program,
        LIMITS,
        params={"target": abstract_params(target.table, dtype=jnp.float32), "draft": {}},
        state=jax.eval_shape(lambda: init_state(program, LIMITS, shards=1, kv_dtype=jnp.float32)),
    )


class FakeMaker:
    """A maker of given results or failures, which waits before each for `go`."""

    def __init__(self, *made: Made, error: Exception | None = None) -> None:
        self.go = threading.Semaphore(0)
        self.num_stops = 0
        self._made = made
        self._error = error

    def __iter__(self) -> Iterator[Made]:
        for each in self._made:
            self.go.acquire()
            yield each
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self.num_stops += 1
        self.go.release()


class Taker:
    """The part of a runner that a growth uses."""

    def __init__(self) -> None:
        self.taken: list[Made] = []

    def add(self, key: ProgramKey, executable: Any) -> None:
        self.taken.append((key, executable))


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def grow(maker: FakeMaker, taker: Taker, *, num_later: int = 2) -> ProgramGrowth:
    growth = ProgramGrowth(maker, num_wanted=5, num_later=num_later, started=time.monotonic())
    growth.start(weakref.WeakMethod(taker.add))
    return growth


def test_what_is_made_is_handed_on_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    maker, taker = FakeMaker((KEY, "a"), (OTHER, "b")), Taker()
    growth = grow(maker, taker)
    assert caplog.messages == ["ready with 3 of 5 programs, the rest is being built"]
    maker.go.release()
    wait_for(lambda: taker.taken == [(KEY, "a")])
    maker.go.release()
    wait_for(lambda: len(caplog.messages) == 2)
    assert taker.taken == [(KEY, "a"), (OTHER, "b")]
    assert caplog.messages[1].startswith("all 5 programs are ready after 0.")
    growth.stop()
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [(BuildError("no room"), "no room"), (OSError("x"), "OSError('x')"), (None, "ended early")],
)
def test_a_failure_is_one_warning(
    error: Exception | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    maker, taker = FakeMaker((KEY, "a"), error=error), Taker()
    maker.go.release()
    growth = grow(maker, taker)
    wait_for(lambda: len(caplog.records) == 1)
    growth.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1 of 5 programs could not be built, the others serve all requests" in caplog.text
    assert reason in caplog.text
    assert taker.taken == [(KEY, "a")]


def test_nothing_is_handed_on_after_the_stop(caplog: pytest.LogCaptureFixture) -> None:
    maker, taker = FakeMaker((KEY, "a"), (OTHER, "b")), Taker()
    growth = grow(maker, taker)
    growth.stop()
    growth.stop()
    assert maker.num_stops >= 2
    assert not [t for t in threading.enumerate() if t.name == "jspec-programs"]
    assert taker.taken == []
    assert not caplog.records


def test_a_runner_that_was_dropped_ends_it() -> None:
    maker, taker = FakeMaker((KEY, "a"), (OTHER, "b")), Taker()
    growth = grow(maker, taker)
    del taker
    maker.go.release()
    wait_for(lambda: maker.num_stops > 0)
    growth.stop()


def test_a_runner_runs_what_was_added_from_the_next_step_on() -> None:
    ran: list[str] = []

    def executable(name: str) -> Any:
        def run(_params: Any, state: Any, _batch: Any) -> Any:
            ran.append(name)
            return state, jnp.zeros((1,))

        return run

    first = {OTHER: executable("all")}
    runner = DeviceRunner(
        limits=LIMITS,
        params={},
        state=recipe().state,
        executables=first,
        mesh=MESH,
        vocab_size=CONFIG.vocab_size,
    )
    maker = FakeMaker((KEY, executable("plain")))
    runner.grow(ProgramGrowth(maker, num_wanted=2, num_later=1, started=0.0))
    plan = plan_of(StepKind.DECODE, runner.limits.draft_shape, rows=(RowRef(1, 1),))
    runner.dispatch(plan)
    assert (runner.num_programs, runner.num_programs_wanted) == (1, 2)
    maker.go.release()
    wait_for(lambda: runner.num_programs == 2)
    runner.dispatch(plan)
    assert ran == ["all", "plain"]
    assert list(first) == [OTHER]
    runner.close()
    runner.add(KEY, executable("late"))
    assert runner.ready_programs == ()
    assert (runner.num_programs, runner.num_programs_wanted) == (2, 2)


def test_without_a_store_a_thread_makes_them() -> None:
    (found,) = maker_of(recipe(), (KEY,), mesh=MESH, store=None)
    assert found[0] == KEY
    assert isinstance(found[1], jax.stages.Compiled)


def test_a_thread_that_computes_otherwise_makes_none() -> None:
    with jax.default_matmul_precision("bfloat16"):
        maker = maker_of(recipe(), (KEY,), mesh=MESH, store=None)
    assert isinstance(maker, ThreadMaker)
    with pytest.raises(BuildError, match=r"started with .*'bfloat16'.*expected jax.config"):
        next(iter(maker))


def process_maker(store: ProgramStore, keys: tuple[ProgramKey, ...] = (KEY,)) -> ProcessMaker:
    maker = maker_of(recipe(), keys, mesh=MESH, store=store)
    assert isinstance(maker, ProcessMaker)
    return maker


def test_the_building_process_refuses_to_make_other_programs(tmp_path: Path) -> None:
    task = process_maker(ProgramStore.open(tmp_path)).task
    assert pickle.loads(pickle.dumps(task)) == task
    moved = replace(task, paths={KEY: tmp_path / "another.program"})
    with pytest.raises(ConfigError, match="under other names than the engine's"):
        build_programs.build(moved, progress=io.StringIO())
    elsewhere = replace(task, device_ids=(99,))
    with pytest.raises(ConfigError, match=r"devices \[99\] are not among"):
        build_programs.build(elsewhere, progress=io.StringIO())


def test_why_the_process_failed_is_said(tmp_path: Path) -> None:
    task = replace(process_maker(ProgramStore.open(tmp_path)).task, device_ids=(99,))
    maker = ProcessMaker(task, mesh=MESH)
    with pytest.raises(BuildError, match=r"ended with 1: .*devices \[99\] are not among"):
        list(maker)
    assert not is_there(maker.process_id)


def test_the_process_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """The system closes the other end of its pipe."""
    task = process_maker(ProgramStore.open(tmp_path)).task
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE],
        input=pickle.dumps(task),  # then the pipe closes
        env=child_environment() | DEVICE_MEMORY,
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == b""
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_later(tmp_path: Path) -> None:
    kept = tmp_path / "a.program", tmp_path / "new.part"
    old = tmp_path / "old.part"
    for path in (*kept, old):
        path.write_bytes(b"x")
    for path in (kept[0], old):
        os.utime(path, (0, 0))
    ProgramStore.open(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def is_there(process_id: int | None) -> bool:
    assert process_id is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False


def test_stopping_ends_the_process_at_once(tmp_path: Path) -> None:
    maker, taker = process_maker(ProgramStore.open(tmp_path)), Taker()
    growth = ProgramGrowth(maker, num_wanted=2, num_later=1, started=0.0)
    growth.start(weakref.WeakMethod(taker.add))
    wait_for(lambda: maker.process_id is not None)
    assert is_there(maker.process_id)
    growth.stop()
    assert not is_there(maker.process_id)
    assert not [t for t in threading.enumerate() if t.name == "jspec-programs"]
    before_it_began = process_maker(ProgramStore.open(tmp_path))
    before_it_began.stop()
    assert list(before_it_began) == []
    assert before_it_began.process_id is None


# A whole engine: five programs, of which four serve everything.


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    settings: Any = jax.config
    directory = settings.jax_compilation_cache_dir
    folder = tmp_path_factory.mktemp("growth")
    config = tiny_target_config(num_layers=1, max_position=64)
    text = json.dumps(family_named(config.family).to_json(config))
    (folder / "config.json").write_text(text, encoding="utf-8")
    yield {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        "max_total_tokens": 128,
        "dtype": "float32",
        "compile_at_start": "first",
        "disable_logprobs": True,
        "compilation_cache_dir": str(folder / "programs"),
    }
    jax.config.update("jax_compilation_cache_dir", directory)


def counts(engine: Engine) -> tuple[int, int]:
    info = engine.get_server_info()
    return info["num_programs"], info["num_programs_wanted"]


def ids_of(engine: Engine, **sampling: Any) -> list[int]:
    params = {"max_new_tokens": 12, "sampling_seed": 7, "temperature": 1.0, **sampling}
    return engine.generate(input_ids=[3, 1, 4], sampling_params=params)["output_ids"]


def test_an_engine_serves_before_all_programs_are_there(arguments: dict[str, Any]) -> None:
    with Engine(**arguments) as engine:
        assert counts(engine) == (5, 6)
        early = [ids_of(engine), ids_of(engine, top_p=0.8), ids_of(engine, temperature=0.0)]
        wait_for(lambda: counts(engine) == (6, 6))
        late = [ids_of(engine), ids_of(engine, top_p=0.8), ids_of(engine, temperature=0.0)]
        assert late == early
    started: list[str] = []
    with Engine(progress=lambda *said: started.append(said[3]), **arguments) as engine:
        assert counts(engine) == (6, 6)
        assert ids_of(engine, top_p=0.8) == early[1]
    assert started == ["loaded"] * 6


def building_processes() -> list[str]:
    """Return the ids of our building processes; one may end while it is read."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if parent == str(os.getpid()) and MODULE in (process / "cmdline").read_text():
                found.append(process.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")
def test_an_engine_that_is_shut_down_leaves_no_process(
    arguments: dict[str, Any],
) -> None:
    stored = Path(arguments["compilation_cache_dir"]) / "steps"
    built_last = max(stored.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    built_last.unlink()
    engine = Engine(**arguments)
    assert counts(engine) == (5, 6)
    wait_for(lambda: building_processes() != [])
    engine.shutdown()
    assert building_processes() == []
    assert not [t for t in threading.enumerate() if t.name == "jspec-programs"]
    assert not built_last.exists()

"""Compiled step programs on disk: found again, told apart, and never trusted blindly."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import SpeculativeConfig
from jspec.device.parallel import Parallel
from jspec.engine.programs import compilation, program_store, source_digest, trusted_files
from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.programs.trusted_files import distrust
from jspec.engine.runner import init_state, place_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import layout_of, shape_of
from jspec.engine.weights.dummy_weights import dummy_params
from jspec.layers.linear import Shard
from jspec.messages.plan import StepKind
from jspec.messages.step_options import ALL, PLAIN
from jspec.models.decoder import Decoder
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.axes import MODEL
from jspec.speculative.drafter import NoDrafter
from jspec.speculative.step import StepProgram
from tests.support.flat_limits import flat_limits, with_limits
from tests.support.tiny_models import tiny_target_config

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
MESH = Parallel().mesh(jax.devices("cpu")[:1])


def static_program() -> StepProgram:
    target = Decoder(CONFIG, OPS["xla"], Shard(1, MODEL))
    return StepProgram(target=target, drafter=NoDrafter(), draft_shape=LIMITS.draft_shape)


def make_program() -> tuple[StepProgram, Any]:
    program = static_program()
    return program, dummy_params(
        program.tables, mesh=MESH, vocab_size=CONFIG.vocab_size, dtype=jnp.float32
    )


def fresh_state(program: StepProgram) -> Any:
    return place_state(init_state(program, LIMITS, shards=1, kv_dtype=jnp.float32), program, MESH)


def start(store: ProgramStore, *, reports: list[str] | None = None) -> Any:
    """Return the decode program as an engine gets it, and its output."""
    program, params = make_program()
    state = fresh_state(program)
    found = compile_all(
        program,
        LIMITS,
        mesh=MESH,
        params=params,
        state=state,
        keys=(KEY,),
        store=store,
        progress=None if reports is None else lambda *said: reports.append(f"{said[3]} {said[2]}"),
    )
    packed = layout_of(KEY, LIMITS)
    fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
    fields["slots"][:] = (1, 2)
    state, output = found[KEY](params, state, jnp.asarray(packed.pack(fields)[None]))
    _, output = found[KEY](params, state, jnp.asarray(packed.pack(fields)[None]))
    (emitted,) = np.asarray(output)
    return emitted


def test_a_second_start_traces_nothing_and_emits_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProgramStore.open(tmp_path / "steps")
    reports: list[str] = []
    first = start(store, reports=reports)
    (written,) = store.directory.iterdir()
    assert written.suffix == ".program"
    monkeypatch.setattr(compilation, "lower", None)  # calling it fails the test
    np.testing.assert_array_equal(start(store, reports=reports), first)
    assert reports == ["compiled decode B=2", "loaded decode B=2"]


@pytest.mark.parametrize("damage", ["flipped", "another file"])
def test_what_cannot_be_read_is_written_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore.open(tmp_path)
    first = start(store)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    foreign = b"no executable"
    path.write_bytes(
        {
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "another file": hashlib.sha256(foreign).digest() + foreign,
        }[damage]
    )
    np.testing.assert_array_equal(start(store), first)
    assert "written again" in caplog.text
    assert len(path.read_bytes()) > len(whole) // 2
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_program_that_others_may_write_is_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, reports = ProgramStore.open(tmp_path), list[str]()
    start(store, reports=reports)
    (path,) = tmp_path.iterdir()
    path.chmod(0o666)
    assert store.load(path, mesh=MESH, inputs=(), outputs=()) is None
    start(store, reports=reports)
    assert path.stat().st_mode & 0o777 == 0o600
    start(store, reports=reports)
    assert reports == ["compiled decode B=2", "compiled decode B=2", "loaded decode B=2"]
    assert caplog.text.count("may be written by all users") == 1


OWN = os.geteuid()


@pytest.mark.parametrize(
    ("mode", "owner", "group", "why"),
    [
        (0o644, OWN, 77, ""),
        (0o755, 0, 77, ""),
        (0o600, OWN + 1, 77, f"is owned by user {OWN + 1}"),
        (0o646, OWN, 77, "may be written by all users"),
        (0o660, OWN, 77, "may be written by group 77"),
        (0o660, OWN, 78, "may be written by group 78"),
        (0o660, OWN, 79, ""),  # the user's own group
        (0o660, OWN, 80, ""),  # a group without members, as of a container
    ],
)
def test_a_file_is_trusted_if_no_other_user_may_write_it(
    monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, group: int, why: str
) -> None:
    users = [("root", 0, 0), ("self", OWN, 79), ("other", OWN + 1, 77)]
    known = [SimpleNamespace(pw_name=n, pw_uid=u, pw_gid=g) for n, u, g in users]
    members = {77: [], 78: ["self", "far"], 79: ["self"]}
    monkeypatch.setattr(trusted_files.pwd, "getpwall", lambda: known)
    monkeypatch.setattr(
        trusted_files.grp, "getgrgid", lambda number: SimpleNamespace(gr_mem=members[number])
    )
    trusted_files._has_other_users.cache_clear()
    assert distrust(os.stat_result((mode, 1, 1, 1, owner, group, 1, 1, 1, 1))) == why
    trusted_files._has_other_users.cache_clear()


def test_jax_keeps_nothing_of_a_program_that_is_stored_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    compile_with, seen = compilation.compile_with, []

    def noting(lowered: Any, options: Any) -> Any:
        seen.append(settings.jax_enable_compilation_cache)
        return compile_with(lowered, options)

    monkeypatch.setattr(compilation, "compile_with", noting)
    try:
        start(ProgramStore.open(tmp_path))
        assert settings.jax_enable_compilation_cache is True
        start(ProgramStore(tmp_path, sources=None))  # which stores no program
        assert seen == [False, True]
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def places(store: ProgramStore) -> list[Path | None]:
    """Return the paths of the usual program and of others that differ from it in one respect."""
    program, params = make_program()
    arrays = (params, fresh_state(program))
    gpu, turned = (
        dataclasses.replace(program.target, ops=OPS["gpu"].with_columns(columns))
        for columns in (False, True)
    )
    options = {"option": 1}
    shape = shape_of(KEY, LIMITS)
    variants: list[tuple[Any, ...]] = [
        (shape, program, options),
        (dataclasses.replace(shape, kind=StepKind.PREFILL), program, options),
        (shape, dataclasses.replace(program, options=ALL), options),
        (shape, dataclasses.replace(program, target=gpu), options),
        (shape, dataclasses.replace(program, target=turned), options),
        (dataclasses.replace(shape, num_rounds=2), program, options),
        (shape, program, {"option": 2}),
    ]
    found = [store.path(*parts, mesh=MESH, arrays=arrays) for parts in variants]
    return [*found, store.path(*variants[0], mesh=MESH, arrays=(params, params))]


def test_programs_limits_options_and_shapes_are_told_apart(tmp_path: Path) -> None:
    store = ProgramStore.open(tmp_path)
    found = places(store)
    assert None not in found
    assert len(set(found)) == len(found)
    assert places(store) == found
    assert store.path(object(), mesh=MESH, arrays=()) is None  # all get one name


def files_of(folder: Path, **changes: Any) -> set[str]:
    """Return the names under which the decode program of LIMITS with `changes` is read and
    written."""
    limits = with_limits(LIMITS, **changes)
    program = static_program()
    state = jax.eval_shape(lambda: init_state(program, limits, shards=1, kv_dtype=jnp.float32))
    asked: list[Path] = []

    class Asking(ProgramStore):
        """An empty store that records what is requested."""

        def paths(self, *args: Any, **kwargs: Any) -> dict[Any, Path]:
            asked.extend(ProgramStore.paths(self, *args, **kwargs).values())
            raise LookupError

    with pytest.raises(LookupError):
        compile_all(
            program,
            limits,
            mesh=MESH,
            params={},
            state=state,
            keys=(KEY,),
            store=Asking(folder, "sources"),
        )
    return {path.name for path in asked}


@pytest.mark.parametrize(
    "change",
    [
        {"max_queued_requests": 7},
        {"prefill_rows": 1},
        {"prefill_buckets": (4, 8)},
        {"decode_buckets": (1, 2)},
        {"overlap_depth": 0, "num_pages": 8, "context_length": 32},
    ],
    ids=str,
)
def test_a_limit_that_only_the_host_reads_compiles_nothing_again(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert len(files_of(tmp_path)) == 1
    assert files_of(tmp_path, **change) == files_of(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_rounds": 2},
        {"page_size": 4},
        {"num_pages": 16},
        {"context_length": 16},
        {"num_slots": 3, "decode_buckets": (2, 3)},
    ],
    ids=str,
)
def test_a_limit_that_the_program_reads_makes_another(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert files_of(tmp_path, **change).isdisjoint(files_of(tmp_path))


SURROUNDINGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a library": lambda m: m.setattr(program_store, "_libraries", lambda: (("jax", "0"),)),
    "python": lambda m: m.setattr(program_store.platform, "python_version", lambda: "2.7"),
    "XLA_FLAGS": lambda m: m.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "LIBTPU_INIT_ARGS": lambda m: m.setenv("LIBTPU_INIT_ARGS", "--other"),
    "the processor": lambda m: m.setattr(program_store, "_processor", lambda: "flags: none"),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_surrounds_a_program_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_store.surroundings(MESH)
    assert program_store.surroundings(MESH) == before
    SURROUNDINGS[name](monkeypatch)
    assert program_store.surroundings(MESH) != before


@pytest.mark.parametrize("name", program_store.SETTINGS)
def test_jaxs_settings_are_told_apart(name: str) -> None:
    settings: Any = jax.config
    other = {
        "jax_default_matmul_precision": "bfloat16",
        "jax_default_prng_impl": "rbg",
        "jax_numpy_dtype_promotion": "strict",
    }
    was, before = getattr(settings, name), program_store.surroundings(MESH)
    try:
        jax.config.update(name, other.get(name, not was))
        assert program_store.surroundings(MESH) != before
    finally:
        jax.config.update(name, was)


def test_devices_and_their_platform_are_told_apart() -> None:
    def mesh(**changes: Any) -> Any:
        client = {"platform": "gpu", "platform_version": "1", **changes}
        device = SimpleNamespace(
            client=SimpleNamespace(
                platform=client["platform"],
                platform_version=client["platform_version"],
                process_index=lambda: changes.get("process", 0),
            ),
            device_kind=changes.get("kind", "H200"),
            id=changes.get("id", 0),
        )
        devices = [device] * changes.get("number", 1)
        num_here = changes.get("number_here", len(devices))
        return SimpleNamespace(
            devices=np.array(devices),
            shape={"data": changes.get("ranks", 1)},
            size=len(devices),
            local_devices=devices[:num_here],
        )

    changes: tuple[dict[str, Any], ...] = (
        {},
        {"platform": "tpu"},
        {"platform_version": "2"},
        {"kind": "H100"},
        {"ranks": 2},
        {"id": 1},
        {"number": 2},
        {"number": 2, "number_here": 1},  # of two hosts
        {"number": 2, "number_here": 1, "process": 1},
    )
    found = [repr(program_store.surroundings(mesh(**change))) for change in changes]
    assert len(set(found)) == len(changes)


def test_sources_that_change_meanwhile_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are edited between the imports and the start, or between the start and the first
    write."""
    usual = ProgramStore.open(tmp_path / "steps")
    assert usual.sources is not None
    monkeypatch.setattr(source_digest, "IMPORTED_AT", 0.0)
    assert ProgramStore.open(tmp_path).sources is None
    start(usual)
    assert not usual.directory.exists()
    assert "sources have changed" in caplog.text


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the package's sources with times before this process."""
    copied = tmp_path / "jspec"
    shutil.copytree(
        source_digest.PACKAGE,
        copied,
        ignore=shutil.ignore_patterns("bundled", "__pycache__"),
    )
    return copied


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    os.utime(path, ns=(0, time.time_ns() % 10**15))  # long ago, and no two edits at one time


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("config/engine_args.py", "Number of devices", "How many devices"),
        ("speculative/step.py", '"""', '"""Another word. '),
        ("speculative/step.py", "\nclass ", "\n# A remark.\n\nclass "),
        ("text/stop/stop_matcher.py", '"""', '"""Another word. '),
        ("server/service.py", "import asyncio", "import asyncio, sys"),
        ("scheduler/policy.py", "from __future__", "import sys\nfrom __future__"),
    ],
)
def test_what_no_program_depends_on_compiles_nothing_again(
    package: Path, module: str, old: str, new: str
) -> None:
    """Help texts, docstrings, comments, and modules that no step function imports."""
    before = source_digest.sources_digest(package)
    edit(package / module, old, new)
    assert source_digest.sources_digest(package) == before is not None


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("speculative/step.py", "import jax\n", "import jax\n\nX = 1\n"),
        ("spec/indexing.py", "return seq_len + depth + 1", "return seq_len + depth + 2"),
        ("pallas_kernels/ops_gpu.py", "import", "import os\nimport"),
        ("models/families/gpt_oss.py", "import", "import os\nimport"),
        ("sampling/filters.py", "import", "import os\nimport"),
        ("device/noise.py", "0x", "0x1"),
    ],
)
def test_code_that_a_program_depends_on_changes_its_name(
    package: Path, module: str, old: str, new: str
) -> None:
    before = source_digest.sources_digest(package)
    edit(package / module, old, new)
    assert source_digest.sources_digest(package) not in (before, None)


def test_a_package_without_sources_has_no_digest(tmp_path: Path) -> None:
    """It is a zip, or has bytecode alone."""
    assert source_digest.sources_digest(tmp_path) is None


def test_what_cannot_be_written_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback, for example, cannot be serialized."""

    def refuse(_: Any) -> Any:
        raise AttributeError("Can't pickle local object")

    monkeypatch.setattr(program_store.serialize_executable, "serialize", refuse)
    assert start(ProgramStore.open(tmp_path)).shape == (2, 2)
    assert "Can't pickle" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_no_half_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(program_store.os, "fdopen", refuse)
    assert start(ProgramStore.open(tmp_path)).shape == (2, 2)
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "steps").write_text("a file where the directory should be", encoding="utf-8")
    assert start(ProgramStore.open(tmp_path / "steps")).shape == (2, 2)
    assert "could not be written" in caplog.text

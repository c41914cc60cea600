"""Compiled step programs on disk: found again, told apart, and never trusted blindly."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import sharding
from jspec.core.config import ServeLimits, SpeculativeConfig
from jspec.core.plan import StepKind
from jspec.engine import compilation, program_store
from jspec.engine.compilation import compile_all
from jspec.engine.dummy_weights import dummy_params
from jspec.engine.program_store import ProgramStore
from jspec.engine.runner import init_state, place_state
from jspec.engine.transfer import layout_of
from jspec.layers.linear import Shard
from jspec.models.paged import PagedLlama
from jspec.speculative.draft import NoDrafter
from jspec.speculative.step import StepProgram
from jspec.testing.tiny_models import tiny_target_config

CONFIG = tiny_target_config()
LIMITS = ServeLimits(
    spec=SpeculativeConfig.plain(),
    num_slots=2,
    num_pages=8,
    page_size=8,
    context_length=32,
    decode_buckets=(2,),
    prefill_buckets=(8,),
    prefill_rows=2,
)
KEY = (StepKind.DECODE, 2, False)
MESH = sharding.make_mesh(jax.devices("cpu")[:1])


def make_program() -> tuple[StepProgram, Any]:
    shard = Shard(1, sharding.TENSOR_AXIS)
    target, abstract = PagedLlama.create(CONFIG, shard=shard, dtype=jnp.float32)
    program = StepProgram(target=target, drafter=NoDrafter(), spec=LIMITS.spec, full=False)
    like = {"target": abstract, "draft": {}}
    return program, dummy_params(like, mesh=MESH, vocab_size=CONFIG.vocab_size)


def fresh_state(program: StepProgram) -> Any:
    return place_state(init_state(program, LIMITS, shards=1, kv_dtype=jnp.float32), MESH)


def start(store: ProgramStore, *, reports: list[str] | None = None) -> Any:
    """The decode program as an engine gets it, and what it emits."""
    program, params = make_program()
    state = fresh_state(program)
    found = compile_all(
        {False: program, True: dataclasses.replace(program, full=True)},
        LIMITS,
        mesh=MESH,
        params=params,
        state=state,
        keys=(KEY,),
        store=store,
        progress=None if reports is None else lambda *what: reports.append(what[2]),
    )
    packed = layout_of(KEY, LIMITS)
    fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
    fields["slots"][:] = (1, 2)
    state, output = found[KEY](params, state, jnp.asarray(packed.pack(fields)))
    _, output = found[KEY](params, state, jnp.asarray(packed.pack(fields)))
    return np.asarray(output)


def test_a_second_start_traces_nothing_and_emits_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProgramStore(tmp_path / "steps")
    first = start(store)
    (written,) = store.directory.iterdir()
    assert written.suffix == ".program"
    monkeypatch.setattr(compilation, "lower", None)  # whoever calls it fails
    reports: list[str] = []
    np.testing.assert_array_equal(start(store, reports=reports), first)
    assert reports == ["decode B=2"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "another file"])
def test_what_cannot_be_read_is_written_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    first = start(store)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    foreign = b"no executable"
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "another file": hashlib.sha256(foreign).digest() + foreign,
        }[damage]
    )
    np.testing.assert_array_equal(start(store), first)
    assert "written again" in caplog.text
    assert len(path.read_bytes()) > len(whole) // 2
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_jax_has_its_own_cache_again_afterwards(tmp_path: Path) -> None:
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        start(ProgramStore(tmp_path))
        assert settings.jax_enable_compilation_cache is True
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_whatever_may_change_a_program_changes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProgramStore(tmp_path)
    program, params = make_program()
    arrays = (params, fresh_state(program))

    def path(*parts: Any, arrays: Any = arrays) -> Path | None:
        return store.path(*parts, mesh=MESH, arrays=arrays)

    usual = (KEY, program, LIMITS, {"option": 1})
    found = [path(*usual)]
    assert path(*usual) == found[0]
    found.append(path((*KEY[:2], True), *usual[1:]))
    found.append(path(KEY, dataclasses.replace(program, full=True), *usual[2:]))
    turned = dataclasses.replace(program.target, by_columns=True)
    found.append(path(KEY, dataclasses.replace(program, target=turned), *usual[2:]))
    found.append(path(KEY, program, dataclasses.replace(LIMITS, num_rounds=2), usual[3]))
    found.append(path(*usual[:3], {"option": 2}))
    found.append(path(*usual, arrays=(params, params)))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    found.append(path(*usual))
    monkeypatch.setattr(program_store, "_sources_digest", lambda: "other sources")
    found.append(path(*usual))
    assert None not in found
    assert len(set(found)) == len(found)
    assert path(object()) is None  # one object cannot be told from the next


def test_a_store_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "steps").write_text("a file where the directory should be", encoding="utf-8")
    assert start(ProgramStore(tmp_path / "steps")).shape == (2, 2)
    assert "could not be written" in caplog.text

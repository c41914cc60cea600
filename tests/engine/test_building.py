"""The devices of an engine, and the directory of compiled programs: an unusable one is an error, or
a warning without a name for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.engine import building
from jspec.errors import ConfigError


@pytest.fixture(autouse=True)
def _jax_cache_as_before() -> object:
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_named_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"compilation_cache_dir is '.*taken'; expected a directory"
    ):
        building._open_store(str(taken))


def test_without_a_usable_home_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".cache").write_text("", encoding="utf-8")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert building._open_store(None) is None
    assert "compiled programs are not kept" in caplog.text


def test_without_any_home_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens in a container under a user id that it does not list."""

    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    assert building._open_store(None) is None
    assert "compiled programs are not kept: Could not determine home" in caplog.text


def test_an_empty_name_keeps_nothing_and_another_keeps_in_it(tmp_path: Path) -> None:
    assert building._open_store("") is None
    store = building._open_store(str(tmp_path))
    assert store is not None
    assert store.directory == tmp_path / "steps"


@pytest.mark.parametrize("name", ["", "steps"])
def test_a_folder_that_others_may_write_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Stored programs are executed. jax's own programs in the same folder are not read either."""
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "steps").mkdir()
    (tmp_path / name).chmod(0o777)
    assert building._open_store(str(tmp_path)) is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"neither read nor kept: {tmp_path / name} may be written by all users" in line
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"tp_size": 2}, 2),
        ({"dp_size": 2}, 2),
        ({"dp_size": 2, "tp_size": 2}, 4),
        ({"dp_size": 2, "tp_size": 4, "enable_dp_attention": True}, 4),
    ],
)
def test_devices_are_ranks_times_shards_unless_ranks_share_them(
    arguments: dict[str, Any], count: int
) -> None:
    args = EngineArgs(**arguments)
    assert len(building._devices(args)) == count == args.dp_size * args.rank_size


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"tp_size": 99}, "tp_size is 99"),
        ({"dp_size": 99, "tp_size": 2}, "dp_size 99 times tp_size 2 is 198"),
        ({"dp_size": 9, "tp_size": 99, "enable_dp_attention": True}, "tp_size is 99"),
    ],
)
def test_too_few_devices_are_one_line(arguments: dict[str, Any], found: str) -> None:
    count = len(jax.devices())
    with pytest.raises(ConfigError, match=f"^{found}; expected at most {count}, the number of"):
        building._devices(EngineArgs(**arguments))

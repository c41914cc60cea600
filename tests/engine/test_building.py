"""The directory of compiled programs: an unusable one is an error, or a warning without it."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

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

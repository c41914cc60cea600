"""Programs of a bucket: one machine compiles, the next one fetches. A folder replaces the
library."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jspec.engine.building import _kept_in, _open_store
from jspec.engine.programs import compilation
from jspec.engine.programs.program_bucket import ProgramBucket
from jspec.engine.programs.program_store import ProgramStore
from jspec.errors import ConfigError
from tests.engine.test_program_growth import process_maker
from tests.engine.test_program_store import start

URL = "gs://b/deep/programs/"


class Buckets(ModuleType):
    """A fake gcsfs: a bucket is a folder."""

    def __init__(self, root: Path) -> None:
        super().__init__("gcsfs")
        self.root = root
        self.failing = False

    def GCSFileSystem(self) -> Buckets:  # noqa: N802  (gcsfs's own name)
        if self.failing:
            raise OSError("no route")
        return self

    def exists(self, path: str) -> bool:
        return (self.root / path).is_file()

    def get_file(self, path: str, to: str) -> None:
        shutil.copy(self.root / path, to)

    def put_file(self, path: str, to: str) -> None:
        (self.root / to).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, self.root / to)


@pytest.fixture
def buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Buckets:
    found = Buckets(tmp_path / "remote")
    monkeypatch.setitem(sys.modules, "gcsfs", found)
    return found


def test_another_machine_fetches_what_one_has_compiled(
    tmp_path: Path, buckets: Buckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(name: str) -> ProgramStore:
        return ProgramStore.open(tmp_path / name, ProgramBucket.named(URL))

    reports: list[str] = []
    first = start(machine("one"), reports=reports)
    (kept,) = (buckets.root / "b" / "deep" / "programs").iterdir()
    (written,) = (tmp_path / "one").iterdir()
    assert kept.name == written.name
    monkeypatch.setattr(compilation, "lower", None)  # calling it fails the test
    np.testing.assert_array_equal(start(machine("two"), reports=reports), first)
    assert reports == ["compiled decode B=2", "loaded decode B=2"]
    assert [file.name for file in (tmp_path / "two").iterdir()] == [kept.name]  # and no part of it


@pytest.mark.slow
def test_what_is_damaged_there_is_compiled_and_put_there_again(
    tmp_path: Path, buckets: Buckets
) -> None:
    reports: list[str] = []
    for machine in ("one", "two", "three"):
        start(ProgramStore.open(tmp_path / machine, ProgramBucket(URL)), reports=reports)
        (kept,) = (buckets.root / "b" / "deep" / "programs").iterdir()
        if machine == "one":
            kept.write_bytes(kept.read_bytes()[:-7])
    assert reports == ["compiled decode B=2", "compiled decode B=2", "loaded decode B=2"]


def test_a_bucket_that_fails_costs_a_compilation_and_a_warning(
    tmp_path: Path, buckets: Buckets, caplog: pytest.LogCaptureFixture
) -> None:
    buckets.failing = True
    path, bucket = tmp_path / "x.program", ProgramBucket(URL)
    with caplog.at_level(logging.WARNING):
        bucket.fetch(path)
        path.write_bytes(b"1")
        bucket.keep(path)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "b/deep/programs/x.program could not be read: OSError('no route')",
        "b/deep/programs/x.program could not be written: OSError('no route')",
    ]


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = r"compilation_cache_dir is 'gs://b/c': .*gcsfs, which is not.*'jspec\[gs\]'"
    with pytest.raises(ConfigError, match=message):
        _open_store("gs://b/c")


@pytest.mark.usefixtures("buckets")
def test_a_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is 'gs://'; expected gs://BUCKET/PATH"):
        _open_store("gs://")


@pytest.mark.usefixtures("buckets")
def test_an_engine_opens_it_in_a_directory_of_its_own_and_tells_its_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("jspec.engine.building.enable_persistent_cache", lambda _: None)
    store = _open_store(URL)
    assert store is not None
    assert _kept_in(store) == URL
    assert tmp_path in store.directory.parents
    assert store.bucket == ProgramBucket(URL)
    assert process_maker(store).task.bucket == store.bucket

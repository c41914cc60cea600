"""Checkpoints of a hub or a bucket: fetched by their libraries, and a clear error without them.

No test uses a network: fakes that serve a folder replace the libraries.
"""

from __future__ import annotations

import fnmatch
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jspec.config.engine_args import EngineArgs
from jspec.engine.weights import remote_checkpoints
from jspec.engine.weights.loading import BUNDLED, resolve_paths
from jspec.engine.weights.remote_checkpoints import local_directories
from jspec.errors import CheckpointError


class Hub(ModuleType):
    """A fake huggingface_hub: repositories are folders."""

    def __init__(self, root: Path) -> None:
        super().__init__("huggingface_hub")
        self.root, self.asked = root, list[tuple[str, str | None]]()

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: Any, ignore_patterns: Any
    ) -> str:
        self.asked.append((repo_id, revision))
        source = self.root / repo_id
        if not source.is_dir():
            raise FileNotFoundError(f"404: no {repo_id}\nand more")
        to = self.root / "cache" / repo_id
        to.mkdir(parents=True, exist_ok=True)
        for file in (each for each in source.rglob("*") if each.is_file()):
            name = str(file.relative_to(source))  # as the library matches it: * is any part of it
            is_ignored = any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns)
            if not is_ignored and any(fnmatch.fnmatch(name, each) for each in allow_patterns):
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to / name)
        return str(to)


class Buckets(ModuleType):
    """A fake gcsfs: a bucket is a folder."""

    def __init__(self, root: Path) -> None:
        super().__init__("gcsfs")
        self.root, self.copied = root, list[str]()

    def GCSFileSystem(self) -> Buckets:  # noqa: N802  (gcsfs's own name)
        return self

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        assert detail
        files = [file for file in sorted((self.root / path).rglob("*")) if file.is_file()]
        return {
            file.relative_to(self.root).as_posix(): {
                "size": file.stat().st_size,
                "generation": file.stat().st_mtime_ns,
            }
            for file in files
        }

    def get_file(self, path: str, to: str) -> None:
        self.copied.append(path)
        shutil.copy(self.root / path, to)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Forget the directories that were fetched in this process."""
    remote_checkpoints._from_hub.cache_clear()
    remote_checkpoints._from_bucket.cache_clear()


def test_a_repository_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    shutil.copytree(BUNDLED / "target", tmp_path / "org" / "model")
    (tmp_path / "org" / "head").mkdir()
    for file in ("config.json", "pytorch_model.bin", "notes.md"):
        (tmp_path / "org" / "head" / file).write_text("{}")
    args = EngineArgs(
        model_path="org/model@v1.5",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="org/head",
    )
    for _ in range(2):
        paths = resolve_paths(args)
        assert paths.target == paths.tokenizer == tmp_path / "cache" / "org" / "model"
    assert (paths.target / "model.safetensors").is_file()
    assert paths.draft is not None
    assert {file.name for file in paths.draft.iterdir()} == {"config.json", "pytorch_model.bin"}
    # The head has no safetensors, so torch's files are requested next.
    assert hub.asked == [("org/model", "v1.5"), ("org/head", None), ("org/head", None)]


def test_of_a_repository_the_folders_are_left_but_for_further_chat_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(tmp_path))
    files = (
        *("config.json", "model.safetensors", "chat_template.jinja", "original/consolidated.pt"),
        *("onnx/config.json", "onnx/model.safetensors", "additional_chat_templates/rag.jinja"),
    )
    for name in files:
        file = tmp_path / "org" / "templates" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    found = local_directories({"tokenizer_path": "org/templates"})["tokenizer_path"]
    fetched = {str(each.relative_to(found)) for each in found.rglob("*") if each.is_file()}
    assert fetched == {*files[:3], files[-1]}


def test_a_bucket_is_copied_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = Buckets(tmp_path / "remote")
    monkeypatch.setitem(sys.modules, "gcsfs", buckets)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source = tmp_path / "remote" / "b" / "deep" / "model"
    (source / "orbax").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "orbax" / "data").write_text("1")

    def fetch() -> Path:
        remote_checkpoints._from_bucket.cache_clear()  # like the start of another process
        return local_directories({"model_path": "gs://b/deep/model/"})["model_path"]

    directory = fetch()
    assert directory.parent == tmp_path / "home" / ".cache" / "jspec" / "models"
    assert (directory / "orbax" / "data").read_text() == "1"
    assert (len(buckets.copied), fetch()) == (2, directory)
    assert len(buckets.copied) == 2
    (source / "orbax" / "data").write_text("22")
    assert (fetch() / "orbax" / "data").read_text() == "22"
    with pytest.raises(CheckpointError, match=r"model_path is 'gs://b/no', which holds no file"):
        local_directories({"model_path": "gs://b/no"})


@pytest.mark.parametrize(
    ("value", "module", "extra"),
    [("org/name", "huggingface_hub", "hub"), ("gs://b/c", "gcsfs", "gs")],
)
def test_without_its_library_nothing_is_fetched_and_the_error_says_what_to_install(
    value: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"draft is '{value}': .*{module}, which is not installed.*'jspec\[{extra}\]'"
    with pytest.raises(CheckpointError, match=message):
        local_directories({"model_path": "org/first" if extra == "gs" else ".", "draft": value})
    assert hub.asked == []  # the other one was not fetched first


def test_what_cannot_be_fetched_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        local_directories({"model_path": "models/llama"})
    assert "model_path is 'models/llama': there is no such directory here" in str(caught.value)
    assert "(FileNotFoundError: 404: no models/llama)" in str(caught.value)
    for value in ("nowhere", "/a/b", "a/b/c", "./a"):
        with pytest.raises(CheckpointError, match="expected a directory with a checkpoint"):
            local_directories({"model_path": value})


def test_a_directory_wins_over_a_repository_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert local_directories({"model_path": "org/name"}) == {"model_path": Path("org/name")}


@pytest.mark.parametrize("name", ["model_path", "speculative_draft_model_path"])
def test_a_directory_that_is_no_checkpoint_is_said_to_be_none(name: str, tmp_path: Path) -> None:
    """The error is not about a missing tokenizer."""
    (tmp_path / "page.md").touch()
    with pytest.raises(CheckpointError, match=f"{name} is .*without config.json; expected one"):
        local_directories({name: str(tmp_path)})
    assert local_directories({"tokenizer_path": str(tmp_path)}) == {"tokenizer_path": tmp_path}

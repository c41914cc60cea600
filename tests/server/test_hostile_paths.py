"""A client's text that becomes a path: whatever the system's error is, the answer is a 400."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from tests.support.tiny_models import TinyPair

from .helpers import ask

LONG = "a" * 256  # a file's name has at most 255 bytes


def loop(at: Path) -> None:
    at.symlink_to(at)


@pytest.mark.parametrize(
    "path",
    [
        LONG,
        f"HERE/{LONG}/checkpoint",
        "é" * 128,
        "a/" * 3000,
        "a" * 100_000,
        "a\0b",
        "\0",
        "HERE/\0",
        "\ud800",
        "",
        "~nobody/x",
        "HERE/loop",
        "HERE/loop/checkpoint",
        __file__,
        f"{__file__}/checkpoint",
        "/dev/zero",
        "/proc/self/mem",
    ],
    ids=range(17),
)
@pytest.mark.parametrize("field", ["model_path", "speculative_draft_model_path"])
def test_a_path_that_the_system_refuses_is_a_400(
    engine: Engine, tiny_pair: TinyPair, tmp_path: Path, path: str, field: str
) -> None:
    loop(tmp_path / "loop")
    path = path.replace("HERE", str(tmp_path))
    body = {"model_path": str(tiny_pair.target_path), field: path}
    content = json.dumps(body)  # httpx refuses to write half a surrogate pair
    answer = ask(create_app(engine), "POST", "/update_weights_from_disk", content=content)
    assert answer.status_code == 400, answer.text[:300]
    assert field in answer.json()["message"]
    assert len(answer.text) < 20_000


def spoilt(what: str, directory: Path) -> None:
    """Put something into a checkpoint that is not a regular file."""
    name, kind = what.split(": ")
    (directory / name).unlink(missing_ok=True)
    match kind:
        case "directory":
            (directory / name).mkdir()
        case "pipe":
            os.mkfifo(directory / name)
        case "loop":
            loop(directory / name)
        case "file":
            (directory / name).write_bytes(b"x")
        case "long":
            (directory / name).write_text(f'{{"weight_map": {{"a": "{LONG}"}}}}')


@pytest.mark.parametrize(
    "what",
    [
        "config.json: directory",
        "config.json: pipe",
        "config.json: loop",
        "generation_config.json: directory",
        "generation_config.json: pipe",
        "model.safetensors: directory",
        "model.safetensors: pipe",
        "model.safetensors: loop",
        "model.safetensors.index.json: long",
        "pytorch_model.bin: directory",
        "pytorch_model.bin: pipe",
        "pytorch_model.bin: file",
        "pytorch_model.bin.index.json: long",
        "orbax: directory",
        "orbax: file",
        "orbax: pipe",
    ],
)
def test_what_is_no_file_in_a_checkpoint_is_a_400(
    engine: Engine, tiny_pair: TinyPair, tmp_path: Path, what: str
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(tiny_pair.target_path, directory)
    if not what.startswith(("config", "generation", "model.safetensors:")):
        (directory / "model.safetensors").unlink()
    spoilt(what, directory)
    body = {"model_path": str(directory)}
    answer = ask(create_app(engine), "POST", "/update_weights_from_disk", json=body)
    assert answer.status_code == 400, answer.text[:300]
    assert str(directory) in answer.json()["message"]


@pytest.mark.parametrize(
    ("name", "number"),
    [("", errno.EACCES), ("config.json", errno.EIO), ("model.safetensors", errno.ESTALE)],
)
def test_what_the_system_keeps_from_the_server_is_a_400(
    engine: Engine,
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
) -> None:
    """Permissions and broken file systems do this; a patch, since the test may run as root."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(tiny_pair.target_path, directory)
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path == directory / name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    for field in ("model_path", "speculative_draft_model_path"):
        body = {"model_path": str(tiny_pair.target_path), field: str(directory)}
        answer = ask(create_app(engine), "POST", "/update_weights_from_disk", json=body)
        assert answer.status_code == 400, answer.text[:300]
        if field == "model_path":
            assert os.strerror(number) in answer.json()["message"]
            assert str(directory) in answer.json()["message"]


def test_an_error_of_the_system_amid_reading_is_a_400(
    engine: Engine, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(tiny_pair.target_path, directory)
    real = Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        if path.parent == directory:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", opened)
    body = {"model_path": str(directory)}
    answer = ask(create_app(engine), "POST", "/update_weights_from_disk", json=body)
    assert answer.status_code == 400, answer.text[:300]
    assert str(directory) in answer.json()["message"]


def test_a_profile_s_directory_that_cannot_be_written_is_a_400(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for directory in (str(tmp_path / "file" / "x"), f"{tmp_path}/{LONG}", "/proc/x"):
        app = create_app(engine, ServerArgs(profile_dir=directory))
        answers = [ask(app, "POST", f"/{verb}_profile") for verb in ("start", "stop")]
        assert [answer.status_code for answer in answers if answer.is_server_error] == []
        assert not all(answer.is_success for answer in answers)
    app = create_app(engine, ServerArgs(profile_dir=str(tmp_path / "good")))
    assert ask(app, "POST", "/start_profile").is_success
    assert ask(app, "POST", "/stop_profile").is_success

"""Commands on a full disk: one line that names the path, and no partial file.

A limit on file size stands for the full disk.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import jspec.models.files.tensor_files
from jspec.cli.batch import Run
from jspec.cli.batch_files.batch_file import AnswerFile, answer, read_lines, refusal
from jspec.cli.main import main
from jspec.cli.measurement import report as bench_report
from jspec.cli.verify import write_json as write_verify_json
from jspec.errors import OutputError
from jspec.files.output_files import whole_file, write_text
from jspec.server.control.trace_file import open_trace
from jspec.training.checkpoints import Checkpoints
from jspec.training.data.examples import RowTable
from jspec.training.data.feature_store import write_features
from jspec.training.draft_job import export
from jspec.training.heads.draft_head import TargetFeatures
from jspec.training.loop import LoopConfig, Progress, init_state, write_report

ROOM = 32_768
WHY = os.strerror(errno.EFBIG)


@contextmanager
def little_room(num_bytes: int = ROOM) -> Iterator[None]:
    """Limit the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    random = np.random.default_rng(1)
    weights = {name: random.standard_normal(20_000).astype(np.float32) for name in "ab"}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("is_new", [True, False])
def test_a_conversion_without_room_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_new: bool
) -> None:
    out = tmp_path / "out"
    if not is_new:
        out.mkdir()
    words = ["convert", str(checkpoint), str(out), "--to", "safetensors"]
    with little_room():
        assert main(words) == 1
    said = capsys.readouterr().err
    assert said == f"jspec: failed: {out}/model.safetensors: cannot be written: {WHY}\n"
    assert list(out.parent.glob("out*")) == ([] if is_new else [out])
    assert is_new or not list(out.iterdir())
    assert main(words) == 0


# The command in a separate process, which sets the limit itself: no code runs after a fork.
WITHOUT_ROOM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({ROOM}, {ROOM}))
from jspec.cli.main import run
run(sys.argv[1:])
"""


def test_a_conversion_to_orbax_without_room_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    """In its own process, since orbax leaves an event loop behind."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_ROOM, "convert", str(checkpoint)),
            *(str(tmp_path / "out"), "--to", "orbax"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = f"jspec: failed: {tmp_path}/out/orbax: cannot be written: {WHY}\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert list(tmp_path.iterdir()) == [checkpoint]


def requests_of(tmp_path: Path, count: int) -> Path:
    path = tmp_path / "in.jsonl"
    asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    lines = [json.dumps({"custom_id": str(i), **asked}) for i in range(count)]
    path.write_text("\n".join(lines))
    return path


def test_a_batch_without_room_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    requests, path = requests_of(tmp_path, 5), tmp_path / "out.jsonl"
    answers = [answer(line, 200, {"text": "x" * 9000}) for line in read_lines(requests)]
    with closing(AnswerFile(path, requests)) as file, little_room():
        for found in answers[:3]:
            file.write(found)
        with pytest.raises(OutputError, match=f"{path}.* cannot be written: {WHY}; its lines are"):
            file.write(answers[3])
    assert [json.loads(text) for text in path.read_text().splitlines()] == answers[:3]
    assert path.read_text().endswith("\n")
    with closing(AnswerFile(path, requests)) as file:
        assert (file.num_written, file.num_well) == (3, 3)
        for found in answers[3:]:
            file.write(found)
    assert [json.loads(text) for text in path.read_text().splitlines()] == answers


def batch_of(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int | None], *, room: int = 2**30
) -> None:
    """Replace the engine: answer lines with these statuses; None: the line is no request."""

    def run(self: Run) -> None:
        answers = self.answers
        left = list(zip(read_lines(self.requests), statuses, strict=True))[answers.num_written :]
        with little_room(room):
            for line, status in left:
                answers.write(
                    refusal(line, "invalid_request", "x")
                    if status is None
                    else answer(line, status, {"text": "x" * 9000})
                )

    monkeypatch.setattr(Run, "with_engine", run)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([], 0),
        ([200, 200], 0),
        ([400, 200], 0),
        ([None, 200], 0),
        ([400, 400], 3),
        ([None, 500], 3),
        ([None], 3),
    ],
)
def test_a_batch_fails_if_no_line_was_answered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int | None],
    status: int,
) -> None:
    requests, path = requests_of(tmp_path, len(statuses)), tmp_path / "out.jsonl"
    batch_of(monkeypatch, statuses)
    for _ in range(2):  # the second finds all of them there
        assert main(["batch", str(requests), str(path)]) == status
        said = "jspec: failed" in capsys.readouterr().err
        assert said == bool(status)
    assert len(path.read_text().splitlines()) == len(statuses)


REPORT = {"a": "x" * 2 * ROOM}


@pytest.mark.parametrize(
    "write",
    [
        bench_report.write_json,
        lambda path, report: write_verify_json(str(path), report),
        write_report,
        lambda path, report: write_text(path, json.dumps(report)),
    ],
    ids=["bench", "verify", "training", "text"],
)
def test_a_report_is_written_whole_or_not_at_all(
    tmp_path: Path, write: Callable[[Path, dict[str, Any]], None]
) -> None:
    path = tmp_path / "report.json"
    for before in (None, "{}"):
        if before is not None:
            path.write_text(before)
        with little_room(), pytest.raises(OutputError, match=f"report.json: .*written: {WHY}"):
            write(path, REPORT)
        assert [each.name for each in tmp_path.iterdir()] == ([] if before is None else [path.name])
    assert path.read_text() == "{}"
    write(path, REPORT)
    assert json.loads(path.read_text()) == REPORT
    with pytest.raises(OutputError, match="none/x: cannot be written: No such file or directory"):
        write_text(tmp_path / "none" / "x", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="/dev/full: cannot be written: No space left on device"):
        write_text(Path("/dev/full"), "x")
    assert not Path("/dev/full").is_file()
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path / "to")
    (tmp_path / "to").write_text("")
    write_text(linked, "x")
    assert linked.is_symlink()
    assert (tmp_path / "to").read_text() == "x"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_standard_output_without_room_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jspec", "flags"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "jspec: failed: No space left on device\n")


def test_a_head_without_room_leaves_no_part(tmp_path: Path) -> None:
    head = tmp_path / "head"

    def save(size: int, folder: Path) -> None:
        weights = {"x": np.zeros(size, np.float32)}
        jspec.models.files.tensor_files.write_checkpoint(folder, {}, weights)

    export(head, lambda folder: save(1, folder))
    with little_room(), pytest.raises(OutputError, match=f"model.safetensors: .*written: {WHY}"):
        export(head, lambda folder: save(ROOM, folder))
    assert [each.name for each in tmp_path.iterdir()] == ["head"]
    assert sorted(each.name for each in head.iterdir()) == ["config.json", "model.safetensors"]


def test_features_have_their_room_before_they_are_computed(tmp_path: Path) -> None:
    table = RowTable(
        ids=np.zeros((64, 8), np.int32),
        lens=np.full(64, 8, np.int32),
        weights=np.ones((64, 8), np.float32),
    )
    asked = []

    def features(batch: Any) -> TargetFeatures:
        asked.append(batch)
        hidden, aux = np.zeros((2, 8, 4), np.float32), np.zeros((2, 8, 64), np.float32)
        return TargetFeatures(hidden=hidden, aux=aux)

    def write() -> None:
        write_features(
            tmp_path / "train", table, {}, features, batch_size=2, progress=lambda *_: None
        )

    with little_room(), pytest.raises(OutputError, match=f"aux.npy: cannot be written: {WHY}"):
        write()
    assert len(asked) == 1
    assert not list((tmp_path / "train").iterdir())
    write()
    assert np.load(tmp_path / "train" / "aux.npy").shape == (64, 8, 64)


def test_a_checkpoint_without_room_keeps_the_one_before(tmp_path: Path) -> None:
    params = {"x": np.random.default_rng(1).standard_normal(20_000).astype(np.float32)}
    state = init_state(params, LoopConfig(num_steps=2, peak_learning_rate=0.1))
    with closing(Checkpoints(tmp_path / "checkpoints")) as kept:
        kept.save(state, params, Progress())

        def fails(*_: Any, **__: Any) -> None:
            raise ValueError(f"Failed writing: to file 27: {WHY} [os_error_code='27']")

        kept._manager.save = fails
        with pytest.raises(OutputError, match=f"step 1 cannot be written: {WHY}; the one before"):
            kept.save(dataclasses.replace(state, step=state.step + 1), params, Progress())
    with closing(Checkpoints(tmp_path / "checkpoints")) as kept:
        restored = kept.restore(state)
    assert restored is not None
    assert int(restored[0].step) == 0


def test_a_trace_without_room_ends_and_no_request_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace"
    write = open_trace(str(path))._write
    with little_room(100):
        for _ in range(3):
            write("x" * 60 + "\n")
    assert caplog.messages == [f"{path}: request tracing has stopped: {WHY}"]


def test_a_part_is_removed_whatever_ends_it(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "x") as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not list(tmp_path.iterdir())

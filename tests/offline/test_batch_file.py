"""Batch files: which lines are requests, and where a run resumes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspec.cli.batch import Run
from jspec.cli.batch_files import batch_file
from jspec.cli.batch_files.batch_file import (
    AnswerFile,
    answer,
    count_lines,
    is_well,
    read_lines,
    refusal,
    retried_lines,
)
from jspec.cli.main import main
from jspec.errors import ConfigError


def request(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"prompt": "a"}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | (
        changes
    )


def written(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_lines_keep_their_numbers_and_blank_ones_are_none(tmp_path: Path) -> None:
    path = written(tmp_path / "in", request("a"), "", request("b"), "   ")
    lines = list(read_lines(path))
    assert [(line.number, line.custom_id, line.wrong) for line in lines] == [
        (1, "a", ""),
        (3, "b", ""),
    ]
    assert count_lines(path) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: is not JSON"),
        ("[1]", "line 1: is [1]; expected an object"),
        ("[" * 100_000, "line 1: is not JSON"),
        ("9" * 5000, "line 1: cannot be read as JSON: it has an integer of 5000 digits; expected"),
        ({"url": "/generate", "body": {}}, "custom_id is null; expected text"),
        (request("a", url="/v1/embeddings"), "url is '/v1/embeddings'; expected one of /v1/compl"),
        (request("a", method="GET"), "method is 'GET'; expected 'POST'"),
        (request("a", body="x"), "body is 'x'; expected an object"),
        (request("a", body={"stream": True}), "stream is true; expected false"),
        (request("a", models="x"), "unknown key 'models'; expected body, custom_id, method, url"),
    ],
)
def test_what_is_no_request_says_why(tmp_path: Path, line: object, words: str) -> None:
    (found,) = read_lines(written(tmp_path / "in", line))
    assert words in found.wrong


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(json.dumps(request("a")).encode() + b'\n{"custom_id": "\xe9"}\n')
    first, second = read_lines(path)
    assert (first.wrong, second.wrong) == ("", "line 2: is not UTF-8: byte 0xe9 at offset 15")


def test_a_custom_id_is_one_lines_own(tmp_path: Path) -> None:
    first, second = read_lines(written(tmp_path / "in", request("a"), request("a")))
    assert not first.wrong
    assert "'a' was an earlier line's" in second.wrong


def test_a_line_that_is_too_long_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 200)
    long = request("a", body={"prompt": "a" * 1000})
    lines = list(read_lines(written(tmp_path / "in", long, request("b"))))
    assert [line.wrong for line in lines] == [
        "line 1: has more than 200 bytes; expected at most that",
        "",
    ]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing' is not there; expected a file of JSON lines"):
        count_lines(tmp_path / "nothing")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_written=st.integers(0, 4), cut=st.integers(0, 60))
def test_a_run_goes_on_after_the_last_whole_line(
    tmp_path: Path, num_written: int, cut: int
) -> None:
    requests = written(tmp_path / "in", *(request(name) for name in "abcd"), "no JSON")
    lines = list(read_lines(requests))
    answers = [answer(line, 200, {"text": "é"}) for line in lines[:4]]
    answers.append(refusal(lines[4], "invalid_request", lines[4].wrong))
    path = tmp_path / "out"
    whole = written(path, *answers[:num_written]).read_bytes()
    torn = (json.dumps(answers[num_written]) + "\n").encode()[:cut]
    path.write_bytes(whole + torn)
    file = AnswerFile(path, requests)
    assert file.num_written == num_written + (torn.endswith(b"\n"))
    for found in answers[file.num_written :]:
        file.write(found)
    file.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == answers


def test_a_finished_file_says_how_many_lines_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = written(tmp_path / "in", *(request(name) for name in "abc"), "no JSON")
    lines = list(read_lines(requests))
    answers = [answer(line, status, {}) for line, status in zip(lines, (200, 400), strict=False)]
    answers += [answer(lines[2], 200, {}), refusal(lines[3], "invalid_request", lines[3].wrong)]
    path = written(tmp_path / "out", *answers)
    before = path.read_bytes()
    assert main(["batch", str(requests), str(path)]) == 0  # as the run that wrote it
    assert capsys.readouterr().err == (
        f"{path}: 4 of 4 lines are there, 2 of them errors, the first in line 2; they are kept: "
        "--retry-errors with this file and another OUT.jsonl runs them again\n"
    )
    assert path.read_bytes() == before
    few = written(tmp_path / "few", request("a"))
    path = written(tmp_path / "one", answers[0])
    assert main(["batch", str(few), str(path)]) == 0
    assert capsys.readouterr().err == f"{path}: 1 of 1 line is there\n"


def test_errors_of_earlier_runs_are_counted(tmp_path: Path) -> None:
    requests = written(tmp_path / "in", *(request(name) for name in "ab"), "no JSON")
    lines = list(read_lines(requests))
    path = written(tmp_path / "out", answer(lines[0], 200, {}), answer(lines[1], 400, {}))
    with closing(AnswerFile(path, requests)) as file:
        assert (file.num_written, file.num_errors, file.first_error) == (2, 1, 2)
    assert [is_well(json.loads(text)) for text in path.read_text().splitlines()] == [True, False]
    assert not is_well(refusal(lines[2], "invalid_request", "x"))


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    requests = written(tmp_path / "in", request("a"))
    (line,) = read_lines(requests)
    whole = json.dumps(refusal(line, "c", "m"))
    other = whole.replace('"a"', '"b"')
    for content in (
        *("mine\n", f"{whole}\n" * 2, '{"id": "x"}\n'),
        *("mine", '{"my": "settings"}', json.dumps(request("a")), other, f"{whole}\n{whole}"),
    ):
        path = tmp_path / "out"
        path.write_text(content)
        with pytest.raises(ConfigError, match="is not of an earlier run"):
            AnswerFile(path, requests)
        assert path.read_text() == content
    turned = json.dumps(dict(reversed(json.loads(whole).items())))
    path.write_text(turned)  # an answer as others write it: its line has no end, so it is redone
    with closing(AnswerFile(path, requests)) as file:
        assert file.num_written == 0
    assert path.read_text() == ""
    with pytest.raises(ConfigError, match="expected another file"):
        AnswerFile(requests, requests)
    with pytest.raises(ConfigError, match="is no regular file"):
        AnswerFile(tmp_path, requests)
    with pytest.raises(ConfigError, match="No such file or directory; expected a file to write"):
        AnswerFile(tmp_path / "none" / "out", requests)


def test_only_errors_of_an_earlier_run_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line is repaired in its place, one has no answer yet, and the order stays."""
    before = written(tmp_path / "before", request("a"), "no JSON", request("c"), request("d"))
    lines = list(read_lines(before))
    earlier = [answer(lines[0], 200, {"created": 7}), refusal(lines[1], "invalid_request", "x")]
    earlier += [answer(lines[2], 500, {"created": 7})]
    old = written(tmp_path / "old", *earlier)
    old.write_bytes(old.read_bytes() + b'{"id": "batch_')  # torn
    requests = written(tmp_path / "in", *(request(name) for name in "abcd"))
    ran: list[str | None] = []

    def run(self: Run) -> None:
        assert self.earlier is not None
        left = list(retried_lines(requests, self.earlier))[self.answers.num_written :]
        assert (self.created, self.total) == (7, 4)
        for line in left:
            ran.append(None if line.answered else line.custom_id)
            self.answers.write(line.answered or answer(line, 200, {"created": self.created}))

    monkeypatch.setattr(Run, "with_engine", run)
    words = ["batch", str(requests), str(tmp_path / "out"), "--retry-errors"]
    assert main([*words, str(old)]) == 0
    assert capsys.readouterr().err == f"{old}: 3 of 4 lines are run again\n"
    assert ran == ["b", "c", "d"]
    found = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    assert [(each["id"], each["custom_id"]) for each in found] == [
        (f"batch_req_{i}", name) for i, name in enumerate("abcd", start=1)
    ]
    again = ["batch", str(requests), str(tmp_path / "again"), "--retry-errors"]
    assert main([*again, str(tmp_path / "out")]) == 0  # no engine starts for copies
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()
    assert len(ran) == 3
    for file in (written(tmp_path / "other", request("a")), tmp_path / "again"):
        assert main([*again, str(file)]) == 2
    said = capsys.readouterr().err
    assert "expected an answer to batch_req_1: the file is not of an earlier run" in said
    assert "again', the earlier ones; expected another" in said

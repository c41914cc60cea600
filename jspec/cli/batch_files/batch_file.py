"""OpenAI's batch files: one request per input line, one answer per output line.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    out  {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {...}}}

Answers keep the order of the requests, so an interrupted run continues after its last complete
line. Source: OpenAI's Batch API reference, "The request input object" and "output object".
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from jspec.errors import ConfigError, OutputError, reason_of, shown_json
from jspec.files.json_files import json_fault, json_of

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate")
KEYS = frozenset({"custom_id", "method", "url", "body"})
MAX_LINE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    number: int  # of its line, from 1
    custom_id: str | None = None
    url: str = ""
    body: Mapping[str, Any]
    wrong: str = ""  # why it is invalid, else empty
    answered: Mapping[str, Any] | None = None  # an earlier run's answer, which is kept

    @property
    def answer_id(self) -> str:
        return f"batch_req_{self.number}"


def read_lines(path: Path) -> Generator[Line]:
    """Yield the requests, invalid ones with `wrong` set. Raises ConfigError if unreadable."""
    custom_ids: set[str] = set()
    with _opened(path) as file:
        for number, text in enumerate(_bounded_lines(file), start=1):
            if not text.strip():
                continue
            line = _parse(number, text)
            if line.custom_id in custom_ids and not line.wrong:
                name = shown_json(line.custom_id)
                wrong = f"custom_id {name} was an earlier line's; expected its own"
                line = Line(number=number, custom_id=line.custom_id, body={}, wrong=wrong)
            if line.custom_id is not None:
                custom_ids.add(line.custom_id)
            yield line


def retried_lines(requests: Path, earlier: Path) -> Generator[Line]:
    """Yield the requests, with the successful answers of `earlier`, an answer file for them. Raises
    ConfigError if the file is not from a run of these requests."""
    count = 0
    with _opened(earlier) as file, closing(read_lines(requests)) as lines:
        for count, line in enumerate(lines, start=1):
            text = file.readline()
            found = object_in(text)
            # An invalid line had no custom_id, and may have been repaired.
            is_its = found.get("id") == line.answer_id and (
                found.get("custom_id") in (line.custom_id, None)
            )
            if text.endswith(b"\n") and not is_its:
                raise _of_another_run(count, earlier, text, f"an answer to {line.answer_id}")
            yield replace(line, answered=found) if is_its and is_well(found) else line
        if text := file.readline():
            raise _of_another_run(count + 1, earlier, text, "no more lines")


def count_lines(path: Path) -> int:
    with _opened(path) as file:
        return sum(1 for text in _bounded_lines(file) if text.strip())


def _opened(path: Path) -> BinaryIO:
    try:
        if not path.is_file():
            found = "is no file" if path.exists() else "is not there"
            raise ConfigError(f"batch file {str(path)!r} {found}; expected a file of JSON lines")
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"batch file {str(path)!r}: {error.strerror}") from error


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    while text := file.readline(MAX_LINE_BYTES + 1):
        rest = text
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        yield text


def _parse(number: int, text: bytes) -> Line:
    def wrong(why: str, custom_id: str | None = None) -> Line:
        return Line(number=number, custom_id=custom_id, body={}, wrong=f"line {number}: {why}")

    if len(text) > MAX_LINE_BYTES:
        return wrong(f"has more than {MAX_LINE_BYTES} bytes; expected at most that")
    try:
        found = json_of(text)
    except RecursionError as error:
        return wrong(f"is not JSON: {error}")
    except ValueError as error:
        return wrong(json_fault(error))
    if not isinstance(found, dict):
        return wrong(f"is {shown_json(found)}; expected an object")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong(f"custom_id is {shown_json(custom_id)}; expected text that is not empty")
    why = _why_not(found)
    if why:
        return wrong(why, custom_id)
    return Line(number=number, custom_id=custom_id, url=found["url"], body=found["body"])


def _why_not(found: Mapping[str, Any]) -> str:
    unknown = sorted(set(found) - KEYS)
    if unknown:
        return f"has the unknown key {shown_json(unknown[0])}; expected {', '.join(sorted(KEYS))}"
    if found.get("method", "POST") != "POST":
        return f"method is {shown_json(found['method'])}; expected 'POST'"
    if found.get("url") not in URLS:
        return f"url is {shown_json(found.get('url'))}; expected one of {', '.join(URLS)}"
    body = found.get("body")
    if not isinstance(body, dict):
        return f"body is {shown_json(body)}; expected an object"
    if body.get("stream"):
        return f"stream is {shown_json(body['stream'])}; expected false: a batch has whole answers"
    return ""


class AnswerFile:
    """The answers, written one whole line at a time. num_well: successes of all runs. Raises
    ConfigError for a file with other content, or one that cannot be written."""

    def __init__(self, path: Path, requests: Path) -> None:
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"answer file {str(path)!r} is no regular file; expected one")
            if path.exists() and path.samefile(requests):
                raise ConfigError(f"answers would go to {str(path)!r}; expected another file")
            # Unbuffered: closing the file must not retry a failed write.
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"answer file {str(path)!r}: {error.strerror}; expected a file to write"
            ) from error
        self._path, self._end = path, 0
        self.num_written, self.num_errors = 0, 0
        self.first_error: int | None = None
        try:
            self._keep_answers(path, requests)
        except BaseException:
            self._file.close()
            raise
        self.num_well = self.num_written - self.num_errors

    def _keep_answers(self, path: Path, requests: Path) -> None:
        reader = io.BufferedReader(self._file)
        with closing(read_lines(requests)) as lines:
            for text in reader:
                line = next(lines, None)
                found = None if line is None else _answer_to(line, text)
                is_left_off = line is not None and (found is not None or _begins(line, text))
                if is_left_off and not text.endswith(b"\n"):
                    break  # written again
                if found is None:
                    expected = "no more lines"
                    if line is not None:
                        expected = f"an answer to {line.answer_id}"
                    raise _of_another_run(self.num_written + 1, path, text, expected)
                self._end += len(text)
                self.num_written += 1
                if not is_well(found):
                    self.num_errors += 1
                    self.first_error = self.first_error or self.num_written
        reader.detach()  # else it closes the file when it goes
        self._cut()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append and flush one line. On a full disk raises OutputError and leaves whole lines."""
        text = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut()
            raise OutputError(
                f"answer file {str(self._path)!r} cannot be written: {reason_of(error)}; its lines "
                "are complete, and the same command continues after them"
            ) from error
        self._end += len(text)
        self.num_written += 1
        self.num_well += is_well(answer)

    def _cut(self) -> None:
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def close(self) -> None:
        self._file.close()


def _begins(line: Line, text: bytes) -> bool:
    """Return whether `text` may be an incomplete answer to this line from an interrupted run."""
    ids = {"id": line.answer_id, "custom_id": line.custom_id}
    first = json.dumps(ids, ensure_ascii=False).encode()[:-1]
    return text[: len(first)] == first[: len(text)]


def _answer_to(line: Line, text: bytes) -> dict[str, Any] | None:
    found = object_in(text)
    is_its = (found.get("id"), found.get("custom_id")) == (line.answer_id, line.custom_id)
    return found if is_its else None


def object_in(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_another_run(number: int, path: Path, text: bytes, expected: str) -> ConfigError:
    return ConfigError(
        f"line {number} of {str(path)!r} is {shown_json(text)}; expected {expected}: "
        "the file is not of an earlier run over these requests"
    )


def is_well(found: Mapping[str, Any]) -> bool:
    response = found.get("response")
    return isinstance(response, dict) and response.get("status_code") == HTTPStatus.OK


def refusal(line: Line, code: str, message: str) -> dict[str, Any]:
    return {
        "id": line.answer_id,
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def answer(line: Line, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": line.answer_id,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": line.answer_id, "body": body},
        "error": None,
    }

"""`jspec batch` over a real engine: answers in order, bad lines answered, runs that continue."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jspec.cli.batch_files.batch_file import AnswerFile, read_lines
from jspec.cli.batch_files.batch_run import BatchSettings, run_batch
from jspec.cli.main import main
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from tests.server.helpers import wait_idle
from tests.support.speaking_engine import SpeakingEngine, write_text_files

from .speaking import CALLS, SPECIAL, TEMPLATES, WEATHER

SETTINGS = BatchSettings(seed=3, created=1_700_000_000, window=4)


class KilledError(Exception):
    """The error by which the tests end a run."""


def requests_file(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def line(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"max_tokens": 3 + number % 5, **body}
    if url == "/v1/completions":
        given = {"prompt": f"x{number}", **given}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": given}


def run(
    engine: Engine,
    requests: Path,
    path: Path,
    *,
    on_answer: Callable[[bool], None] = lambda _: None,
    settings: BatchSettings = SETTINGS,
) -> list[dict[str, Any]]:
    answers = AnswerFile(path, requests)
    with closing(answers), closing(read_lines(requests)) as lines:
        left = itertools.islice(lines, answers.num_written, None)
        asyncio.run(run_batch(engine, left, answers, settings, on_answer=on_answer))
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_every_line_is_answered_in_order_as_the_server_would(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "x"}]
    native = {"text": "y", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    requests = requests_file(
        tmp_path / "in",
        line(1, temperature=0, seed=4),  # an answer contains its seed
        "no JSON",
        line(3, "/v1/chat/completions", messages=chat, seed=5),
        line(4, temperature=-1),
        {"custom_id": "r5", "method": "POST", "url": "/generate", "body": native},
        line(6, n=3, prompt=["a", "b"]),
        {
            **line(7, "/v1/responses"),
            "body": {"input": "x", "max_output_tokens": 3, "seed": 6, "temperature": 0},
        },
    )
    found = run(engine, requests, tmp_path / "out")
    assert [(one["id"], one["custom_id"]) for one in found] == [
        ("batch_req_1", "r1"),
        ("batch_req_2", None),
        ("batch_req_3", "r3"),
        ("batch_req_4", "r4"),
        ("batch_req_5", "r5"),
        ("batch_req_6", "r6"),
        ("batch_req_7", "r7"),
    ]
    assert found[1]["response"] is None
    assert found[1]["error"]["message"].startswith("line 2: is not JSON")
    assert [one["response"]["status_code"] for one in found if one["response"]] == [
        *(200, 200, 400, 200, 200, 200)
    ]
    assert "temperature is -1" in found[3]["response"]["body"]["error"]["message"]
    assert len(found[5]["response"]["body"]["choices"]) == 6
    for index in (0, 2):
        sent = json.loads(requests.read_text().splitlines()[index])
        served = client.post(sent["url"], json=sent["body"]).json()
        own = found[index]["response"]["body"]
        assert own["created"] == SETTINGS.created
        assert own["id"].endswith(f"-batch_req_{index + 1}")
        same = ("choices", "model", "object")
        assert {name: served[name] for name in same} == {name: own[name] for name in same}
        assert served["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    sent = json.loads(requests.read_text().splitlines()[6])
    served = client.post(sent["url"], json=sent["body"]).json()
    own = found[6]["response"]["body"]
    assert (own["id"], own["created_at"]) == ("resp_batch_req_7", SETTINGS.created)
    texts = [[item["content"] for item in each["output"]] for each in (served, own)]
    assert texts[0] == texts[1] != []
    wait_idle(engine)


def test_a_run_that_was_killed_goes_on_to_the_same_file(engine: Engine, tmp_path: Path) -> None:
    """It ends after every few answers, the last one incomplete; unseeded, at temperature 1."""
    requests = requests_file(tmp_path / "in", *(line(n, temperature=1.0) for n in range(1, 13)))
    run(engine, requests, tmp_path / "whole")
    path = tmp_path / "torn"
    for num_answers in (0, 3, 1, 3):  # eleven, and one is left
        countdown = iter(range(num_answers, -1, -1))

        def kill(_: bool, countdown: Any = countdown) -> None:
            if next(countdown) == 0:
                raise KilledError

        with pytest.raises(KilledError):
            run(engine, requests, path, on_answer=kill)
        wait_idle(engine)
        path.write_bytes(path.read_bytes() + b'{"id": "batch_req_')
    run(engine, requests, path)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    texts = {
        json.loads(one)["response"]["body"]["choices"][0]["text"]
        for one in path.read_text().splitlines()
    }
    assert len(texts) > 6  # every line has its own seed


def test_calls_of_tools_are_read_and_have_the_same_ids_again(tmp_path: Path) -> None:
    directory = write_text_files(
        tmp_path / "text", special=SPECIAL["qwen"], template=TEMPLATES["qwen"]
    )
    asks = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], "n": 2}
    tool = {"type": "function", **WEATHER["function"]}
    response = {"input": "Weather?", "tools": [tool], "model": "m", "max_output_tokens": 200}
    requests = requests_file(
        tmp_path / "in",
        *(line(n, "/v1/chat/completions", **asks, model="m", max_tokens=200) for n in (1, 2)),
        {**line(3, "/v1/responses"), "body": response},
    )
    speaking = SpeakingEngine(directory, says=CALLS["qwen"] * 2)
    server = ServerArgs(served_model_name="m", tool_call_parser="qwen")
    settings = replace(SETTINGS, server=server)
    with speaking:
        found = run(speaking, requests, tmp_path / "out", settings=settings)
        run(speaking, requests, tmp_path / "again", settings=settings)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "again").read_bytes()
    items = found.pop()["response"]["body"]["output"]
    called = [(item["type"], item["name"]) for item in items if "call_id" in item]
    assert called == [("function_call", "get_weather")] * 2
    choices = [choice for one in found for choice in one["response"]["body"]["choices"]]
    calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
    assert [call["function"]["name"] for call in calls] == ["get_weather"] * 8
    assert len({call["id"] for call in calls}) == 8
    assert all(call["id"].startswith("call_") for call in calls)


def test_wrong_words_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing, some = str(tmp_path / "nothing"), str(requests_file(tmp_path / "in", line(1)))
    assert main(["batch", nothing, str(tmp_path / "out")]) == 2
    assert main(["batch", some, some]) == 2
    assert main(["batch", some]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("jspec: error: ") for line in said] == [True] * 3
    assert not (tmp_path / "out").exists()

"""No answer to a client names a file of the server's, or repeats another library's message."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from starlette.routing import Route

from jspec.errors import (
    CheckpointError,
    EngineClosedError,
    InvariantError,
    JspecError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RunnerError,
)
from jspec.server.app import create_app
from jspec.server.http.exchange import public_message
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from jspec.serving.recovery import RestartLimits
from tests.support.speaking_engine import SpeakingEngine, write_text_files

from .helpers import ask

SECRET = "/srv/secret/file.so"
ASK = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
# Requests refused for the state of the server's files: method, path, body, and status.
REFUSED: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": ASK, "reasoning_effort": "low"}, 400),
    (CHAT, {"messages": ASK, "tools": [TOOL]}, 400),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "x"}]}, 400),
    (CHAT, {"messages": ASK, "model": "gpt-9"}, 404),
    (CHAT, {"messages": ASK, "chat_template": "x"}, 400),
    (CHAT, {"messages": ASK, "response_format": {"type": "json_object"}, "regex": "a"}, 400),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}, 400),
    ("/v1/completions", {"prompt": "Hi", "model": "gpt-9"}, 404),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "model": "gpt-9"}, 404),
    ("/generate", {"text": "a", "sampling_params": {"regex": "(a"}}, 400),
    ("/generate", {"text": "a", "lora_path": "x"}, 400),
    ("/generate", {"text": "a" * 20000}, 400),
    ("/tokenize", {"messages": ASK, "reasoning_effort": "low"}, 400),
    ("/update_weights_from_disk", {"model_path": "none-there"}, 400),
    ("/update_weights_from_tensor", {}, 400),
    ("/get_weights_by_name", {"name": "none"}, 400),
    ("/stop_profile", {}, 400),
    ("/dump_expert_distribution_record", {}, 400),
    ("/no/such/path", {}, 404),
]
TEMPLATE = """{% for message in messages %}{% if message.role == "tool" %}
{{ raise_exception("not this role") }}{% endif %}{{ message.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def plain(engine_arguments: dict[str, Any], tmp_path_factory: Any) -> Iterator[Engine]:
    """Return a server whose template uses only the messages."""
    file = tmp_path_factory.mktemp("template") / "plain.jinja"
    file.write_text(TEMPLATE)
    with Engine(**{**engine_arguments, "chat_template": str(file)}) as engine:
        yield engine


@pytest.mark.parametrize(("path", "body", "status"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refusal_names_no_file_of_the_server(
    plain: Engine, path: str, body: dict[str, Any], status: int
) -> None:
    answer = ask(create_app(plain, ServerArgs(tool_call_parser="qwen")), "POST", path, json=body)
    assert answer.status_code == status, answer.text
    assert not named_files(plain, answer.text)


ODD: tuple[Any, ...] = (
    b"{",
    [1],
    {},
    {"model_path": "none-there", "load_format": "safetensors"},
    {"model": "none-there", "name": "none-there", "selector": "draft", "rid": 5},
    {"text": [True], "prompt": [None], "messages": [{"role": "x"}], "input": [{}], "tokens": [-1]},
    {"text": "a", "prompt": "a", "messages": ASK, "max_tokens": -1, "n": 0, "echo": 1},
)


def test_no_route_names_a_file_of_the_server(plain: Engine) -> None:
    app, num_refused = create_app(plain, ServerArgs(tool_call_parser="qwen")), 0
    for route in app.routes:
        assert isinstance(route, Route)
        if route.path == "/freeze_gc":  # of this process
            continue
        path = route.path.replace("{name:path}", "none-there")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            for body in ODD if method != "GET" else (None, b"{"):
                sent = {"content": body} if isinstance(body, bytes) else {"json": body}
                answer = ask(app, method, path, **sent)
                if answer.status_code >= 400:
                    num_refused += 1
                    assert answer.status_code < 500 or path == "/ready", (path, body)
                    assert not named_files(plain, answer.text), (path, body)
    assert num_refused > 100


def named_files(engine: Engine, text: str) -> list[str]:
    args = engine.args
    own = [args.model_path, args.speculative_draft_model_path, args.compilation_cache_dir]
    own += [engine.config.tokenizer_path, args.chat_template]
    python = ["site-packages", "Traceback", 'File "', sys.prefix, os.getcwd()]
    files = [*own, *python, Path(__file__).parents[2], Path.home()]
    return [str(file) for file in files if str(file) in text]


def test_a_profile_that_cannot_be_written_names_no_file(
    plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(f"cannot write {SECRET}")

    app = create_app(plain, ServerArgs(profile_dir=str(tmp_path)))
    for name, paths in (("stop_trace", ["/start_profile", "/stop_profile"]), ("start_trace", [])):
        with monkeypatch.context() as patch:
            patch.setattr(f"jax.profiler.{name}", fails)
            for path in paths or ["/start_profile"]:
                answer = ask(app, "POST", path)
        assert (answer.status_code, answer.json()["message"][:10]) == (400, "no profile")
        if name == "stop_trace":
            jax.profiler.stop_trace()


class SaysItsFile(SpeakingEngine):
    """An engine whose runner fails with a library's message, which names a file."""

    def __init__(self, directory: Path) -> None:
        def fails(_: object) -> bool:
            raise OSError(f"cannot open {SECRET}")

        super().__init__(directory, says="Hi.", fails=fails)
        self._loop._recovery._limits = RestartLimits(first_pause=0.0, most=3)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_library_said_is_in_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    write_text_files(tmp_path, template="{{ messages }}")
    with SaysItsFile(tmp_path) as engine:
        app = create_app(engine)
        texts = [
            ask(app, "POST", "/generate", json={"text": "x", "stream": stream}).text
            for _ in range(4)  # until the engine is closed for good
        ]
        texts += [ask(app, "GET", path).text for path in ("/health", "/ready", "/v1/models")]
        with pytest.raises(EngineClosedError, match=SECRET):  # the operator's log has it
            engine.generate("x")
    assert "ran each of 2 times that the engine failed" in texts[0]
    assert "the engine is closed" in texts[3]
    assert SECRET not in "".join(texts)
    assert SECRET in caplog.text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("text is 5"), "text is 5"),
        (RequestError("no profile can be taken", f": {SECRET}"), "no profile can be taken"),
        (QueueFullError("full"), "full"),
        (EngineClosedError("the engine is closed", f": {SECRET}"), "the engine is closed"),
        (RequestFailedError("it failed", f": {SECRET}"), "it failed"),
        (RunnerError(f"the runner failed: {SECRET}"), "internal error"),
        (InvariantError(SECRET), "internal error"),
        (CheckpointError(SECRET), "internal error"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_client_is_told(error: JspecError, expected: str) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):  # one may come from another process
        assert public_message(each).startswith(expected)
        assert SECRET not in public_message(each)
        assert str(each) == str(error)

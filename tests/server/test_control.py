"""Routes besides generation: tokens, pausing, readiness, profiles; keys, origins, TLS files."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from jspec.errors import ConfigError
from jspec.server.app import create_app
from jspec.server.hardening.line_limit import MOST_LINES, REFUSED, LineLimit
from jspec.server.serve import check_certificate, with_environment
from jspec.server.server_args import ServerArgs
from jspec.server.service import Service
from jspec.serving.engine import Engine
from jspec.text.template.tokenizer_info import tokenizer_info
from tests.support.tiny_models import TinyPair

from .helpers import ENDLESS, ask, wait_idle, wait_running, wait_taken

FEW = {"text": "def fib(", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize(client: httpx.Client, engine: Engine, path: str) -> None:
    ids = list(engine.tokenizer.encode("def fib("))
    answer = client.post(path, json={"prompt": "def fib(", "model": "default"}).json()
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 16384}
    answer = client.post(path, json={"prompt": ["a", "def fib("]}).json()
    assert answer["tokens"] == [[ids_of(engine, "a")[0]], ids]
    assert answer["count"] == [1, len(ids)]
    for prompt in (5, None, [], ["a", 5]):
        response = client.post(path, json={"prompt": prompt})
        assert response.status_code == 400
        assert "prompt is" in response.json()["message"]


def test_a_chat_is_tokenized_as_its_prompt(client: httpx.Client, engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == list(engine.chat_prompt(messages)[0])
    assert answer["count"] == len(answer["tokens"])
    shorter = {"messages": messages, "add_generation_prompt": False}
    assert client.post("/tokenize", json=shorter).json()["count"] < answer["count"]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"messages": messages, "prompt": "x"}, "prompt and messages are given"),
        ({"messages": []}, "messages is []"),
        ({"text": "x"}, "prompt is null; expected text"),
    ]
    for body, message in bad:
        response = client.post("/tokenize", json=body)
        assert response.status_code == 400
        assert message in response.json()["message"]


def test_what_a_router_and_a_gateway_ask(client: httpx.Client, engine: Engine) -> None:
    assert [client.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert client.get("/get_load").json() == [idle]
    body = {"text": "x", "sampling_params": ENDLESS, "stream": True}
    with client.stream("POST", "/generate", json=body):
        wait_running(engine, 1)
        (load,) = client.get("/get_load").json()
        assert load["num_reqs"] == 1
        assert load["num_tokens"] > 0


def test_tokenizer_info_serves_lm_evals_remote_tokenizer(
    client: httpx.Client, engine: Engine, tiny_pair: TinyPair
) -> None:
    """It reads eos_token, encodes it without special tokens, and renders the template itself."""
    info = client.get("/tokenizer_info").json()
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == list(engine.eos_token_ids)
    assert info["bos_token"] == "<|endoftext|>"
    assert info["tokenizer_class"]
    assert info["chat_template"] == (tiny_pair.target_path / "chat_template.jinja").read_text()


def test_tokenizer_info_has_no_path_and_added_tokens_as_text(
    engine: Engine, tmp_path: Path
) -> None:
    token = {"content": "<s>", "special": True, "__type": "AddedToken"}
    config = {"bos_token": token, "added_tokens_decoder": {"1": token}, "extra": [token, 1]}
    paths = {"vocab_file": "/home/x/v", "special_tokens_map_file": "/y", "name_or_path": "/z"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **paths}))
    assert tokenizer_info(tmp_path, engine.tokenizer, named=None) == {
        "bos_token": "<s>",
        "added_tokens_decoder": {"1": "<s>"},
        "extra": ["<s>", 1],
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": None,
    }


def ids_of(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer.encode(text))


def test_detokenize(client: httpx.Client, engine: Engine) -> None:
    ids = [*ids_of(engine, "def é("), 256]
    answer = client.post("/detokenize", json={"tokens": ids}).json()
    assert answer == {"text": "def é(", "prompt": "def é("}
    body = {"tokens": [ids, [65]], "skip_special_tokens": False}
    assert client.post("/detokenize", json=body).json()["text"][0] == "def é(<|endoftext|>"
    many = ids * 4000  # decoded in a thread
    texts = client.post("/detokenize", json={"tokens": [many, ids]}).json()["text"]
    assert texts == ["def é(" * 4000, "def é("]
    for tokens in (None, "x", [-1], [2**31], [65, 2**20], [[1], 2]):
        response = client.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400
        assert "tokens" in response.json()["message"]


def test_a_pause_holds_what_runs_and_keeps_its_text(client: httpx.Client, engine: Engine) -> None:
    expected = client.post("/generate", json=FEW).json()["output_ids"]
    answer = client.post("/pause_generation", json={"mode": "in_place"})
    assert answer.json() == {"status": "ok", "mode": "in_place", "num_aborted": 0}
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 503
    found: list[Any] = []
    asking = threading.Thread(
        target=lambda: found.append(engine.generate("def fib(", FEW["sampling_params"]))
    )
    asking.start()
    wait_taken(engine, 1)
    asking.join(timeout=0.1)
    assert asking.is_alive()
    assert engine.stats.num_steps_in_flight == 0
    assert client.post("/continue_generation").status_code == 200
    asking.join(timeout=30)
    assert found[0]["output_ids"] == expected
    assert client.get("/ready").status_code == 200


def test_a_pause_in_the_middle_changes_no_token(client: httpx.Client, engine: Engine) -> None:
    params = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 3}
    expected = engine.generate("x", params)["output_ids"]
    stream = engine.generate("x", params, stream=True)
    next(stream)
    client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
    client.post("/continue_generation").raise_for_status()
    assert list(stream)[-1]["output_ids"] == expected


def test_a_pause_that_aborts(client: httpx.Client, engine: Engine) -> None:
    wait_idle(engine)
    asking = threading.Thread(target=engine.generate, args=(["x"] * 3, ENDLESS))
    asking.start()
    wait_taken(engine, 3)
    wait_running(engine, 2)
    assert client.post("/pause_generation").json()["num_aborted"] == 3
    asking.join(timeout=30)
    client.post("/continue_generation")
    wait_idle(engine)
    response = client.post("/pause_generation", json={"mode": "retract"})
    assert response.status_code == 400
    assert "mode is 'retract'; expected one of abort, in_place" in response.json()["message"]


@pytest.mark.slow
def test_a_profile_goes_where_the_flag_says(engine: Engine, tmp_path: Path) -> None:
    refused = ask(create_app(engine), "POST", "/start_profile")
    assert refused.status_code == 400
    assert "--profile-dir" in refused.json()["message"]
    app = create_app(engine, ServerArgs(profile_dir=str(tmp_path)))
    assert ask(app, "POST", "/stop_profile").status_code == 400
    assert ask(app, "POST", "/start_profile").json()["profile_dir"] == str(tmp_path)
    assert ask(app, "POST", "/start_profile").status_code == 400
    engine.generate("x", {"max_new_tokens": 2})
    assert ask(app, "POST", "/stop_profile").status_code == 200
    assert list(tmp_path.rglob("*.xplane.pb"))


def post(app: Any, headers: dict[str, str], path: str = "/abort_request") -> httpx.Response:
    return ask(app, "POST", path, json={"abort_all": True}, headers=headers)


def test_pages_of_other_sites_may_not_act(engine: Engine) -> None:
    app = create_app(engine)
    own = {"Origin": "http://localhost:30000", "Host": "localhost:30000"}
    for headers in ({}, own, {"Origin": "http://[::1]:1", "Host": "[::1]:1"}):
        assert post(app, headers).status_code == 200
    for headers in (
        {"Origin": "https://evil.example", "Host": "localhost:30000"},
        {"Origin": "null", "Host": "localhost:30000"},
        {"Origin": "http://localhost:8080", "Host": "localhost:30000"},
        {"Origin": "http://evil.example:30000", "Host": "evil.example:30000"},  # rebound DNS
        {"Origin": "http://[", "Host": "localhost:30000"},  # no address
        {"Origin": "http://[", "Host": "["},
        {"Origin": "http://x]", "Host": "x]"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        response = post(app, headers)
        assert response.status_code == 403, headers
        assert "--allowed-origins" in response.json()["message"]
        for path in ("/flush_cache", "/freeze_gc"):
            assert ask(app, "GET", path, headers=headers).status_code == 403
    assert ask(app, "GET", "/v1/models", headers={"Origin": "null"}).status_code == 200


def test_a_page_of_a_rebound_name_may_not_act_or_read_by_a_get(engine: Engine) -> None:
    """A browser's GET of the page's own host has no Origin."""
    app, rebound = create_app(engine), {"Host": "evil.example:30000"}
    named = create_app(engine, ServerArgs(api_key="k"))
    allowed = create_app(engine, ServerArgs(allowed_origins="http://evil.example:30000"))
    for path in ("/flush_cache", "/server_info", "/model_info"):
        for page in (
            rebound | {"Sec-Fetch-Site": "same-origin"},
            rebound | {"Accept-Language": "*"},  # to a URL of http, but for localhost
        ):
            refused = ask(app, "GET", path, headers=page)
            assert refused.status_code == 403, (path, page)
            assert "which others may own" in refused.json()["message"]
            assert ask(named, "GET", path, headers=page | {"X-API-Key": "k"}).status_code == 200
            assert ask(allowed, "GET", path, headers=page).status_code == 200
        for headers in (  # a curl, an address that somebody types, and the server's own page
            rebound,
            rebound | {"Sec-Fetch-Site": "none", "Accept-Language": "en"},
            {"Host": "127.0.0.1:30000", "Sec-Fetch-Site": "same-origin"},
            {"Host": "127.0.0.1:30000", "Accept-Language": "en"},
        ):
            assert ask(app, "GET", path, headers=headers).status_code == 200, headers


def test_allowed_origins_may_act_and_are_told_so(engine: Engine) -> None:
    origin = "https://a.example"
    app = create_app(engine, ServerArgs(allowed_origins=f'["{origin}", "http://b"]'))
    response = post(app, {"Origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert ask(app, "OPTIONS", "/generate", headers=asked).status_code == 200
    assert post(app, {"Origin": "https://c.example"}).status_code == 403
    anyone = create_app(engine, ServerArgs(allowed_origins="*"))
    assert post(anyone, {"Origin": "https://c.example"}).status_code == 200
    named = create_app(engine, ServerArgs(api_key="k"))
    host = {"Origin": "https://api.example", "Host": "api.example", "X-API-Key": "k"}
    assert post(named, host).status_code == 200
    for bad in ("evil.example", "https://a/b", "https://a b"):
        with pytest.raises(ConfigError, match="allowed_origins holds"):
            ServerArgs(allowed_origins=bad)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/abort_request", "/tokenize"])
def test_what_a_form_can_send_is_a_415(engine: Engine, path: str, kind: str) -> None:
    response = ask(
        create_app(engine),
        "POST",
        path,
        content=b'{"abort_all": true}',
        headers={"Content-Type": kind},
    )
    assert response.status_code == 415
    assert f"the Content-Type is '{kind}'; expected application/json" in response.json()["message"]


def test_the_key_may_come_from_the_environment() -> None:
    assert with_environment(ServerArgs(), {"JSPEC_API_KEY": "k"}).api_key == "k"
    assert with_environment(ServerArgs(api_key="a"), {"JSPEC_API_KEY": "k"}).api_key == "a"
    assert with_environment(ServerArgs(), {"JSPEC_API_KEY": ""}).api_key is None


def test_a_certificate_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    for name in ("c.pem", "none.pem"):
        with pytest.raises(ConfigError, match=r"ssl_certfile .* cannot be used"):
            check_certificate(ServerArgs(ssl_certfile=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="ssl_keyfile is given without ssl_certfile"):
        ServerArgs(ssl_keyfile="k.pem")


def test_secrets_are_not_in_server_info(engine: Engine) -> None:
    args = ServerArgs(ssl_certfile="c", ssl_keyfile_password="s3cret")
    info = ask(create_app(engine, args), "GET", "/server_info")
    assert "s3cret" not in info.text
    assert info.json()["ssl_keyfile_password"] == "(set)"


def test_refusals_are_logged_and_requests_if_asked_for(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "jspec.server"):
        strict = create_app(engine, ServerArgs(strict_requests=True))
        ask(strict, "POST", "/generate", json={"text": "x", "a\nb": 1})
        ask(create_app(engine), "GET", "/v1/models")
        ask(create_app(engine, ServerArgs(log_requests=True)), "GET", "/v1/models")
    refused, logged = [r.getMessage() for r in caplog.records if r.name.startswith("jspec.server")]
    assert refused.startswith("400 POST /generate: the request body has the unknown field 'a")
    assert "\n" not in refused
    assert logged.startswith("GET /v1/models 200 in 0.")


def test_lines_that_clients_cause_are_limited_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Twenty per second; the others are counted when the second ends, even without a further
    line."""
    times = [0.0, *[0.99] * (MOST_LINES + 4), 1.0]
    limit = LineLimit(iter([0.0, *times]).__next__)

    async def refuse() -> None:
        for _ in range(MOST_LINES + 5):
            REFUSED.warning("refused")
        await asyncio.sleep(0.05)
        REFUSED.warning("refused")

    REFUSED.addFilter(limit)
    try:
        asyncio.run(refuse())
    finally:
        REFUSED.removeFilter(limit)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        *["refused"] * MOST_LINES,
        "jspec.server.refused: 5 more lines were not logged",
        "refused",
    ]


def test_a_huge_name_does_not_come_back(engine: Engine) -> None:
    for body in ({"text": "x", "k" * 10**6: 1}, {"text": "x", "sampling_params": {"k" * 10**6: 1}}):
        app = create_app(engine, ServerArgs(strict_requests=True))
        response = ask(app, "POST", "/generate", json=body)
        assert response.status_code == 400
        assert len(response.content) < 4000
    for path, ask_for in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        value = "x" if ask_for == "prompt" else [{"role": "user", "content": "x"}]
        body = {ask_for: value, "model": "k" * 10**6}
        response = ask(create_app(engine), "POST", path, json=body)
        assert response.status_code == 404
        assert len(response.content) < 4000
    params = {"temperature": "k" * 10**6}
    response = ask(
        create_app(engine), "POST", "/generate", json={"text": "x", "sampling_params": params}
    )
    assert len(response.content) < 1000


def test_a_long_prefill_is_progress(engine: Engine) -> None:
    """Its steps end one by one, and emit no token."""
    service = Service(engine, ServerArgs())
    stream = threading.Thread(
        target=engine.generate, args=(None, {"max_new_tokens": 1}, [[1] * 2000])
    )
    stream.start()
    wait_running(engine, 1)
    emitted = engine.stats.num_emitted
    assert asyncio.run(service.probe())
    assert engine.stats.num_emitted == emitted
    stream.join(timeout=60)
    wait_idle(engine)


def test_a_path_cannot_begin_a_line_of_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "jspec.server"):
        app = create_app(engine, ServerArgs(log_requests=True))
        ask(app, "GET", "/v1/models/a%0A200%20GET%20/b" + "c" * 5000)
        ask(app, "POST", "/a%0Db", headers={"Sec-Fetch-Site": "cross-site"})
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("jspec.server")]
    assert len(lines) == 4  # each refused, and answered
    assert all(line.isprintable() and len(line) < 1000 for line in lines)

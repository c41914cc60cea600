"""Grammars through every API: a request in the peers' fields gets an answer of that form."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from jspec.errors import RequestError
from jspec.server.app import create_app
from jspec.server.openai.completion_schema import parse_completion
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import events_of

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
CODE = "[a-f]{2}-[0-9]{2,4}"


def check(text: str) -> None:
    value = json.loads(text)
    assert value["a"] in ("x", "yy")
    assert isinstance(value["b"], bool)
    assert set(value) == {"a", "b"}


@pytest.mark.parametrize("temperature", [0, 1])
def test_generate_follows_a_schema_beside_a_prompt_that_follows_none(
    client: httpx.Client, temperature: int
) -> None:
    free = {"max_new_tokens": 12, "temperature": temperature, "sampling_seed": 5}
    alone = client.post("/generate", json={"text": "free", "sampling_params": free}).json()
    tied = {**free, "max_new_tokens": 80, "json_schema": json.dumps(SCHEMA)}
    body = {"text": ["free", "tied"], "sampling_params": [free, tied]}
    other, answer = client.post("/generate", json=body).json()
    check(answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert other["text"] == alone["text"]


def test_openais_client_gets_json_and_streams_it(live_url: str) -> None:
    client = openai.OpenAI(base_url=f"{live_url}/v1", api_key="none")
    options: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": "json"}],
        "response_format": WRAPPED,
        "seed": 3,
        "max_tokens": 80,
        "logprobs": True,
    }
    answer = client.chat.completions.create(**options)
    check(answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(**options, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": CODE}, CODE),
        ({"guided_regex": CODE}, CODE),
        ({"structured_outputs": {"choice": ["one", "two (2)"]}}, r"one|two \(2\)"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"ebnf": 'root ::= "ab" | "cd"'}, "ab|cd"),
        ({"regex": CODE, "thinking_token_budget": 3}, CODE),  # there is no reasoning
    ],
    ids=str,
)
def test_a_completion_follows_any_kind(
    client: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": "p", "max_tokens": 40, "seed": 1, "n": 2, **fields}
    for choice in client.post("/v1/completions", json=body).json()["choices"]:
        assert re.fullmatch(pattern, choice["text"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, "regex is '(a'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is null"),
        ({"response_format": WRAPPED, "guided_regex": "a"}, "guided_regex and response_format"),
        ({"response_format": WRAPPED, "regex": "a"}, "json_schema and regex are given"),
        ({"guided_choice": [3]}, "guided_choice is [3]; expected a list of texts"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml is 1; expected one of"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos is true beside regex"),
        ({"thinking_token_budget": -1}, "thinking_token_budget is -1"),
        (
            {"thinking_token_budget": 3, "max_thinking_tokens": 4},
            "thinking_token_budget is 3 and max_thinking_tokens 4; expected one of them",
        ),
    ],
    ids=str,
)
def test_a_bad_grammar_is_refused_in_a_sentence(
    client: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "p", **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_chat_as_guidance_sends_it(client: httpx.Client) -> None:
    """Its VLLMModel sends one grammar under vLLM's older name and its newer, with captures."""
    grammar = '%llguidance {}\n\nstart: "I: " word\nword[capture="word"]: "ab" | "cd"\n'
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        **{"logprobs": True, "stream": True, "stream_options": {"include_usage": True}},
        **{"temperature": 0.7, "max_tokens": 30, "top_p": None, "top_k": 9},
        "guided_decoding_backend": "guidance",
        "guided_grammar": grammar,
        "structured_outputs": {"grammar": grammar},
    }
    pieces = events_of(client.post("/v1/chat/completions", json=body).raise_for_status().text)
    tokens, text = [], ""
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        text += choice["delta"].get("content") or ""
        tokens += (choice["logprobs"] or {"content": []})["content"]
    assert re.fullmatch("I: (ab|cd)", text)
    assert "".join(token["token"] for token in tokens).startswith(text)
    assert pieces[-1]["usage"]["completion_tokens"] == len(tokens)


def test_neutral_words_ask_for_nothing() -> None:
    neutral: tuple[dict[str, Any], ...] = (
        {"response_format": {"type": "text"}, "guided_json": None, "guided_choice": []},
        {"structured_outputs": {"json": None}},
        {"response_format": None},
    )
    for fields in neutral:
        call = parse_completion({"prompt": "p", **fields})
        assert call.prompts[0].sampling.grammar is None


def test_the_python_api_takes_an_object(engine: Engine) -> None:
    check(engine.generate("p", {"json_schema": SCHEMA, "max_new_tokens": 80})["text"])
    with pytest.raises(RequestError, match="unclosed"):
        engine.generate(["p", "q"], {"regex": "(a"})


def test_a_call_that_must_be_is_one(live_url: str) -> None:
    client = openai.OpenAI(base_url=f"{live_url}/v1", api_key="none")
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    chunks = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "call"}],
        tools=cast(Any, [tool]),
        tool_choice={"type": "function", "function": {"name": "pick"}},
        stream=True,
        seed=3,
        max_tokens=200,
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[-1].finish_reason == "tool_calls"
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
    check("".join(piece.function.arguments or "" for piece in pieces if piece.function))


def test_a_list_says_which_grammar_is_wrong_and_a_row_may_do_without_drafts(
    engine: Engine,
) -> None:
    good = {"max_new_tokens": 80, "json_schema": json.dumps(SCHEMA), "sampling_seed": 5}
    plain = {**good, "speculative": False}
    bad = {**good, "json_schema": '{"type": "nonsense"}'}
    message = r"Invalid type: nonsense \(prompt 1 of 3"
    with pytest.raises(RequestError, match=message):
        engine.generate(["tied"] * 3, [good, bad, plain])
    drafted, error, one_by_one = engine.generate(
        ["tied"] * 3, [good, bad, plain], return_exceptions=True
    )
    assert re.search(message, str(error))
    check(drafted["text"])
    assert one_by_one["text"] == drafted["text"]
    assert "spec_verify_ct" not in one_by_one["meta_info"]


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer like Llama 2's: text pieces, byte fallback, a leading space added and
    stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁true", "▁false", "tr", "ue", "x", "{", "▁{", '"', '":', "▁yy", "▁["]
    vocab = {piece: piece_id for piece_id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("pieces")
    backend.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    config = {"eos_token": "</s>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_tokenizer_of_pieces_follows_grammars(
    engine_arguments: dict[str, Any], piece_tokenizer: Path
) -> None:
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    chat = {"messages": [{"role": "user", "content": "call"}], "max_tokens": 250, "seed": 3}
    with Engine(**{**engine_arguments, "tokenizer_path": str(piece_tokenizer)}) as engine:
        args = ServerArgs(log_interval=0, tool_call_parser="qwen")
        transport = httpx.ASGITransport(app=create_app(engine, args))

        async def ask(path: str, **body: Any) -> Any:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answer = await client.post(path, json=body, timeout=100)
                assert answer.status_code == 200, answer.text
                return answer.json()

        for seed in range(2):
            tied = {"regex": "(true|false)", "sampling_seed": seed, "temperature": 1}
            answer = asyncio.run(ask("/generate", text="abc", sampling_params=tied))
            assert answer["text"] in ("true", "false")
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        format = {"response_format": WRAPPED}
        answer = asyncio.run(ask("/v1/chat/completions", **chat, **format))
        check(answer["choices"][0]["message"]["content"])
        forced = {"tools": [tool], "tool_choice": "required"}
        answer = asyncio.run(ask("/v1/chat/completions", **chat, **forced))
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        check(call["function"]["arguments"])


def test_a_budget_ends_reasoning_in_the_text(client: httpx.Client) -> None:
    """With a prompt that opens it; the tokens of this tokenizer are bytes."""

    def text_of(prompt: str, **fields: Any) -> str:
        body = {"prompt": prompt, "max_tokens": 40, "seed": 3, "ignore_eos": True, **fields}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    inside = text_of("Why? <think>\n", max_tokens=9)
    for name in ("thinking_token_budget", "max_thinking_tokens", "thinking_budget_tokens"):
        bounded = text_of("Why? <think>\n", **{name: 9})
        assert bounded.startswith(inside + "</think>")
        assert len(bounded) > len(inside + "</think>")
    assert text_of("<think>\n", thinking_token_budget=0).startswith("</think>")
    # Reasoning is over, or cannot begin: this tokenizer has no token <think>.
    for prompt in ("Why? <think>\n\n</think>\n", "Why?"):
        assert text_of(prompt, thinking_token_budget=3) == text_of(prompt)

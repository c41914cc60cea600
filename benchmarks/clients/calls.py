"""Calls of clients that others wrote, run by `python -m benchmarks.clients` in an environment of
their own: `python calls.py NAME URL`. Nothing of jspec is imported.

Each function compares what the client returns with the server's own answer to a plain request.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, KEY, NUM_TOKENS = "def fib(n):", "none", 24
MESSAGES = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fib", "sum"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "choose", "parameters": SCHEMA}}
LONG = "x = 1\n" * 5000  # longer than the context


def plain(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def model_of(url: str) -> str:
    return str(plain(url, "/v1/models")["data"][0]["id"])


def expected_chat(url: str) -> str:
    body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
    return str(plain(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def expected_completion(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return str(plain(url, "/v1/completions", body)["choices"][0]["text"])


def check_choice(found: Any) -> None:
    found = json.loads(found) if isinstance(found, str) else found
    assert found["name"] in ("fib", "sum"), found
    assert found["count"] in (1, 2, 3), found


def refused(kind: type[Exception], call: Callable[..., Any], **arguments: Any) -> Any:
    """Return the error of a call that must fail."""
    try:
        call(**arguments)
    except kind as error:
        return error
    raise AssertionError("a prompt that is too long was answered")


def equal(found: Any, expected: Any) -> None:
    assert found == expected, (found, expected)


def openai(url: str) -> None:
    from openai import BadRequestError, OpenAI

    client, model = OpenAI(base_url=f"{url}/v1", api_key=KEY), model_of(url)
    options: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0}
    options["max_tokens"] = NUM_TOKENS
    expected = expected_chat(url)
    answer = client.chat.completions.create(**options)
    equal(answer.choices[0].message.content, expected)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    equal((text, events[-1].usage.completion_tokens), (expected, answer.usage.completion_tokens))
    done = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0
    )
    equal(done.choices[0].text, expected_completion(url))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    check_choice(
        client.chat.completions.create(**{**options, "max_tokens": 99}, response_format=schema)
        .choices[0]
        .message.content
    )
    call = client.chat.completions.create(
        **{**options, "max_tokens": 99}, tools=[TOOL], tool_choice="required"
    )
    check_choice(call.choices[0].message.tool_calls[0].function.arguments)
    found = client.responses.create(
        model=model, input=PROMPT, max_output_tokens=NUM_TOKENS, temperature=0
    )
    equal(found.output_text, expected)
    with client.responses.stream(
        model=model, input=PROMPT, max_output_tokens=NUM_TOKENS, temperature=0
    ) as events_of_response:
        deltas = [e.delta for e in events_of_response if e.type == "response.output_text.delta"]
    equal("".join(deltas), expected)
    equal(next(each.id for each in client.models.list()), model)
    refusal = refused(BadRequestError, client.completions.create, model=model, prompt=LONG)
    equal(refusal.code, "context_length_exceeded")


def anthropic(url: str) -> None:
    from anthropic import Anthropic, BadRequestError

    client, model = Anthropic(base_url=url, api_key=KEY), model_of(url)
    options: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": NUM_TOKENS}
    expected = expected_chat(url)
    options["extra_body"] = {"temperature": 0}  # the newest client has no argument for it
    answer = client.messages.create(**options)
    equal(answer.content[0].text, expected)
    with client.messages.stream(**options) as stream:
        equal("".join(stream.text_stream), expected)
        equal(stream.get_final_message().usage.output_tokens, answer.usage.output_tokens)
    tool = {"name": "choose", "input_schema": SCHEMA}
    call = client.messages.create(
        **{**options, "max_tokens": 99}, tools=[tool], tool_choice={"type": "any"}
    )
    (use,) = [block for block in call.content if block.type == "tool_use"]
    check_choice(use.input)
    counted = client.messages.count_tokens(model=model, messages=MESSAGES)
    equal(counted.input_tokens, answer.usage.input_tokens)
    asked: Any = {"model": model, "messages": [{"role": "user", "content": LONG}]}
    refusal = refused(BadRequestError, client.messages.create, max_tokens=9, **asked)
    assert "maximum context length" in str(refusal), refusal


def litellm(url: str) -> None:
    import litellm as lib

    model, expected = model_of(url), expected_chat(url)
    options: dict[str, Any] = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
    for provider in ("openai", "hosted_vllm"):
        at = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": KEY}
        equal(lib.completion(**at, **options).choices[0].message.content, expected)
        parts = lib.completion(**at, **options, stream=True)
        equal("".join(part.choices[0].delta.content or "" for part in parts), expected)
    at = {"model": f"anthropic/{model}", "api_base": url, "api_key": KEY}
    equal(lib.completion(**at, **options).choices[0].message.content, expected)
    # A prompt that is too long goes to the fallback, since the error is known by its words.
    short = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY}
    router = lib.Router(
        model_list=[
            {"model_name": "short", "litellm_params": short},
            {"model_name": "long", "litellm_params": {**short, "mock_response": "from the other"}},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    answer = router.completion(model="short", messages=[{"role": "user", "content": LONG}])
    equal(answer.choices[0].message.content, "from the other")


def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    model, expected = model_of(url), expected_chat(url)
    at: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY, "model": model}
    at |= {"temperature": 0, "max_tokens": NUM_TOKENS}
    chat = ChatOpenAI(**at)
    equal(chat.invoke(PROMPT).content, expected)
    equal("".join(part.content for part in chat.stream(PROMPT)), expected)
    equal([each.content for each in chat.batch([PROMPT] * 2)], [expected] * 2)
    equal(ChatOpenAI(**at, use_responses_api=True).invoke(PROMPT).text, expected)
    equal(OpenAI(**at).invoke(PROMPT), expected_completion(url))
    more = ChatOpenAI(**{**at, "max_tokens": 99})
    named = {"title": "choose", "description": "", **SCHEMA}
    check_choice(more.with_structured_output(named, method="json_schema").invoke(PROMPT))
    check_choice(more.with_structured_output(named, method="function_calling").invoke(PROMPT))
    (call,) = more.bind_tools([TOOL], tool_choice="choose").invoke(PROMPT).tool_calls
    check_choice(call["args"])


def langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(
        base_url=url, api_key=KEY, model=model_of(url), temperature=0, max_tokens=NUM_TOKENS
    )
    expected = expected_chat(url)
    equal(chat.invoke(PROMPT).content, expected)
    parts = [part.content for part in chat.stream(PROMPT)]
    texts = (part if isinstance(part, str) else part[0].get("text", "") for part in parts if part)
    equal("".join(texts), expected)


def _choice_model() -> Any:
    from typing import Literal

    from pydantic import ConfigDict, create_model

    return create_model(
        "Choice",
        __config__=ConfigDict(extra="forbid"),
        name=(Literal["fib", "sum"], ...),
        count=(Literal[1, 2, 3], ...),
    )


def instructor(url: str) -> None:
    import instructor as lib
    from openai import OpenAI

    for mode in (lib.Mode.TOOLS, lib.Mode.JSON_SCHEMA):
        client = lib.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)
        found = client.chat.completions.create(
            model=model_of(url),
            messages=MESSAGES,
            response_model=_choice_model(),
            max_tokens=120,
            temperature=0,
            max_retries=0,
        )
        check_choice(found.model_dump())


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(
        model_of(url), provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    )
    settings: Any = {"temperature": 0, "max_tokens": NUM_TOKENS}
    equal(Agent(model, model_settings=settings).run_sync(PROMPT).output, expected_chat(url))
    settings = {"temperature": 0, "max_tokens": 120}
    for kind in (NativeOutput, ToolOutput):
        agent: Any = Agent(model, output_type=kind(_choice_model()), model_settings=settings)
        check_choice(agent.run_sync(PROMPT).output.model_dump())


def openai_agents(url: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    name, expected = model_of(url), expected_chat(url)

    async def run() -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=name, openai_client=client)
            settings = ModelSettings(temperature=0, max_tokens=NUM_TOKENS)
            agent: Any = Agent(name="plain", model=model, model_settings=settings)
            if kind is OpenAIChatCompletionsModel:  # the other refuses an answer that is cut
                equal((await Runner.run(agent, PROMPT)).final_output, expected)
            settings = ModelSettings(temperature=0, max_tokens=120)
            agent = Agent(
                name="typed", model=model, model_settings=settings, output_type=_choice_model()
            )
            check_choice((await Runner.run(agent, PROMPT)).final_output.model_dump())

    asyncio.run(run())


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    at: dict[str, Any] = {"model": model_of(url), "api_base": f"{url}/v1", "api_key": KEY}
    at |= {"temperature": 0, "max_tokens": NUM_TOKENS, "context_window": 2048}
    equal(OpenAILike(**at).complete(PROMPT).text, expected_completion(url))
    chat = OpenAILike(**at, is_chat_model=True)
    message = ChatMessage(role="user", content=PROMPT)
    equal(chat.chat([message]).message.content, expected_chat(url))
    equal("".join(part.delta or "" for part in chat.stream_chat([message])), expected_chat(url))


TASK = """
task: lines
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: KIND
doc_to_text: "{{text}}"
doc_to_target: "{{target}}"
doc_to_choice: "{{choices}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: METRIC}]
"""


def lm_eval(url: str) -> None:
    """Its local-completions, by log-probability and by text, with the server's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "lines.jsonl"
        row = {"text": "import", "choices": [" os", " zzzqqq"], "target": 0}
        data.write_text(json.dumps(row) + "\n" + json.dumps({**row, "text": "import  "}) + "\n")
        for kind, metric in (("multiple_choice", "acc"), ("generate_until", "exact_match")):
            task = TASK.replace("DATA", str(data)).replace("KIND", kind).replace("METRIC", metric)
            if kind == "generate_until":
                task = "\n".join(line for line in task.split("\n") if "doc_to_choice" not in line)
            (Path(folder) / "lines.yaml").write_text(task)
            at = f"model={model_of(url)},base_url={url}/v1/completions,num_concurrent=2"
            at += ",tokenizer_backend=remote,tokenized_requests=False,max_length=512"
            words = ["--model", "local-completions", "--model_args", at, "--tasks", "lines"]
            words += ["--include_path", folder, "--output_path", f"{folder}/{kind}"]
            run = [str(Path(sys.executable).with_name("lm_eval")), "run", *words]
            done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
            (found,) = Path(folder, kind).rglob("results*.json")
            scores = json.loads(found.read_text())["results"]["lines"]
            assert scores[f"{metric},none"] == (1.0 if kind == "multiple_choice" else 0.0), scores


def guidance(url: str) -> None:
    import guidance as lib
    from guidance.models.experimental import VLLMModel

    model = VLLMModel(model_of(url), base_url=f"{url}/v1", api_key=KEY)
    with lib.user():
        model += PROMPT
    with lib.assistant():
        number = (model + lib.gen("made", regex="[0-9]{3}"))["made"]
        name = (model + lib.select(["os", "sys"], name="made"))["made"]
        choice = (model + lib.json("made", schema=SCHEMA))["made"]
    assert number.isdigit(), number
    equal(len(number), 3)
    assert name in ("os", "sys"), name
    check_choice(choice)


def sglang_frontend() -> Any:
    """Import the frontend language without the package's own module, which imports the server."""
    package = types.ModuleType("sglang")
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    package.__path__ = [folder]
    sys.modules["sglang"] = package
    names = vars(importlib.import_module("sglang.lang.choices"))
    names |= vars(importlib.import_module("sglang.lang.api"))
    backend = importlib.import_module("sglang.lang.backend.runtime_endpoint")
    return types.SimpleNamespace(**names, RuntimeEndpoint=backend.RuntimeEndpoint)


def sglang(url: str) -> None:
    """Its frontend language: gen, fork, regex and the three ways to select."""
    sgl = sglang_frontend()
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))

    @sgl.function
    def complete(s: Any) -> None:
        s += PROMPT + sgl.gen("text", max_tokens=NUM_TOKENS, temperature=0)

    equal(complete.run()["text"], expected_completion(url))
    parts = complete.run(stream=True)
    equal("".join(parts.text_iter(var_name="text")), expected_completion(url))

    @sgl.function
    def number(s: Any) -> None:
        s += "x = " + sgl.gen("number", max_tokens=9, regex="[0-9]{3}")

    assert number.run()["number"].isdigit()

    methods = (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    )
    for method in methods:

        @sgl.function
        def choose(s: Any, method: Any = method) -> None:
            s += "x = 1\nimport " + sgl.select("name", choices=["os", "re"], choices_method=method)

        assert choose.run()["name"] in ("os", "re")


CALLS: dict[str, Callable[[str], None]] = {
    "openai": openai,
    "anthropic": anthropic,
    "litellm": litellm,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "instructor": instructor,
    "pydantic-ai-slim": pydantic_ai,
    "openai-agents": openai_agents,
    "llama-index-llms-openai-like": llama_index,
    "lm-eval": lm_eval,
    "guidance": guidance,
    "sglang": sglang,
}

if __name__ == "__main__":
    CALLS[sys.argv[1]](sys.argv[2])

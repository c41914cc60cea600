"""LoRA adapters of a serving engine: the texts of merged weights, per request, while others run.

The trees come from the target merged with adapter `a`, so drafts of its rows are accepted, and
those of others seldom are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from starlette.applications import Starlette

from jspec.engine.weights.adapters import _with_slot
from jspec.errors import CheckpointError, ConfigError, RequestError
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from tests.support.lora_adapters import Tensors, write_adapter, write_merged
from tests.support.tiny_models import TinyPair, tiny_target_config, write_tiny_target

from .conftest import TEMPLATE
from .helpers import ask, wait_idle, wait_running, wait_taken

pytestmark = pytest.mark.slow
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PROMPTS = ("def fib(n):", "x" * 45)  # the second is longer than a chunk
GREEDY = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 4000}
SAMPLED = {**GREEDY, "temperature": 1.0, "sampling_seed": 3, "frequency_penalty": 0.4}


@dataclass(frozen=True)
class Adapters:
    folder: Path
    target: Path
    base: Tensors
    merged: dict[str, Tensors]  # changed weights by name

    @classmethod
    def write(cls, folder: Path, target: Path) -> Adapters:
        base = load_file(target / "model.safetensors")
        merged = {
            "a": write_adapter(folder / "a", base, ALL, rank=4, seed=1),
            "b": write_adapter(folder / "b", base, ("q_proj", "v_proj"), rank=2, alpha=3, seed=2),
            "c": write_adapter(folder / "c", base, ALL, rank=3, seed=3),
        }
        return cls(folder, target, base, merged)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "model_path": str(self.target),
            "max_loras_per_batch": 2,
            "lora_paths": {name: self.path(name) for name in ("a", "b")},
            "dtype": "float32",
            "compile_at_start": "common",
            "chunked_prefill_size": 32,
            "max_total_tokens": 8000,
        }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    target = write_tiny_target(
        folder / "target", tiny_target_config(num_layers=1, max_position=4096)
    )
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return Adapters.write(folder, target)


@pytest.fixture(scope="module")
def arguments(adapters: Adapters, programs_of_all: Path) -> dict[str, Any]:
    return {
        **adapters.arguments,
        "speculative_algorithm": "NGRAM",
        "speculative_ngram_max_match_window_size": 2,
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 3,
        "max_running_requests": 2,
        "disable_logprobs": True,
        "compilation_cache_dir": str(programs_of_all),
    }


@pytest.fixture(scope="module")
def lora_engine(arguments: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**arguments) as engine:
        yield engine


@pytest.fixture
def app(lora_engine: Engine) -> Starlette:
    return create_app(lora_engine, ServerArgs(log_interval=0, served_model_name="tiny"))


def texts(engine: Engine, lora: Any = None, prompts: Any = PROMPTS, **more: Any) -> list[Any]:
    params = [GREEDY, SAMPLED][: len(prompts)]
    each = [{**own, **more} for own in params]
    answers = engine.generate(list(prompts), each, lora_path=lora)
    return [answer["output_ids"] for answer in answers]


def merged_texts(engine: Engine, adapters: Adapters, name: str) -> list[Any]:
    """Return the texts of the target with an adapter's merged weights, then restore its own."""
    changed = adapters.merged[name]
    engine.update_weights_from_tensor(changed, selector="target")
    try:
        return texts(engine)
    finally:
        back = {each: adapters.base[each] for each in changed}
        engine.update_weights_from_tensor(back, selector="target")


def check_texts(engine: Engine, adapters: Adapters, base: list[Any]) -> None:
    """Assert that each adapter has its own texts, alone, mixed, and without speculation."""
    assert texts(engine) == base
    wanted = {name: merged_texts(engine, adapters, name) for name in ("a", "b")}
    assert wanted["a"] != base != wanted["b"] != wanted["a"]
    for name, own in wanted.items():  # after updates of the base weights, which keep adapters
        assert texts(engine, name) == own
        assert texts(engine, name, speculative=False) == own
    for i in range(len(PROMPTS)):
        params = [(GREEDY, SAMPLED)[i]] * 4
        names = ["b", None, "a", "b"]
        mixed = engine.generate([PROMPTS[i]] * 4, params, lora_path=names)
        found = [answer["output_ids"] for answer in mixed]
        assert found == [(wanted[name] if name else base)[i] for name in names]


def accepted(engine: Engine, lora: str | None) -> float:
    answer = engine.generate(PROMPTS[0], GREEDY, lora_name=lora)
    return float(answer["meta_info"]["spec_accept_length"])


def test_each_adapter_has_the_texts_of_merged_weights(
    lora_engine: Engine, adapters: Adapters
) -> None:
    check_texts(lora_engine, adapters, texts(lora_engine))
    assert max(accepted(lora_engine, name) for name in ("a", "b")) > 1


def test_trees_are_accepted_for_adapters_over_two_ranks_of_two_shards(
    engine: Engine, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """Rows without an adapter have the texts of an engine without LoRA."""
    adapters = Adapters.write(tmp_path / "adapters", tiny_pair.target_path)
    draft = write_merged(tmp_path / "draft", tiny_pair.target_path, adapters.merged["a"])
    with Engine(
        **adapters.arguments,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(draft),
        speculative_num_steps=2,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=6,
        max_running_requests=4,
        tp_size=2,
        dp_size=2,
        compilation_cache_dir="",
    ) as drafting:
        check_texts(drafting, adapters, texts(engine))
        assert accepted(drafting, "a") > 2 > accepted(drafting, None)


def test_prefixes_are_an_adapters_own(lora_engine: Engine, adapters: Adapters) -> None:
    """A second adapter of the same name has none of the first one's."""
    prompt = "prefix " * 12

    def ask(lora: str | None) -> tuple[list[int], int]:
        answer = lora_engine.generate(prompt, {**GREEDY, "max_new_tokens": 4}, lora_path=lora)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    lora_engine.flush_cache()
    firsts = {name: ask(name) for name in (None, "a", "b")}
    seconds = {name: ask(name) for name in (None, "a", "b")}
    assert [cached for _, cached in firsts.values()] == [0, 0, 0]
    assert all(cached > 0 for _, cached in seconds.values())
    assert all(firsts[name][0] == seconds[name][0] for name in firsts)
    lora_engine.unload_lora_adapter("b")
    assert lora_engine.load_lora_adapter("b", adapters.path("c"))["success"]
    other, cached = ask("b")
    assert cached == 0
    assert other != firsts["b"][0]
    lora_engine.unload_lora_adapter("b")
    lora_engine.load_lora_adapter("b", adapters.path("b"))
    assert ask("b") == (firsts["b"][0], 0)


def test_requests_keep_an_adapter_until_they_end(
    lora_engine: Engine, adapters: Adapters, app: Starlette
) -> None:
    """Its unloading waits, other requests go on, and nothing is compiled for the next one."""
    engine, answers = lora_engine, []
    programs = engine.get_server_info()["num_programs"], _with_slot._cache_size()
    own = texts(engine, "a")
    stream = engine.generate(PROMPTS[0], LONG, lora_path="b", stream=True)
    first = next(stream)
    asyncio.run(engine.pause_generation())
    with pytest.raises(RequestError, match="generation is paused and requests with this adapter"):
        engine.unload_lora_adapter("b")
    asyncio.run(engine.continue_generation())
    unloading = threading.Thread(
        target=lambda: answers.append(
            ask(app, "POST", "/unload_lora_adapter", json={"lora_name": "b"})
        )
    )
    unloading.start()
    deadline = time.monotonic() + 60
    while "b" in engine.lora_adapters:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(RequestError, match="'b'; expected a loaded adapter: 'a'"):
        engine.generate("x", lora_path="b")
    refused = ask(
        app, "POST", "/load_lora_adapter", json={"lora_name": "c", "lora_path": adapters.path("c")}
    )
    assert refused.status_code == 400
    assert "max_loras_per_batch is 2, and so many adapters are loaded" in refused.text
    assert texts(engine, "a") == own
    assert unloading.is_alive()
    assert len(next(stream)["output_ids"]) > len(first["output_ids"])
    stream.close()
    unloading.join(timeout=60)
    paths = {"a": adapters.path("a")}
    assert answers[0].json() == {
        "success": True,
        "error_message": None,
        "loaded_adapters": paths,
    }
    loaded = ask(
        app, "POST", "/load_lora_adapter", json={"lora_name": "b", "lora_path": adapters.path("b")}
    )
    assert loaded.json()["loaded_adapters"] == {**paths, "b": adapters.path("b")}
    assert texts(engine, "a") == own
    wait_idle(engine)
    assert (engine.get_server_info()["num_programs"], _with_slot._cache_size()) == programs


def test_metrics_count_sequences_by_adapter(
    lora_engine: Engine, adapters: Adapters, app: Starlette
) -> None:
    """Gateways route by vLLM's labels."""
    info = 'vllm:lora_requests_info{max_lora="2",model_name="tiny",'

    def metrics() -> str:
        return ask(app, "GET", "/metrics").text

    assert info + 'running_lora_adapters="",waiting_lora_adapters=""' in metrics()
    body = {"text": [PROMPTS[0]] * 4, "lora_path": ["b", None, "a", "b"], "sampling_params": LONG}
    asking = threading.Thread(target=ask, args=(app, "POST", "/generate"), kwargs={"json": body})
    asking.start()
    wait_taken(lora_engine, 4)
    wait_running(lora_engine, 2)
    text = metrics()
    ask(app, "POST", "/abort_request", json={"abort_all": True})
    asking.join(timeout=60)
    assert info + 'running_lora_adapters="b",waiting_lora_adapters="a,b"' in text
    for name, queued, used in (("a", 1, 0), ("b", 1, 1)):
        labels = f'{{lora_name="{name}",model_name="tiny"}}'
        assert f"jspec:lora_num_queue_reqs{labels} {queued}.0" in text
        assert f"jspec:lora_num_running_reqs{labels} {used}.0" in text
    for name, value in (("slots_total", 2.0), ("slots_used", 1.0), ("utilization", 0.5)):
        assert f'sglang:lora_pool_{name}{{model_name="tiny"}} {value}' in text
    wait_idle(lora_engine)
    assert adapters.path("a") not in text


def test_routes_name_adapters_like_models(lora_engine: Engine, app: Starlette) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0, "return_meta_info": True}
    native = {"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}

    def text(path: str, **more: Any) -> Any:
        answer = ask(app, "POST", path, json={**(native if "gen" in path else body), **more})
        assert answer.status_code == 200, answer.text
        return answer.json()["text"] if "gen" in path else answer.json()["choices"][0]["text"]

    wanted = {
        name: lora_engine.generate(PROMPTS[0], native["sampling_params"], lora_path=name)["text"]
        for name in (None, "a", "b")
    }
    assert len(set(wanted.values())) == 3
    assert text("/generate", lora_path="a") == text("/generate", lora_name="a") == wanted["a"]
    assert text("/generate", model="tiny:b") == text("/v1/completions", model="b") == wanted["b"]
    assert text("/v1/completions", model="tiny:a") == wanted["a"]
    assert text("/v1/completions", model="tiny") == wanted[None]
    assert text("/v1/completions", lora_path="b") == wanted["b"]
    both = {**native, "text": [PROMPTS[0]] * 2, "lora_path": ["b", None]}
    answers = ask(app, "POST", "/generate", json=both).json()
    assert [answer["text"] for answer in answers] == [wanted["b"], wanted[None]]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    chats = [
        ask(app, "POST", "/v1/chat/completions", json={**chat, **more}).json()["choices"]
        for more in ({"model": "tiny:a"}, {"lora_path": "a"}, {})
    ]
    assert chats[0][0]["message"] == chats[1][0]["message"] != chats[2][0]["message"]
    cards = ask(app, "GET", "/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None),
        ("a", "tiny"),
        ("b", "tiny"),
    ]
    assert ask(app, "GET", "/v1/models/tiny:b").json() == cards[2]


@pytest.mark.parametrize(
    ("path", "more", "status", "said"),
    [
        ("/generate", {"lora_path": "z"}, 400, "lora_path is 'z'; expected a loaded adapter: 'a'"),
        ("/generate", {"model": "tiny:z"}, 400, "lora_path is 'z'; expected a loaded adapter"),
        ("/generate", {"model": "z"}, 404, "model is 'z'; expected 'tiny', 'a', 'b' or 'default'"),
        ("/generate", {"lora_path": ["a", "b"]}, 400, "lora_path has 2 names; expected one for"),
        ("/generate", {"lora_path": 3}, 400, "lora_path has 3; expected names of adapters"),
        ("/generate", {"lora_path": "a", "lora_name": "b"}, 400, "lora_path and lora_name differ"),
        ("/generate", {"lora_path": "a", "model": "b"}, 400, "lora_path is 'a', and model 'b'"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "x"}, 400, "'a', which is loaded"),
        ("/load_lora_adapter", {"lora_name": "", "lora_path": "x"}, 400, "lora_name is ''; expec"),
        ("/load_lora_adapter", {"lora_name": "d"}, 400, "lora_path is null; expected text"),
        ("/unload_lora_adapter", {"lora_name": "z"}, 400, "'z'; expected a loaded adapter: 'a'"),
    ],
)
def test_what_names_no_adapter_is_refused(
    app: Starlette, adapters: Adapters, path: str, more: dict[str, Any], status: int, said: str
) -> None:
    body = {"text": "x"} if path == "/generate" else {}
    answer = ask(app, "POST", path, json={**body, **more})
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert str(adapters.folder) not in answer.text


def test_an_engine_without_adapters_says_so(engine: Engine, adapters: Adapters) -> None:
    with pytest.raises(RequestError, match="expected none: the engine runs without enable_lora"):
        engine.generate("x", lora_path="a")
    with pytest.raises(RequestError, match="expected none: the engine runs without enable_lora"):
        engine.load_lora_adapter("a", adapters.path("a"))
    assert engine.lora_adapters == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_paths": (), "enable_lora": True}, "lora_paths; expected max_lora_rank too"),
        ({"lora_paths": ["x=/no"]}, "'/no'; expected a directory with a LoRA adapter in peft's"),
        ({"max_lora_rank": 2}, "has rank 4; expected at most max_lora_rank 2"),
        ({"lora_target_modules": ["gate"]}, "lora_target_modules has gate; expected some of down"),
        ({"lora_target_modules": ["q_proj"]}, "adapts down_proj; expected modules in lora_target"),
    ],
)
def test_a_start_that_cannot_serve_its_adapters_is_refused(
    arguments: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=said):
        Engine(**{**arguments, **given})


def test_grammars_choices_and_numbers_follow_the_adapter(
    arguments: dict[str, Any], adapters: Adapters
) -> None:
    with Engine(**{**arguments, "disable_logprobs": False}) as engine:
        check_kinds(engine, adapters)


def check_kinds(engine: Engine, adapters: Adapters) -> None:
    grammar = {"regex": "[a-z ]{12,20}", "max_new_tokens": 20, "temperature": 0}
    choices = {"n": 2, "max_new_tokens": 12, "sampling_seed": 5}
    numbers = {"max_new_tokens": 8, "temperature": 0}
    logprob = {"return_logprob": True, "logprob_start_len": 0}

    def found(lora: str | None) -> list[Any]:
        run = engine.generate
        several = run(PROMPTS[0], choices, lora_path=lora)
        told = run(PROMPTS[0], numbers, lora_path=lora, **logprob)["meta_info"]
        rows = [*told["input_token_logprobs"][1:], *told["output_token_logprobs"]]
        return [
            run(PROMPTS[0], grammar, lora_path=lora)["text"],
            [each["output_ids"] for each in several],
            np.array([row[0] for row in rows]),
        ]

    for name in ("a", "b"):
        got = found(name)
        engine.update_weights_from_tensor(adapters.merged[name], selector="target")
        wanted = found(None)
        back = {each: adapters.base[each] for each in adapters.merged[name]}
        engine.update_weights_from_tensor(back, selector="target")
        assert got[:2] == wanted[:2]
        np.testing.assert_allclose(got[2], wanted[2], atol=1e-3)


def test_adapters_come_back_with_a_restarted_process(
    arguments: dict[str, Any], lora_engine: Engine, adapters: Adapters
) -> None:
    wanted = texts(lora_engine, "a"), texts(lora_engine, "b")
    with Engine(**arguments, engine_process=True) as apart:
        apart.unload_lora_adapter("b")
        apart.load_lora_adapter("again", adapters.path("b"))
        stream = apart.generate(PROMPTS[0], LONG, stream=True)
        next(stream)
        wait_running(apart, 1)
        assert apart.process_id is not None
        os.kill(apart.process_id, signal.SIGKILL)
        assert (texts(apart, "a"), texts(apart, "again")) == wanted
        stream.close()

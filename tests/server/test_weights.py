"""Weights that change while an engine serves: later and running requests, and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.monitoring
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from jspec.messages.plan import StepKind, StepPlan
from jspec.models.files.convert import Format, convert
from jspec.serving.engine import Engine
from tests.support.tiny_models import TinyPair

from .helpers import wait_idle, wait_running

GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
SEEDED = {"max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 7, "ignore_eos": True}
PROMPT = list(range(40, 80))
Q, K = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")


@pytest.fixture(scope="module")
def fresh(engine_arguments: dict[str, Any], other_pair: TinyPair) -> Iterator[Engine]:
    """Return an engine started with the other weights, which an updated one must equal."""
    paths = {
        "model_path": str(other_pair.target_path),
        "speculative_draft_model_path": str(other_pair.draft_path),
    }
    with Engine(**{**engine_arguments, **paths}) as fresh:
        yield fresh


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Count compilations by any thread of this process."""
    heard: list[str] = []

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            heard.append(f"{event} {duration_secs}")

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def test_compilations_are_heard() -> None:
    with compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.ones(7))
    assert compiled


def ids_of(engine: Engine, prompt: list[int], params: dict[str, Any]) -> list[int]:
    found: list[int] = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
    return found


def both(pair: TinyPair) -> dict[str, str]:
    return {
        "model_path": str(pair.target_path),
        "speculative_draft_model_path": str(pair.draft_path),
    }


def test_text_after_an_update_is_a_fresh_engines(
    served: Engine, fresh: Engine, other_pair: TinyPair
) -> None:
    num_programs = served.get_server_info()["num_programs"]
    before = [ids_of(served, PROMPT, params) for params in (GREEDY, SEEDED)]
    expected = [fresh.generate(input_ids=PROMPT, sampling_params=p) for p in (GREEDY, SEEDED)]
    with compilations() as compiled:
        answer = served.update_weights_from_disk(**both(other_pair), weight_version="2")
        results = [served.generate(input_ids=PROMPT, sampling_params=p) for p in (GREEDY, SEEDED)]
    assert compiled == []
    assert answer == {
        "success": True,
        "message": "Succeeded to update model weights.",
        "num_paused_requests": 0,
    }
    for result, wanted, old in zip(results, expected, before, strict=True):
        assert result["output_ids"] == wanted["output_ids"] != old
        # The draft is the other one too: it is accepted as often.
        assert result["meta_info"]["spec_verify_ct"] == wanted["meta_info"]["spec_verify_ct"]
    assert results[0]["meta_info"]["cached_tokens"] == 0  # the pages are another model's
    assert results[0]["meta_info"]["weight_version"] == "2"
    assert served.get_server_info()["weight_version"] == "2"
    assert served.get_server_info()["num_programs"] == num_programs


def test_a_target_alone_leaves_the_draft(
    served: Engine, fresh: Engine, other_pair: TinyPair, tiny_pair: TinyPair
) -> None:
    served.update_weights_from_disk(str(other_pair.target_path))
    assert ids_of(served, PROMPT, GREEDY) == ids_of(fresh, PROMPT, GREEDY)
    name = "midlayer.self_attn.k_proj.weight"
    stored = load_file(tiny_pair.draft_path / "model.safetensors")[name]
    np.testing.assert_array_equal(read(served, name), stored)
    served.update_weights_from_disk(str(other_pair.draft_path), selector="draft")
    stored = load_file(other_pair.draft_path / "model.safetensors")[name]
    np.testing.assert_array_equal(read(served, name), stored)


def read(engine: Engine, name: str, **options: Any) -> Any:
    return np.asarray(engine.get_weights_by_name(name, 10**6, **options), np.float32)


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_what_runs_goes_on_with_the_new_weights(
    served: Engine, fresh: Engine, other_pair: TinyPair, params: dict[str, Any]
) -> None:
    """It continues like a fresh engine with the prompt and all committed tokens."""
    length = {**params, "max_new_tokens": 100}
    before = ids_of(served, PROMPT, length)
    stream = served.generate(input_ids=PROMPT, sampling_params=length, stream=True)
    next(stream)
    answer = served.update_weights_from_disk(**both(other_pair), weight_version="2")
    assert answer["num_paused_requests"] == 1
    result = list(stream)[-1]
    ids = result["output_ids"]
    same = next(i for i, pair in enumerate(zip(ids, before, strict=True)) if pair[0] != pair[1])
    assert 0 < same < 100
    rest = {**params, "max_new_tokens": 100 - same}
    assert ids[same:] == ids_of(fresh, PROMPT + ids[:same], rest)
    assert result["meta_info"]["num_retractions"] == 1
    assert result["meta_info"]["weight_version"] == "2"


def test_requests_that_are_there_can_end_first_or_at_once(
    served: Engine, fresh: Engine, tiny_pair: TinyPair, other_pair: TinyPair
) -> None:
    length = {**GREEDY, "max_new_tokens": 80}
    before, after = ids_of(served, PROMPT, length), ids_of(fresh, PROMPT, length)
    stream = served.generate(input_ids=PROMPT, sampling_params=length, stream=True)
    next(stream)
    updating = threading.Thread(
        target=served.update_weights_from_disk,
        kwargs={**both(other_pair), "wait_for_requests": True},
    )
    updating.start()
    assert list(stream)[-1]["output_ids"] == before
    updating.join(timeout=60)
    stream = served.generate(input_ids=PROMPT, sampling_params=length, stream=True)
    next(stream)
    answer = served.update_weights_from_disk(**both(tiny_pair), abort_all_requests=True)
    assert answer["num_paused_requests"] == 0
    result = list(stream)[-1]
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert result["output_ids"] == after[: len(result["output_ids"])]
    assert ids_of(served, PROMPT, length) == before


def pause_at_prefill(engine: Engine, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine plan no step after `count` prefills."""
    plain, left = engine._runner.dispatch, iter(range(count - 1, -1, -1))

    def dispatch(plan: StepPlan) -> Any:
        handle = plain(plan)
        if plan.kind is StepKind.PREFILL and next(left, None) == 0:
            engine._loop.pause()
        return handle

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)


def test_a_prompt_that_is_half_filled_has_all_its_numbers_of_the_new_weights(
    served: Engine, fresh: Engine, other_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two choices of eight chunks: one is half filled, the other waits for its pages."""
    asked = {**SEEDED, "max_new_tokens": 6, "n": 2}
    options: dict[str, Any] = {
        "input_ids": [1 + 7 * i % 90 for i in range(256)],
        "sampling_params": asked,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    wanted = fresh.generate(**options)
    other = served.generate(**options)
    served.flush_cache()
    found: list[Any] = []
    with monkeypatch.context() as patched:
        pause_at_prefill(served, 4, patched)
        asking = threading.Thread(target=lambda: found.extend(served.generate(**options)))
        asking.start()
        while not served.is_paused:
            time.sleep(0.005)
        assert served.stats.num_running > 0
        served.update_weights_from_disk(**both(other_pair), weight_version="2")
        asyncio.run(served.continue_generation())
        asking.join(timeout=60)
    for result, new, old in zip(found, wanted, other, strict=True):
        meta = result["meta_info"]
        assert result["output_ids"] == new["output_ids"]
        assert meta["weight_version"] == "2"
        for name in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"):
            assert values_of(meta[name]) == pytest.approx(values_of(new["meta_info"][name]))
            assert values_of(meta[name]) != pytest.approx(values_of(old["meta_info"][name]))
    assert max(result["meta_info"]["num_retractions"] for result in found) == 1


def values_of(value: Any) -> list[float]:
    """Return all numbers of nested lists, in order."""
    if isinstance(value, list | tuple):
        return [number for each in value for number in values_of(each)]
    return [] if value is None else [value]


def test_requests_that_come_meanwhile_find_whole_weights(
    served: Engine, fresh: Engine, other_pair: TinyPair
) -> None:
    """Each text is that of the old weights, of the new, or changes once from the one to the
    other."""
    wanted = [ids_of(served, PROMPT, GREEDY), ids_of(fresh, PROMPT, GREEDY)]
    found: list[list[int]] = []
    is_done = threading.Event()

    def ask() -> None:
        while not is_done.is_set():
            found.append(ids_of(served, PROMPT, GREEDY))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    wait_running(served, 2)
    served.update_weights_from_disk(**both(other_pair))
    at_end = len(found)
    while len(found) < at_end + 6:
        is_done.wait(0.01)
    is_done.set()
    for thread in asking:
        thread.join(timeout=60)
    assert found[-1] == wanted[1]
    for ids in found:
        if ids not in wanted:
            same = next(i for i in range(24) if ids[i] != wanted[0][i])
            rest = {**GREEDY, "max_new_tokens": 24 - same}
            assert ids[same:] == ids_of(fresh, PROMPT + ids[:same], rest)
    wait_idle(served)


def test_some_tensors_change_the_weights_that_they_are_part_of(
    served: Engine, fresh: Engine, other_pair: TinyPair
) -> None:
    theirs = load_file(other_pair.target_path / "model.safetensors")
    ours = read(served, K)
    served.update_weights_from_tensor([(Q, theirs[Q])], weight_version="q")
    np.testing.assert_array_equal(read(served, Q), theirs[Q])
    np.testing.assert_array_equal(read(served, K), ours)
    served.update_weights_from_tensor(theirs)
    draft = load_file(other_pair.draft_path / "model.safetensors")
    draft = {name: value for name, value in draft.items() if name not in ("d2t", "t2d")}
    served.update_weights_from_tensor(draft, selector="draft")
    wanted = fresh.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert ids_of(served, PROMPT, GREEDY) == wanted["output_ids"]
    assert served.weight_version == "q"
    for name in ("embed_tokens.weight", "lm_head.weight", "fc.weight"):
        np.testing.assert_array_equal(read(served, name, selector="draft"), draft[name])


def in_orbax(pair: TinyPair, path: Path) -> dict[str, str]:
    convert(pair.target_path, path / "target", Format.ORBAX)
    convert(pair.draft_path, path / "draft", Format.ORBAX)
    return {
        "model_path": str(path / "target"),
        "speculative_draft_model_path": str(path / "draft"),
    }


def test_orbax_updates_as_safetensors_do(
    served: Engine, fresh: Engine, other_pair: TinyPair, tmp_path: Path
) -> None:
    served.update_weights_from_disk(**in_orbax(other_pair, tmp_path))
    for params in (GREEDY, SEEDED):
        assert ids_of(served, PROMPT, params) == ids_of(fresh, PROMPT, params)


# Over HTTP.


def test_the_routes_answer_as_sglangs(
    served: Engine, fresh: Engine, client: httpx.Client, other_pair: TinyPair
) -> None:
    assert served.weight_version == "default"
    body = {
        "model_path": str(other_pair.target_path),
        "load_format": None,
        "abort_all_requests": False,
        "is_async": False,
        "torch_empty_cache": False,
        "keep_pause": True,
        "recapture_cuda_graph": False,
        "token_step": 0,
        "flush_cache": True,
        "weight_version": "http",
    }
    answer = client.post("/update_weights_from_disk", json=body)
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        },
    )
    assert client.get("/ready").status_code == 503
    client.post("/continue_generation")
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_weight_version"):
        assert client.get(path).json()["weight_version"] == "http"
    assert client.get("/model_info").json()["model_path"] == body["model_path"]
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY}
    result = client.post("/generate", json=asked).json()
    assert result["output_ids"] == ids_of(fresh, PROMPT, GREEDY)
    assert result["meta_info"]["weight_version"] == "http"
    answer = client.post("/update_weight_version", json={"new_version": "h2"}).json()
    assert answer == {
        "success": True,
        "message": "Weight version updated to h2",
        "new_version": "h2",
    }
    result = client.post("/generate", json=asked).json()["meta_info"]
    assert (result["weight_version"], result["cached_tokens"] > 0) == ("h2", True)
    theirs = load_file(other_pair.target_path / "model.safetensors")
    rows = client.post("/get_weights_by_name", json={"name": Q, "truncate_size": 2}).json()
    np.testing.assert_array_equal(np.asarray(rows, np.float32), theirs[Q][:2])
    assert client.get("/get_weights_by_name", params={"name": K, "truncate_size": "1"}).json() == (
        theirs[K][:1].tolist()
    )
    refused = client.post("/get_weights_by_name", json={"name": "nothing"})
    assert refused.status_code == 400
    assert "name is 'nothing'; expected a tensor of target or draft" in refused.json()["message"]


def test_a_body_of_tensors_is_a_safetensors_file(served: Engine, client: httpx.Client) -> None:
    value = np.full((16, 32), 0.5, ml_dtypes.bfloat16)
    sent: dict[str, Any] = {"headers": {"Content-Type": "application/octet-stream"}}
    path = "/update_weights_from_tensor"
    answer = client.post(
        path,
        content=save({K: value}),
        params={"weight_version": "t", "flush_cache": "true"},
        **sent,
    )
    assert answer.json()["success"] is True
    assert (read(served, K) == 0.5).all()
    assert served.weight_version == "t"
    answer = client.post(path, content=save({K: value[:3], "x": value}), **sent)
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert answer.json()["num_paused_requests"] == 0
    for part in (f"{K} has shape (3, 32); expected (16, 32)", "unknown tensor x of shape (16, 32)"):
        assert part in answer.json()["message"]
    for options, message in (
        ({"json": {"serialized_named_tensors": ["gASV"]}}, "are pickles, which run what"),
        ({"content": b"nothing", **sent}, "is no safetensors file"),
        ({"content": save({K: value}), "params": {"flush_cache": "2"}, **sent}, "flush_cache is"),
        ({"content": save({K: value}), "params": {"selector": "x"}, **sent}, "selector is 'x'"),
    ):
        refused = client.post(path, **options)
        assert refused.status_code == 400
        assert message in refused.json()["message"]
    assert (read(served, K) == 0.5).all()

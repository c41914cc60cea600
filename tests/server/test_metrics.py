"""The table of metrics: the scrape, the docs, and the dashboard's queries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jspec.server.control.metric_row import MetricKind
from jspec.server.control.metric_table import METRICS, accepted_by_position, metrics_table
from jspec.serving.engine import Engine

from .helpers import wait_idle

ROOT = Path(__file__).resolve().parents[2]
# What dashboards of SGLang 0.5.23 and vLLM 0.25 ask for first.
LOOKED_FOR = {
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    *("sglang:gen_throughput", "sglang:cache_hit_rate", "sglang:spec_accept_length"),
    *("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    *("sglang:time_to_first_token_seconds", "sglang:e2e_request_latency_seconds"),
    *("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"),
    *("vllm:spec_decode_num_accepted_tokens_total", "vllm:num_preemptions_total"),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    *("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"),
    *("vllm:inter_token_latency_seconds", "vllm:request_prompt_tokens"),
    *("vllm:request_generation_tokens", "vllm:request_decode_time_seconds"),
}


def exposed() -> list[str]:
    return [name for row in METRICS for name in row.exposed]


def sample_names() -> set[str]:
    """Return the names that a query may use, without those of LoRA adapters and experts."""
    ends = ("_bucket", "_sum", "_count")
    return {
        name + end
        for row in METRICS
        if not {"lora_name", "max_lora", "layer"} & {*row.labels}
        for name in row.exposed
        for end in (ends if row.kind is MetricKind.HISTOGRAM else ("",))
    }


def samples(client: httpx.Client) -> dict[str, float]:
    """Return values by name and by labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels["model_name"] == "target"
            found[sample.name + "".join(f" {v}" for v in labels.values())] = sample.value
    return found


def test_dashboards_find_their_names_and_none_is_there_twice() -> None:
    assert set(exposed()) >= LOOKED_FOR
    assert len(set(exposed())) == len(exposed())


def test_a_scrape_has_the_table_and_nothing_else(client: httpx.Client) -> None:
    client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 4}})
    assert {name.split(" ")[0] for name in samples(client)} == sample_names()


def test_the_docs_have_the_table() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert text.endswith(metrics_table().rstrip() + "\n")


def test_every_query_of_the_dashboard_names_what_there_is() -> None:
    dashboard = json.loads((ROOT / "configs/grafana.json").read_text(encoding="utf-8"))
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    queries += [
        v["query"]["query"] for v in dashboard["templating"]["list"] if v["name"] == "model"
    ]
    assert len(queries) > 15
    for query in queries:
        named = set(re.findall(r"\b[a-z]+:\w+", query))
        assert named, query
        assert named <= sample_names(), query
        assert query.count("(") == query.count(")"), query


def test_accepted_by_position() -> None:
    assert accepted_by_position([2, 1, 4]) == {("0",): 5.0, ("1",): 4.0}
    assert accepted_by_position([]) == {}


def test_one_request_moves_both_families_alike(client: httpx.Client, engine: Engine) -> None:
    wait_idle(engine)
    before = samples(client)
    body = {
        "text": "def fib(",
        "sampling_params": {"max_new_tokens": 100, "sampling_seed": 1, "ignore_eos": True},
    }
    meta = client.post("/generate", json=body).raise_for_status().json()["meta_info"]
    after = samples(client)
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["vllm:spec_decode_num_drafts_total"] == meta["spec_verify_ct"]
    assert gained["vllm:spec_decode_num_draft_tokens_total"] == meta["spec_num_proposed_drafts"]
    by_depth = [gained[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in range(3)]
    assert sum(by_depth) == meta["spec_num_correct_drafts"] > 0
    assert by_depth == sorted(by_depth, reverse=True)
    assert gained["vllm:request_success_total length"] == 1
    assert gained["vllm:request_success_total stop"] == 0
    assert gained["vllm:request_prompt_tokens_sum"] == 8
    assert gained["vllm:request_generation_tokens_sum"] == 100
    assert gained["vllm:request_generation_tokens_bucket 50.0"] == 0
    assert gained["vllm:request_generation_tokens_bucket 100.0"] == 1
    decode = gained["vllm:request_decode_time_seconds_sum"]
    assert 0 < decode < gained["vllm:e2e_request_latency_seconds_sum"]
    per_token = gained["vllm:request_time_per_output_token_seconds_sum"]
    assert abs(per_token - decode / 99) < 1e-9
    for name in exposed():  # one value under both families' names
        other = name.replace("sglang:", "vllm:")
        if name.startswith("sglang:") and f"{other}_count" in gained:
            assert gained[f"{name}_count"] == gained[f"{other}_count"]

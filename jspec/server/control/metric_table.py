"""The metrics of /metrics, a row each, under SGLang's and vLLM's names, so that dashboards for
either work; other names start with jspec. `metrics_table` makes the table of docs/metrics.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from jspec.server.control.metric_row import (
    Histogram,
    MetricKind,
    MetricRow,
    Observed,
    Snapshot,
    Value,
)

WINDOW_SECONDS = 10.0


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def accepted_by_position(histogram: Sequence[int]) -> dict[tuple[str, ...], float]:
    """Return how often the draft at each depth was accepted, counted from 0 like vLLM.

    histogram[i]: verifications that accepted i drafts. In: [2, 1, 4]   Out: {("0",): 5, ("1",): 4}
    """
    return {
        (str(depth),): float(sum(histogram[depth + 1 :])) for depth in range(len(histogram) - 1)
    }


def _used_tokens(now: Snapshot) -> int:
    """Return at most max_total_tokens, without the pool's additional pages for drafts."""
    return min(now.stats.num_used_pages * now.limits.pool.page_size, _all_tokens(now))


def _all_tokens(now: Snapshot) -> int:
    return now.limits.pool.num_ranks * now.limits.max_total_tokens


def _lora_requests(now: Snapshot) -> dict[tuple[str, ...], float]:
    """Return the time by vLLM's labels, adapter names in one text, which gateways read."""
    running, waiting = (
        ",".join(sorted(counts))
        for counts in (now.stats.running_by_lora, now.stats.waiting_by_lora)
    )
    return {(str(now.max_loras), running, waiting): time.time()} if now.max_loras else {}


def _of_each_lora(now: Snapshot, counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Return each adapter's count, including unloaded adapters that requests still use."""
    return {(name,): counts.get(name, 0) for name in dict.fromkeys((*now.loras, *counts))}


def _gauge(
    *names: str, text: str, read: Callable[[Snapshot], Value], labels: tuple[str, ...] = ()
) -> MetricRow:
    return MetricRow(names=names, kind=MetricKind.GAUGE, text=text, read=read, labels=labels)


def _counter(
    *names: str, text: str, read: Callable[[Snapshot], Value], labels: tuple[str, ...] = ()
) -> MetricRow:
    return MetricRow(names=names, kind=MetricKind.COUNTER, text=text, read=read, labels=labels)


def _histogram(*names: str, text: str, read: Callable[[Observed], Histogram]) -> MetricRow:
    return MetricRow(
        names=names, kind=MetricKind.HISTOGRAM, text=text, read=lambda s: read(s.observed)
    )


GAUGES = (
    _gauge(
        *("sglang:num_running_reqs", "vllm:num_requests_running"),
        text="Running sequences",
        read=lambda s: s.stats.num_running,
    ),
    _gauge(
        *("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
        text="Waiting sequences",
        read=lambda s: s.stats.num_queued,
    ),
    _gauge(
        *("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        text="Share of the KV pool used by running sequences, from 0 to 1",
        read=lambda s: s.stats.token_usage,
    ),
    _gauge(
        "sglang:num_used_tokens",
        text="Capacity in tokens of the running sequences' pages",
        read=_used_tokens,
    ),
    _gauge(
        "sglang:kv_available_tokens",
        text="Capacity in tokens of the other pages, free or cached",
        read=lambda s: _all_tokens(s) - _used_tokens(s),
    ),
    _gauge(
        "sglang:max_total_num_tokens",
        text="Capacity of the KV pool in tokens",
        read=_all_tokens,
    ),
    _gauge(
        "sglang:cache_hit_rate",
        text="Share of prompt tokens found in the prefix cache since the start",
        read=lambda s: s.stats.cache_hit_rate,
    ),
    _gauge(
        "sglang:gen_throughput",
        text=f"Output tokens per second, over the last {WINDOW_SECONDS:g} s in which steps ran",
        read=lambda s: s.gen_throughput,
    ),
    _gauge(
        "sglang:spec_accept_length",
        text="Mean tokens emitted per verification since the start, bonus included",
        read=lambda s: s.stats.counters.acceptance_length,
    ),
    _gauge(
        "sglang:spec_accept_rate",
        text="Share of draft tokens accepted since the start",
        read=lambda s: ratio(s.stats.counters.num_accepted, s.stats.counters.num_proposed),
    ),
    _gauge(
        "sglang:spec_num_steps",
        text="S, draft levels; with --speculative-adaptive the last choice",
        read=lambda s: s.stats.shapes.steps_now(s.limits.draft_shape),
    ),
    _gauge(
        "sglang:spec_num_draft_tokens",
        text="N, tree nodes including the root",
        read=lambda s: s.limits.draft_shape.num_draft_tokens,
    ),
    _gauge(
        "jspec:rank_num_running_reqs",
        text="Running sequences of a data rank",
        read=lambda s: {(str(i),): own.num_running for i, own in enumerate(s.stats.by_rank)},
        labels=("dp_rank",),
    ),
    _gauge(
        "jspec:rank_num_used_pages",
        text="Pages that running sequences of a data rank use",
        read=lambda s: {(str(i),): own.num_used_pages for i, own in enumerate(s.stats.by_rank)},
        labels=("dp_rank",),
    ),
    _gauge(
        "jspec:num_callers_waiting",
        text="Callers with waiting sequences",
        read=lambda s: s.stats.num_callers_waiting,
    ),
    _gauge(
        "jspec:largest_caller_share",
        text="Largest share of the running sequences that one caller has, from 0 to 1",
        read=lambda s: ratio(s.stats.most_rows_of_a_caller, s.stats.num_running),
    ),
    _gauge(
        "sglang:lora_pool_slots_total",
        text="LoRA adapters that fit on the devices; 0 without --enable-lora",
        read=lambda s: s.max_loras,
    ),
    _gauge(
        "sglang:lora_pool_slots_used",
        text="LoRA adapters of running sequences",
        read=lambda s: len(s.stats.running_by_lora),
    ),
    _gauge(
        "sglang:lora_pool_utilization",
        text="Their quotient, from 0 to 1",
        read=lambda s: ratio(len(s.stats.running_by_lora), s.max_loras),
    ),
    _gauge(
        "vllm:lora_requests_info",
        text="Unix time, labelled with the names of adapters that sequences have",
        read=_lora_requests,
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    _gauge(
        "jspec:lora_num_running_reqs",
        text="Running sequences of each loaded LoRA adapter",
        read=lambda s: _of_each_lora(s, s.stats.running_by_lora),
        labels=("lora_name",),
    ),
    _gauge(
        "jspec:lora_num_queue_reqs",
        text="Waiting sequences of each loaded LoRA adapter",
        read=lambda s: _of_each_lora(s, s.stats.waiting_by_lora),
        labels=("lora_name",),
    ),
    _gauge(
        "jspec:expert_balancedness",
        text="Mean load of a layer's experts over the devices, divided by the largest device's",
        read=lambda s: {(str(layer),): value for layer, value in s.balancedness.items()},
        labels=("layer",),
    ),
    _gauge(
        "jspec:num_leaked_pages",
        text="Leaked pages, neither free nor in use; nonzero is a bug",
        read=lambda s: s.stats.num_leaked_pages,
    ),
)


def _of_shapes(name: str) -> Callable[[Snapshot], Value]:
    return lambda snapshot: float(getattr(snapshot.stats.shapes, name))


SHAPES = (
    ("expected_tokens", "Expected tokens of decodes with an adaptively chosen shape"),
    ("emitted_tokens", "Emitted tokens of decodes with an adaptively chosen shape"),
    ("expected_seconds", "Expected seconds of such decodes, if the shape's cost is known"),
    ("measured_seconds", "Measured seconds of such decodes, if the shape's cost is known"),
    ("num_changes", "Changes of the best shape (--speculative-adaptive)"),
    ("num_probes", "Decodes of another shape, to measure its cost or acceptance"),
)
COUNTERS = (
    *(_counter(f"jspec:shape_{name}", text=text, read=_of_shapes(name)) for name, text in SHAPES),
    _counter(
        *("sglang:prompt_tokens", "vllm:prompt_tokens", "vllm:prefix_cache_queries"),
        text="Prompt tokens, including cached ones",
        read=lambda s: s.stats.num_prompt_tokens,
    ),
    _counter(
        *("sglang:cached_tokens", "vllm:prefix_cache_hits"),
        text="Prompt tokens found in the prefix cache",
        read=lambda s: s.stats.num_cached_tokens,
    ),
    _counter(
        "jspec:shared_prefix_tokens",
        text="Keys that decode rows skip because a row with the same prefix reads them",
        read=lambda s: s.stats.num_shared_keys,
    ),
    _counter(
        *("sglang:generation_tokens", "vllm:generation_tokens"),
        text="Output tokens",
        read=lambda s: s.stats.num_emitted,
    ),
    _counter("sglang:num_requests", text="Sequences taken in", read=lambda s: s.stats.num_requests),
    _counter(
        "vllm:request_success",
        text="Sequences finished over HTTP, by reason",
        read=lambda s: {(kind.value,): float(n) for kind, n in s.observed.num_finished.items()},
        labels=("finished_reason",),
    ),
    _counter(
        "sglang:num_aborted_requests",
        text="Sequences aborted",
        read=lambda s: s.stats.num_aborted,
    ),
    _counter(
        "jspec:num_slow_readers",
        text="Sequences aborted because their client did not read the output",
        read=lambda s: s.stats.num_slow_readers,
    ),
    _counter(
        "jspec:num_engine_restarts",
        text="Engine failures followed by a restart; requests continue",
        read=lambda s: s.stats.num_restarts,
    ),
    _counter(
        "jspec:num_scheduler_faults",
        text="Times that an invariant of the scheduler did not hold: a bug; see the log",
        read=lambda s: s.stats.num_faults,
    ),
    _counter(
        *("sglang:num_retracted_requests", "vllm:num_preemptions"),
        text="Retractions: a sequence frees its pages and resumes later",
        read=lambda s: s.stats.num_retractions,
    ),
    _counter(
        *("sglang:spec_verify_calls", "vllm:spec_decode_num_drafts"),
        text="Verifications, one per row and round",
        read=lambda s: s.stats.counters.verify_ct,
    ),
    _counter(
        *("vllm:spec_decode_num_draft_tokens", "jspec:spec_proposed_drafts"),
        text="Draft tokens verified",
        read=lambda s: s.stats.counters.num_proposed,
    ),
    _counter(
        *("vllm:spec_decode_num_accepted_tokens", "jspec:spec_accepted_drafts"),
        text="Draft tokens accepted",
        read=lambda s: s.stats.counters.num_accepted,
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        text="Draft tokens accepted, by depth - 1",
        read=lambda s: accepted_by_position(s.stats.counters.accept_histogram),
        labels=("position",),
    ),
)
HISTOGRAMS = (
    _histogram(
        *("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        text="Time from the request to its first token",
        read=lambda o: o.ttft,
    ),
    _histogram(
        *("sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
        *("sglang:time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
        text="Time between tokens: a step's time divided by its tokens, counted per token",
        read=lambda o: o.itl,
    ),
    _histogram(
        *("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
        text="Time from the request to its last token",
        read=lambda o: o.e2e,
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        text="Time from a sequence's first token to its last",
        read=lambda o: o.decode,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        text="Mean time per token of a sequence after its first token",
        read=lambda o: o.tpot,
    ),
    _histogram(
        *("sglang:prompt_tokens_histogram", "vllm:request_prompt_tokens"),
        text="Prompt tokens per sequence",
        read=lambda o: o.prompt_tokens,
    ),
    _histogram(
        *("sglang:generation_tokens_histogram", "vllm:request_generation_tokens"),
        text="Output tokens per sequence",
        read=lambda o: o.output_tokens,
    ),
)
METRICS: tuple[MetricRow, ...] = (*GAUGES, *COUNTERS, *HISTOGRAMS)


def metrics_table() -> str:
    lines: list[str] = []
    for kind in MetricKind:
        lines += [f"### {kind.value.capitalize()}s", "", "| names | meaning |", "|---|---|"]
        for row in METRICS:
            if row.kind is kind:
                names = ", ".join(f"`{name}`" for name in row.exposed)
                by = f" (`{'`, `'.join(row.labels)}`)" if row.labels else ""
                lines.append(f"| {names} | {row.text}{by} |")
        lines.append("")
    return "\n".join(lines)

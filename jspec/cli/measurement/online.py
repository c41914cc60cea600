"""Measure a server under load, or two servers alternating. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jspec
from jspec.cli.measurement.environment import cpu_name
from jspec.cli.measurement.load import Job
from jspec.cli.measurement.report import chrome_trace
from jspec.cli.measurement.session import Plan, measure, result_of
from jspec.cli.measurement.settings import BenchSettings
from jspec.cli.measurement.targets import ServerTarget
from jspec.errors import ConfigError
from jspec.text.tokenizer.tokenizer import Tokenizer

BUNDLED_TOKENIZER = Path(jspec.__file__).parent / "bundled" / "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    base_url: str
    baseline_url: str | None
    api_key: str | None
    flush_cache: bool
    model: str | None  # name in the body; None: the first in /v1/models

    @property
    def urls(self) -> dict[str, str]:
        if self.baseline_url is None:
            return {"server": self.base_url}
        return {"baseline": self.baseline_url, "server": self.base_url}


async def run_online(
    servers: Servers, settings: BenchSettings, *, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result and its trace. Raises ConfigError and UnreachableError."""
    headers = {} if servers.api_key is None else {"Authorization": f"Bearer {servers.api_key}"}
    targets: list[ServerTarget] = []
    for name, url in servers.urls.items():
        try:
            target = ServerTarget(
                name, url, settings.protocol, headers=headers, flush=servers.flush_cache
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        targets.append(target)
    try:
        found = [await target.find() for target in targets]
        model = servers.model or next((name for name, _ in found if name), None)
        plan = _plan(settings, model)
        measured = await measure(targets, plan, say=say)
    finally:
        for target in targets:
            target.close()
    result = result_of(measured, tuple(servers.urls))
    result["chip"] = _chip(found[-1][1])
    result["servers"] = {
        name: _about(info) for name, (_, info) in zip(servers.urls, found, strict=True)
    }
    return result, chrome_trace(measured.seen, {})


def _plan(settings: BenchSettings, model: str | None) -> Plan:
    to_body: Callable[[Job], dict[str, Any]] = partial(_body, settings, model)
    tokenizer = Tokenizer.from_directory(BUNDLED_TOKENIZER)
    make = partial(settings.jobs, tokenizer, to_body=to_body, vocab_size=settings.vocab_size)
    jobs = [make(repeat=repeat) for repeat in range(settings.repeats)]
    # Other prompts than the measured ones, which must not be in a prefix cache.
    warm_up = settings.warm_up(make(repeat=settings.repeats), to_body)
    return Plan(point=settings.point, warm_up=warm_up, jobs=jobs, seed=settings.seed)


def _body(settings: BenchSettings, model: str | None, job: Job) -> dict[str, Any]:
    return settings.protocol.to_body(job, model)


def _chip(info: dict[str, Any]) -> str:
    device = str(info.get("device", "unknown"))
    return f"{cpu_name()} (if here)" if device == "cpu" else device


def _about(info: dict[str, Any]) -> dict[str, Any]:
    names = (
        *("version", "served_model_name", "device", "dtype", "speculative_algorithm"),
        *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        *("tp_size", "max_running_requests"),
    )
    return {name: info[name] for name in names if name in info}

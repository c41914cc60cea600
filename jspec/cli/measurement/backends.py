"""Request formats and stream readers of server APIs: SGLang's /generate, OpenAI's two routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jspec.cli.measurement.load import Job, native_body


class Reader(Protocol):
    """Accumulated state of one answer's events. num_tokens: output tokens so far."""

    num_tokens: int
    prompt_tokens: int
    histogram: tuple[int, ...]

    def add(self, event: Mapping[str, Any]) -> None:
        """Read one event. Raises RuntimeError for one that is not part of an answer."""
        ...


class NativeReader:
    def __init__(self) -> None:
        self.num_tokens = self.prompt_tokens = 0
        self.histogram: tuple[int, ...] = ()

    def add(self, event: Mapping[str, Any]) -> None:
        if "meta_info" not in event:
            raise RuntimeError(str(event)[:100])
        meta = event["meta_info"]
        self.num_tokens, self.prompt_tokens = meta["completion_tokens"], meta["prompt_tokens"]
        counts = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
        if counts:
            self.histogram = tuple(counts)


class OpenAIReader:
    """Reads OpenAI's events. Without usage in each event, one with text counts as a token."""

    def __init__(self) -> None:
        self.num_tokens = self.prompt_tokens = 0
        self.histogram: tuple[int, ...] = ()

    def add(self, event: Mapping[str, Any]) -> None:
        if "choices" not in event:
            raise RuntimeError(str(event)[:100])
        usage = event.get("usage")
        if usage:
            self.num_tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        elif any(_text(choice) for choice in event["choices"]):
            self.num_tokens += 1


def _text(choice: Mapping[str, Any]) -> str | None:
    return choice.get("text") or choice.get("delta", {}).get("content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    name: str
    path: str  # of the POST
    to_body: Callable[[Job, str | None], dict[str, Any]]
    make_reader: Callable[[], Reader]


def _completion_body(job: Job, model: str | None) -> dict[str, Any]:
    prompt = job.prompt if isinstance(job.prompt, str) else list(job.prompt)
    return {"prompt": prompt, "max_tokens": job.new_tokens, **_shared(job, model)}


def _chat_body(job: Job, model: str | None) -> dict[str, Any]:
    message = {"role": "user", "content": job.prompt}
    return {"messages": [message], "max_completion_tokens": job.new_tokens, **_shared(job, model)}


def _shared(job: Job, model: str | None) -> dict[str, Any]:
    more: dict[str, Any] = {"ignore_eos": True} if job.sampling.get("ignore_eos") else {}
    if model is not None:
        more["model"] = model
    return {
        "temperature": job.sampling["temperature"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **more,
    }


NATIVE = Backend(
    name="jspec",
    path="/generate",
    to_body=lambda job, _: native_body(job),
    make_reader=NativeReader,
)
COMPLETIONS = Backend(
    name="openai",
    path="/v1/completions",
    to_body=_completion_body,
    make_reader=OpenAIReader,
)
CHAT = Backend(
    name="openai-chat",
    path="/v1/chat/completions",
    to_body=_chat_body,
    make_reader=OpenAIReader,
)
# jspec's names and those of other benchmarks.
BACKENDS: Mapping[str, Backend] = {
    **dict.fromkeys(("jspec", "sglang", "sglang-native"), NATIVE),
    **dict.fromkeys(("openai", "vllm", "sglang-oai"), COMPLETIONS),
    **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat"), CHAT),
}

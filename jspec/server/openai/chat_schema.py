"""OpenAI's POST /v1/chat/completions, with SGLang's extensions: from JSON to a checked call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.messages.adapter import adapter_names
from jspec.messages.request import SamplingParams
from jspec.server.http.fields import (
    NO_DEFAULTS,
    Hints,
    JsonObject,
    Neutral,
    as_object,
    get_bool,
    get_rid,
    read_body,
)
from jspec.server.native.generate_schema import common_fields
from jspec.server.openai.completion_schema import (
    ANSWER_FIELDS,
    COMPLETION_HINTS,
    NEUTRAL_OPENAI,
    SAMPLING_NAMES,
    TOP_LOGPROBS,
    AnswerOptions,
    answer_options,
    logprob_fields,
    sampling_of,
)
from jspec.server.openai.response_formats import GRAMMAR_FIELDS
from jspec.text.calls.tools import ToolUse, check_tools
from jspec.text.intake import Prompt
from jspec.text.template.chat_messages import Messages, check_messages

CHAT_FIELDS = (
    frozenset(SAMPLING_NAMES)
    | ANSWER_FIELDS
    | GRAMMAR_FIELDS
    | {
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "separate_reasoning",
    }
)
NEUTRAL_CHAT: Neutral = {
    **NEUTRAL_OPENAI,
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, "text"),
    "audio": (None,),
    "prediction": (None,),
    "verbosity": (None, "medium"),
    "stream_reasoning": (None, True),
    "include_reasoning": (None, True),
    "chat_template": (None,),
    "documents": (None, []),
    "web_search_options": (None,),
    "echo": (None, False),
    "best_of": (None, 1),
    "add_special_tokens": (None, False),
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # OpenAI's values
CHAT_HINTS: Hints = {
    **{name: hint for name, hint in COMPLETION_HINTS.items() if name != "messages"},
    "max_new_tokens": "'max_completion_tokens'",
    "prompt": "'messages'",
    "text": "'messages'",
    "input_ids": "'messages'",
    "sampling_params": "its fields at the top level",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    messages: Messages
    prompt: Prompt  # without ids; if max_new_tokens is None, it is the rest of the context
    template_options: Mapping[str, Any]  # of `Engine.chat_prompt`
    options: AnswerOptions
    tools: ToolUse = field(default_factory=ToolUse)
    separate_reasoning: bool = True  # effective only with --reasoning-parser

    @property
    def sampling(self) -> SamplingParams:
        assert isinstance(self.prompt.sampling, SamplingParams)  # of `sampling_of`
        return self.prompt.sampling

    @property
    def num_chars(self) -> int:
        """The cost of rendering: characters and items of everything that the template gets."""
        total, pending = 0, [*self.messages, self.template_options]
        while pending:
            value: Any = pending.pop()
            total += 1 if not isinstance(value, str) else len(value)
            if isinstance(value, Mapping):
                pending += value.values()
            elif isinstance(value, list | tuple):
                pending += value
        return total


def parse_chat(body: object, defaults: Mapping[str, Any] = NO_DEFAULTS) -> ChatCall:
    values = read_body(body, read=CHAT_FIELDS, neutral=NEUTRAL_CHAT, hints=CHAT_HINTS)
    messages = check_messages(values.get("messages"))
    asks, num_top = get_bool(values, "logprobs"), values.get("top_logprobs")
    if num_top is not None:
        TOP_LOGPROBS.check("top_logprobs", num_top)
        if num_top and not asks:
            raise RequestError(
                f"top_logprobs is {num_top} without logprobs; expected logprobs true"
            )
    options = replace(answer_options(values), logprobs=asks)
    if asks:
        values |= logprob_fields(num_top or 0, of_prompt=False)
    continues = get_bool(values, "continue_final_message")
    adds = get_bool(values, "add_generation_prompt", default=not continues)
    if adds and continues:
        raise RequestError(
            "add_generation_prompt and continue_final_message are true; expected one of them"
        )
    names = ("tools", "tool_choice", "parallel_tool_calls")
    tools = check_tools(*(values.get(name) for name in names))
    return ChatCall(
        messages=messages,
        prompt=Prompt(
            sampling=sampling_of(values, defaults),
            request_id=get_rid(values),
            lora=adapter_names(values, 1)[0],
            **common_fields(values),
        ),
        template_options={
            "add_generation_prompt": adds,
            "continue_final_message": continues,
            "variables": _variables(values),
            "tools": tools.shown_tools,
        },
        options=options,
        tools=tools,
        separate_reasoning=get_bool(values, "separate_reasoning", default=True),
    )


def _variables(values: JsonObject) -> JsonObject | None:
    kwargs, effort = values.get("chat_template_kwargs"), values.get("reasoning_effort")
    given = None if kwargs is None else as_object(kwargs, "chat_template_kwargs")
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {shown_json(effort)}; expected one of {', '.join(EFFORTS)}"
        )
    return {"reasoning_effort": effort, **(given or {})}

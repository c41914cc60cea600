"""A chat template, in transformers' Jinja, which turns messages into a prompt's text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2

from jspec.errors import CheckpointError, RequestError, shown_json
from jspec.text.template.template_sandbox import TemplateSandbox

MAX_SOURCE = 100_000  # characters; the longest published ones have a third of it
# Marks the end of a message to continue; contains private-use characters.
_END_MARK = "\ue000jspec-end-of-message\ue001"


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Jinja's own filter, but without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox(_to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTemplate:
    source: str
    where: str  # its file, for errors at startup
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token and the like
    template: jinja2.Template = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name, size = f"the chat template in {self.where}", len(self.source)
        if size > MAX_SOURCE:
            raise CheckpointError(
                f"{name}: it has {size} characters; expected at most {MAX_SOURCE}"
            )
        try:
            template = _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{name}: {error}") from error
        except RecursionError:
            raise CheckpointError(f"{name}: it is nested too deeply") from None
        except Exception as error:  # Jinja passes on Python's errors about generated code
            raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error
        object.__setattr__(self, "template", template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,  # end after its content, which must be text
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text. Raises RequestError with the template's message if it
        refuses."""
        if tools and "tools" not in self.source:
            raise RequestError(
                f"tools has {len(tools)}, and the chat template never names `tools`; expected a "
                "template that shows them to the model (--chat-template FILE)"
            )
        effort = (variables or {}).get("reasoning_effort")
        if effort is not None and "reasoning_effort" not in self.source:
            raise RequestError(
                f"reasoning_effort is {shown_json(effort)}, and the chat template never names it; "
                "expected a template that does, or leave it out"
            )
        given = [dict(message) for message in messages]
        if continue_final_message:
            given[-1]["content"] = _marked(given)
        named = {
            **self.special_tokens,
            **(variables or {}),
            "messages": given,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self.template.render(named)
        except RecursionError:
            raise RequestError("the chat template recursed too deeply over the messages") from None
        except Exception as error:  # a template can raise anything
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        if not continue_final_message:
            return text
        end = text.rfind(_END_MARK)
        if end < 0:
            raise RequestError(
                "continue_final_message is true, but the chat template leaves the last message out"
            )
        return text[:end]


def _marked(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message is true and the last message has no text; expected text"
        )
    return content + _END_MARK

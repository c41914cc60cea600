"""A checkpoint's chat template: messages to the text of a prompt.

The template is Jinja, as transformers renders it (`apply_chat_template`): in a sandbox that can
change nothing, with the globals, the filter and the block that published templates use. It comes
from the checkpoint or from a flag, never from a request. It knows nothing about ids.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from jspec.errors import CheckpointError, ConfigError, RequestError, shown
from jspec.files.json_files import exists, read_object, read_text
from jspec.text.template.template_sandbox import TemplateSandbox

CONFIG, JINJA, JSON = "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
MAX_SOURCE = 100_000  # characters; the longest that are published have a third of it
DEFAULT_NAME = "default"  # of several templates, the one for a plain chat
# Where the last message ends in the text that is to be continued: two private characters around it.
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
    """Jinja's own escapes for HTML, which a prompt is not."""
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
    """A compiled template. special_tokens: bos_token and the like, which it may name.

    where: the file that it is from, for messages.
    """

    source: str
    where: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
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
        except Exception as error:  # Jinja hands on what Python says of the code it made
            raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error
        object.__setattr__(self, "template", template)

    @classmethod
    def find(cls, tokenizer: Path, *, named: str | None) -> ChatTemplate | None:
        """The file that was named, else the checkpoint's own, if it has one."""
        if named is not None:
            return cls.from_file(named, tokenizer=tokenizer)
        return cls.from_directory(tokenizer)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ChatTemplate | None:
        """The checkpoint's own: chat_template.jinja, else chat_template.json, else what
        tokenizer_config.json has; None if none of them has one. Raises CheckpointError.
        """
        directory = Path(path)
        special_tokens = _special_tokens(directory)
        if exists(directory / JINJA):
            found = directory / JINJA
            return cls(source=read_text(found), where=str(found), special_tokens=special_tokens)
        for name in (JSON, CONFIG):
            if not exists(directory / name):
                continue
            source = _stored(directory / name)
            if source is not None:
                where = str(directory / name)
                return cls(source=source, where=where, special_tokens=special_tokens)
        return None

    @classmethod
    def from_file(cls, path: str, *, tokenizer: str | os.PathLike[str]) -> ChatTemplate:
        """The file that --chat-template names: Jinja, or JSON that holds `chat_template`.

        tokenizer: the directory whose special tokens it may name. Raises ConfigError for a file
        that is not there, CheckpointError for one that holds no template.
        """
        file = Path(path)
        if not exists(file) or not file.is_file():
            raise ConfigError(f"chat_template is {path!r}; expected a file with a Jinja template")
        source: str | None = _stored(file) if file.suffix == ".json" else read_text(file)
        if source is None:
            raise CheckpointError(f"{file} has no chat_template; expected one")
        return cls(source=source, where=path, special_tokens=_special_tokens(Path(tokenizer)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        continue_final_message: it ends where the content of the last message does, which must be
        text. variables: what else the template may name (`chat_template_kwargs`).

        Raises RequestError with the template's own words where it refuses the messages.
        """
        if tools and "tools" not in self.source:
            raise RequestError(
                f"tools has {len(tools)}, and the chat template in {self.where} never names "
                "`tools`; expected a template that shows them to the model (--chat-template FILE)"
            )
        effort = (variables or {}).get("reasoning_effort")
        if effort is not None and "reasoning_effort" not in self.source:
            raise RequestError(
                f"reasoning_effort is {shown(effort)}, and the chat template in {self.where} never "
                "names it; expected a template that does, or leave it out"
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
        except Exception as error:  # what a template does with foreign messages can raise anything
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


def _stored(path: Path) -> str | None:
    """`chat_template` of a JSON file: text, or a list of {"name", "template"}; None without it."""
    value = read_object(path).get("chat_template")
    if isinstance(value, list):
        by_name = {
            item.get("name"): item.get("template") for item in value if isinstance(item, dict)
        }
        value = by_name.get(DEFAULT_NAME)
        if value is None:
            raise CheckpointError(
                f"chat_template in {path} has {sorted(map(str, by_name))}; expected one named "
                f"{DEFAULT_NAME!r}"
            )
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"chat_template in {path} is {type(value).__name__}; expected text or a list"
        )
    return value


def _special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, ... as tokenizer_config.json and special_tokens_map.json spell them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if not exists(directory / name):
            continue
        for key, value in read_object(directory / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found

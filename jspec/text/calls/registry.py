"""Answer formats by the names that other servers use, and the parser for a request."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from jspec.messages.grammar import ReasoningMarks
from jspec.text.calls import (
    deepseek,
    gemma4,
    gpt_oss,
    hermes,
    kimi,
    llama3,
    mistral,
    thinking,
    xml_calls,
)
from jspec.text.calls.call_list import CallListParser
from jspec.text.calls.events import AnswerParser, Pipeline, PlainParser

GPT_OSS = "gpt-oss"
_HARMONY_MARKERS = (*gpt_oss.MARKERS, gpt_oss.CONSTRAIN)
# Mistral's templates accept only ids of nine letters and digits.
_SHORT_ID = string.ascii_letters + string.digits


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id() -> str:
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


def _harmony(names: Collection[str]) -> AnswerParser:
    return gpt_oss.HarmonyParser(names, splits_reasoning=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    parser: Callable[[Collection[str]], AnswerParser]
    markers: tuple[str, ...]  # texts in it that may be special tokens
    new_id: Callable[[], str] = _long_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning, or for text that is all in channels their markers."""

    marks: thinking.ThinkMarks = thinking.THINK
    channels: tuple[str, ...] = ()
    starts_inside: bool = False  # answers start with reasoning unless the prompt ends it


CALL_FORMATS: Mapping[str, CallFormat] = {
    "llama3": CallFormat(parser=llama3.Llama3Parser, markers=(llama3.PYTHON_TAG,)),
    "qwen": CallFormat(parser=hermes.HermesParser, markers=(hermes.OPEN, hermes.CLOSE)),
    "mistral": CallFormat(
        parser=mistral.MistralParser,
        markers=(mistral.OPEN, mistral.CALL_ID, mistral.ARGS),
        new_id=_short_id,
    ),
    "qwen3_coder": CallFormat(
        parser=partial(xml_calls.XmlCallParser, marks=xml_calls.QWEN3_CODER),
        markers=(xml_calls.QWEN3_CODER.open, xml_calls.QWEN3_CODER.close),
    ),
    "glm45": CallFormat(
        parser=partial(xml_calls.XmlCallParser, marks=xml_calls.GLM45),
        markers=(
            *(xml_calls.GLM45.open, xml_calls.GLM45.call_end, xml_calls.GLM45.value_end),
            *filter(None, xml_calls.GLM45.key),
        ),
    ),
    "minimax-m2": CallFormat(
        parser=partial(xml_calls.XmlCallParser, marks=xml_calls.MINIMAX),
        markers=(xml_calls.MINIMAX.open, xml_calls.MINIMAX.close),
    ),
    "deepseekv3": CallFormat(parser=deepseek.DeepseekParser, markers=deepseek.MARKERS),
    "deepseekv31": CallFormat(parser=deepseek.Deepseek31Parser, markers=deepseek.MARKERS),
    "deepseekv32": CallFormat(
        parser=partial(xml_calls.XmlCallParser, marks=xml_calls.DEEPSEEK_V32),
        markers=(xml_calls.DSML,),
    ),
    "kimi_k2": CallFormat(parser=kimi.KimiParser, markers=kimi.MARKERS),
    "gemma4": CallFormat(parser=gemma4.Gemma4Parser, markers=gemma4.MARKERS),
    GPT_OSS: CallFormat(parser=_harmony, markers=_HARMONY_MARKERS),
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(starts_inside=True),
    "qwen3": ReasoningFormat(),
    "gemma4": ReasoningFormat(marks=thinking.GEMMA4),
    "mistral": ReasoningFormat(marks=thinking.MISTRAL),
    GPT_OSS: ReasoningFormat(channels=_HARMONY_MARKERS),
}
CALL_ALIASES: Mapping[str, str] = {
    "qwen25": "qwen",
    "hermes": "qwen",
    "llama3_json": "llama3",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "minimax_m2": "minimax-m2",
    "openai": GPT_OSS,
}
REASONING_ALIASES: Mapping[str, str] = {
    "deepseek_r1": "deepseek-r1",
    "kimi_k2": "deepseek-r1",
    "minimax": "deepseek-r1",
    "minimax_m2": "deepseek-r1",
    "glm45": "qwen3",
    "deepseek-v3": "qwen3",
    "deepseek_v3": "qwen3",
    "openai_gptoss": GPT_OSS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The server's configured formats, by their names in the tables above."""

    calls: str | None = None
    reasoning: str | None = None

    @property
    def has_channels(self) -> bool:
        """True if all text is in channels, so that a parser is always needed."""
        return GPT_OSS in (self.calls, self.reasoning)

    def may_reason(self, prompt_end: str) -> bool:
        if self.reasoning is None:
            return False
        close = REASONING_FORMATS[self.reasoning].marks.close
        return not prompt_end.rstrip().endswith(close)

    def reasoning_marks(self, prompt_end: str) -> ReasoningMarks | None:
        """Return the marks of reasoning before a grammar's text; None for none, or channels."""
        if self.reasoning in (None, GPT_OSS):
            return None
        format = REASONING_FORMATS[self.reasoning]
        marks = thinking.marks_after(prompt_end, format.marks)
        is_inside = marks is not None and format.starts_inside
        return ReasoningMarks(format.marks.close) if is_inside else marks

    def _starts_inside(self, reasoning: str, prompt_end: str) -> bool:
        end, format = prompt_end.rstrip(), REASONING_FORMATS[reasoning]
        is_open = format.marks.is_open(end) or format.starts_inside
        return is_open and not end.endswith(format.marks.close)

    def markers(self, *, calls: bool, reasoning: bool) -> tuple[str, ...]:
        """Return markers that must be visible in the text of such a request."""
        found: tuple[str, ...] = ()
        if calls and self.calls is not None:
            found += CALL_FORMATS[self.calls].markers
        if reasoning and self.reasoning is not None:
            format = REASONING_FORMATS[self.reasoning]
            found += format.channels or (format.marks.open, format.marks.close)
        return found

    def parser(
        self,
        names: Collection[str] = (),  # callable tools, or a mapping to their parameters' schemas
        *,
        splits_reasoning: bool,
        is_forced: bool = False,  # a grammar enforces a list of calls
        prompt_end: str = "",  # its last characters, which may start or end the reasoning
    ) -> AnswerParser:
        """Return a new parser for one sequence."""
        splits = splits_reasoning and self.reasoning is not None
        if self.has_channels and not is_forced:
            return gpt_oss.HarmonyParser(names, splits_reasoning=splits)
        inner: AnswerParser = PlainParser()
        if is_forced:
            inner = CallListParser(names)
        elif names and self.calls is not None:
            inner = CALL_FORMATS[self.calls].parser(names)
        if not splits or self.reasoning in (None, GPT_OSS):
            return inner
        starts_inside = self._starts_inside(self.reasoning, prompt_end)
        marks = REASONING_FORMATS[self.reasoning].marks
        return Pipeline(thinking.ThinkParser(starts_inside=starts_inside, marks=marks), inner)

    def new_id(self) -> str:
        return _long_id() if self.calls is None else CALL_FORMATS[self.calls].new_id()

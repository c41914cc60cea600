"""An engine that answers with given text: real loop, scheduler, tokenizer and template; no model.

It tests how a server processes an answer (tool calls, reasoning, stop strings), in steps of several
tokens like speculation. It has no weights and no configuration.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jspec.engine.programs.compilation import Progress
from jspec.engine.runner import DeviceRunner
from jspec.messages.grammar import GrammarKind, GrammarSource, ReasoningMarks
from jspec.messages.protocols import Weights
from jspec.messages.request import Request, SamplingParams
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.engine import Engine
from jspec.serving.submission import Preparation
from jspec.text.intake import Intake
from jspec.text.stream import stream_of
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.tokenizer import Tokenizer
from tests.support.failing_runner import FailingRunner, Fails
from tests.support.fake_runner import small_limits

EOS = "<|eos|>"


def write_text_files(directory: Path, *, special: Sequence[str] = (), template: str) -> Path:
    """Write a tokenizer with one token per byte and these special tokens, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: token_id for token_id, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, *special])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = json.dumps({"eos_token": EOS})
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


class Heard(Preparation):
    """Remembers grammars and reasoning, which the text does not follow."""

    def __init__(
        self, grammars: list[GrammarSource | None], reasoning: list[ReasoningMarks | None]
    ) -> None:
        self.grammars, self.reasoning = grammars, reasoning
        self.may_end: threading.Event | None = None

    async def check(self, sampling: SamplingParams) -> None:
        pass

    async def run(self, requests: Sequence[Request]) -> Sequence[Request]:
        self.reasoning += (request.reasoning for request in requests)
        self.grammars += (request.sampling.grammar for request in requests)
        if self.may_end is not None:
            await asyncio.to_thread(self.may_end.wait)
        free: dict[str, Any] = dict.fromkeys(kind.value for kind in GrammarKind)
        return [replace(each, sampling=replace(each.sampling, **free)) for each in requests]


class SpeakingEngine(Engine):
    """Answers every request with `says`, then ends it.

    directory: from `write_text_files`
    prompts: the text of every prompt that ran, in order
    grammars, reasoning: from the requests; `says` does not follow them
    fails, may_restart: see FailingRunner
    """

    def __init__(
        self,
        directory: Path,
        *,
        says: str = "",
        fails: Fails = lambda _: False,
        may_restart: threading.Event | None = None,
    ) -> None:
        self.says = says
        self._fails, self._may_restart = fails, may_restart
        self.prompts: list[str] = []
        self.grammars: list[GrammarSource | None] = []
        self.reasoning: list[ReasoningMarks | None] = []
        self._directory = directory
        super().__init__()

    def _start(self, progress: Progress | None) -> Weights:
        del progress
        tokenizer = self._tokenizer = Tokenizer.from_directory(self._directory)
        self.eos_token_ids = tokenizer.eos_token_ids
        self._limits = small_limits(
            context_length=8192, num_pages=2048, page_size=16, chunk_size=256
        )
        runner = FailingRunner(
            self._limits,
            token_at=self._token_at,
            fails_at_collect=self._fails,
            may_restart=self._may_restart,
        )
        self._runner = cast(DeviceRunner, runner)
        self._intake = Intake(
            tokenizer,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=self.eos_token_ids,
            context_length=self._limits.pool.context_length,
            chat_templates=ChatTemplates.from_directory(self._directory),
        )
        self._preparation = Heard(self.grammars, self.reasoning)
        make_stream = functools.partial(stream_of, self._tokenizer)
        self._scheduler = Scheduler(self._limits, make_stream=make_stream)
        return cast(Weights, None)  # it has no weights

    def _token_at(self, request: Request, position: int) -> int:
        index = position - len(request.prompt_ids)
        if index == 0:
            prompt = self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
            self.prompts.append(prompt)
        script = self._script(self.says)
        return script[index] if index < len(script) else self.eos_token_ids[0]

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a few texts, as long as the engine)
    def _script(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode(text, add_special_tokens=False)

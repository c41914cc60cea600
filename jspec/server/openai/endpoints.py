"""OpenAI's routes: completions, chats and models, with common code for answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.errors import shown
from jspec.messages.request import PromptToken
from jspec.messages.response import Completion
from jspec.server.http.exchange import read_call
from jspec.server.openai import answers
from jspec.server.openai.answers import AnswerHead, AnswerShape, ChatShape, TextShape
from jspec.server.openai.chat_schema import ChatCall, parse_chat
from jspec.server.openai.completion_schema import (
    AnswerOptions,
    CompletionCall,
    openai_names,
    parse_completion,
)
from jspec.server.openai.parsed_chat import (
    ChatReading,
    ParsedChatShape,
    check_answerable,
    note_reasoning,
    prepare,
)
from jspec.server.service import Service, Work, answer_stream
from jspec.text.tokenizer.token_texts import TokenTexts

Call = TypeVar("Call")


class OpenAIEndpoints:
    def __init__(self, service: Service) -> None:
        self.service = service

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{name:path}", self.model, methods=get),
        ]

    async def _read(self, request: Request, parse: Callable[..., Call]) -> Call:
        defaults = self.service.engine.sampling_defaults
        return await read_call(request, self.service.args, partial(parse, defaults=defaults))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        call = await self._read(request, parse_completion)
        self.service.check_model(call.options.model)
        texts = self._texts(call.options)
        with openai_names():
            echoes = self._echoes(call) if call.options.echo else ()
            work = await self.service.submit(
                call.prompts, model=call.options.model, group=call.group
            )
        answer = _Answer(call.options, work, TextShape(), texts, echoes)
        return await self._answer(request, answer)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        call = await self._read(request, parse_chat)
        texts = self._texts(call.options)
        work, reading = await self._start(call)
        shape = ChatShape() if reading is None else ParsedChatShape(reading)
        return await self._answer(request, _Answer(call.options, work, shape, texts))

    async def _start(self, call: ChatCall) -> tuple[Work, ChatReading | None]:
        style = self.service.args.answer_format
        self.service.check_model(call.options.model)
        check_answerable(call, style)
        with openai_names():
            prompt = await self.service.chat_prompt(call)
            prompt, reading = prepare(call, prompt, style, self.service.engine.tokenizer)
            work = await self.service.submit(
                [prompt], model=call.options.model, group=prompt.request_id
            )
            return work, reading

    def _texts(self, options: AnswerOptions) -> TokenTexts | None:
        """Return the token texts for log-probabilities; call it before anything is queued."""
        return self.service.engine.token_texts if options.logprobs else None

    def _echoes(self, call: CompletionCall) -> tuple[str, ...]:
        engine = self.service.engine
        return tuple(
            engine.tokenizer.decode(engine.check_ids("input_ids", prompt.input_ids))
            if prompt.text is None
            else prompt.text
            for prompt in call.prompts
        )

    async def _answer(self, request: Request, answer: _Answer) -> Response:
        options, work, shape = answer.options, answer.work, answer.shape
        head = AnswerHead(
            answer_id=f"{shape.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=options.model or self.service.model_name,
            object_name=shape.stream_object_name if options.stream else shape.object_name,
        )
        if options.stream:
            return _stream(answer, head)
        await work.finish(request.receive)
        choices = []
        for index, completion in enumerate(work.completions):
            text = answer.echo(index) + completion.text
            choice = shape.choice(index, text, completion.finish)
            answer.count_reasoning(index)
            choice["logprobs"] = answer.logprobs(index, first_id=0)
            choice["seed"] = completion.seed
            if options.return_meta_info:
                choice["meta_info"] = completion.meta_info()
            choices.append(choice)
        body = head.to_json(choices)
        body["usage"] = answers.usage_of(work.completions, work.prompt_idxs)
        if options.return_spec_tokens_details:
            body["sglext"] = {"spec_tokens_details": _details(work)}
        return JSONResponse(body)

    def _card(self, lora: str | None = None) -> dict[str, Any]:
        engine, name = self.service.engine, self.service.model_name
        return answers.model_card(
            name if lora is None else lora,
            created=int(self.service.started),
            root=engine.lora_adapters[lora].path if lora else engine.args.model_path or name,
            parent=None if lora is None else name,
            max_model_len=engine.limits.pool.context_length,
        )

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the served model, and its LoRA adapters."""
        names = (None, *self.service.engine.lora_adapters)
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        if not request.path_params["name"]:
            return await self.models(request)
        lora = self.service.check_model(request.path_params["name"])
        if lora is not None and lora not in self.service.engine.lora_adapters:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"adapter {shown(lora)} is not loaded")
        return JSONResponse(self._card(lora))


def _details(work: Work) -> Any:
    details = answers.spec_details(work.completions)
    return details if len(details) > 1 else details[0]


class _Answer:
    """An answer in progress. echoes: each prompt's text, if answers start with it."""

    def __init__(
        self,
        options: AnswerOptions,
        work: Work,
        shape: AnswerShape,
        texts: TokenTexts | None,
        echoes: tuple[str, ...] = (),
    ) -> None:
        self.options, self.work, self.shape = options, work, shape
        self._texts, self._echoes = texts, echoes
        self._offsets = [0] * len(work.completions)  # characters of the tokens answered so far

    def echo(self, index: int) -> str:
        return self._echoes[self.work.prompt_idxs[index]] if self._echoes else ""

    def count_reasoning(self, index: int) -> None:
        if passages := self.shape.reasoning(index):
            texts = self.work.service.engine.token_texts
            note_reasoning(self.work.completions[index], passages, texts)

    def logprobs(self, index: int, *, first_id: int) -> dict[str, Any] | None:
        """Return a sequence's log-probabilities from `first_id` on, the prompt's before the first
        token's; None if not requested. Call it once for each token, in order."""
        if self._texts is None:
            return None
        completion = self.work.completions[index]
        ids, known = completion.output_ids[first_id:], completion.logprobs[first_id:]
        tokens: list[PromptToken] = [] if first_id else list(completion.prompt_logprobs)
        tokens += zip(ids, known, strict=True)
        found = self.shape.logprobs(tokens, self._texts, offset=self._offsets[index])
        self._offsets[index] += sum(len(self._texts.text(token_id)) for token_id, _ in tokens)
        return found


def _stream(answer: _Answer, head: AnswerHead) -> Response:
    options, work, shape = answer.options, answer.work, answer.shape
    begun: set[int] = set()  # sequences with at least one event

    def event(index: int, completion: Completion) -> dict[str, Any] | None:
        is_first, finish = index not in begun, completion.finish
        text, sent = completion.take()
        text = answer.echo(index) + text if is_first else text
        if not (text or finish is not None or options.logprobs):
            return None  # ids whose text is pending: no event in this shape
        choice = shape.delta(index, text, finish, is_first=is_first)
        if choice is None:
            if not options.logprobs:
                return None
            choice = {"index": index, "delta": {}, "finish_reason": None, "matched_stop": None}
        choice["logprobs"] = answer.logprobs(index, first_id=sent.ids)
        begun.add(index)
        if finish is not None:
            answer.count_reasoning(index)
            choice["seed"] = completion.seed
        if options.return_meta_info and finish is not None:
            choice["meta_info"] = completion.meta_info()
        body = head.to_json([choice])
        if options.continuous_usage:
            return {**body, "usage": answers.usage_of([completion], [0])}
        return {**body, "usage": None} if options.include_usage else body

    def last() -> dict[str, Any] | None:
        if not (options.include_usage or options.return_spec_tokens_details):
            return None
        body = head.to_json([])
        if options.include_usage:
            body["usage"] = answers.usage_of(work.completions, work.prompt_idxs)
        if options.return_spec_tokens_details:
            body["sglext"] = {"spec_tokens_details": _details(work)}
        return body

    return answer_stream(work, event, last)

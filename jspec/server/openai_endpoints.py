"""OpenAI's routes: completions, chats and models. Both kinds of answers are made in one place.

What a field means is in the schemas; what is waited for is in the service.
"""

from __future__ import annotations

import time
import uuid
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.core.errors import shown
from jspec.server import openai_schemas
from jspec.server.chat_schemas import parse_chat
from jspec.server.http import read_json
from jspec.server.openai_schemas import (
    AnswerHead,
    AnswerOptions,
    AnswerShape,
    ChatShape,
    TextShape,
    parse_completion,
)
from jspec.server.service import Service, Work, answer_stream
from jspec.server.streaming import SequenceFold


class OpenAIEndpoints:
    """One method an endpoint."""

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

    async def _read(self, request: Request) -> object:
        return await read_json(request, self.service.args)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        call = parse_completion(await self._read(request), self.service.engine.sampling_defaults)
        self._check_name(call.options.model)
        with openai_schemas.openai_names():
            work = await self.service.submit(call.prompts, group=call.group)
        return await self._answer(request, call.options, work, TextShape())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        call = parse_chat(await self._read(request), self.service.engine.sampling_defaults)
        self._check_name(call.options.model)
        with openai_schemas.openai_names():
            work = await self.service.submit([await self.service.chat_prompt(call)], group=call.rid)
        return await self._answer(request, call.options, work, ChatShape())

    def _check_name(self, name: str | None) -> None:
        if name is not None and name not in self.service.model_names:
            raise HTTPException(
                HTTPStatus.NOT_FOUND,
                f"model is {shown(name)}; expected one of {list(self.service.model_names)}",
            )

    async def _answer(
        self, request: Request, options: AnswerOptions, work: Work, shape: AnswerShape
    ) -> Response:
        head = AnswerHead(
            answer_id=f"{shape.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=options.model or self.service.model_name,
            object_name=shape.stream_object_name if options.stream else shape.object_name,
        )
        if options.stream:
            return _stream(options, head, work, shape)
        await work.finish(request.receive)
        choices = []
        for index, fold in enumerate(work.folds):
            completion = fold.completion
            choice = shape.choice(index, completion.text, completion.finish)
            if options.return_meta_info:
                choice["meta_info"] = fold.to_json()["meta_info"]
            choices.append(choice)
        body = head.to_json(choices)
        body["usage"] = openai_schemas.usage_of(work.completions(), work.prompt_idxs)
        if options.return_spec_tokens_details:
            body["sglext"] = {"spec_tokens_details": _details(work)}
        return JSONResponse(body)

    def _card(self) -> dict[str, Any]:
        engine = self.service.engine
        return openai_schemas.model_card(
            self.service.model_name,
            created=int(self.service.started),
            root=engine.args.model_path or self.service.model_name,
            max_model_len=engine.limits.context_length,
        )

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card())


def _details(work: Work) -> Any:
    details = openai_schemas.spec_details(work.completions())
    return details if len(details) > 1 else details[0]


def _stream(options: AnswerOptions, head: AnswerHead, work: Work, shape: AnswerShape) -> Response:
    begun: set[int] = set()  # sequences of which something was sent

    def event(index: int, fold: SequenceFold) -> dict[str, Any] | None:
        text, finish = fold.take_text(), fold.completion.finish
        if not text and finish is None:
            return None  # ids whose text is held back: nothing that this shape could say
        choice = shape.delta(index, text, finish, is_first=index not in begun)
        begun.add(index)
        if options.return_meta_info and finish is not None:
            choice["meta_info"] = fold.to_json()["meta_info"]
        body = head.to_json([choice])
        return {**body, "usage": None} if options.include_usage else body

    def last() -> dict[str, Any] | None:
        if not (options.include_usage or options.return_spec_tokens_details):
            return None
        body = head.to_json([])
        if options.include_usage:
            body["usage"] = openai_schemas.usage_of(work.completions(), work.prompt_idxs)
        if options.return_spec_tokens_details:
            body["sglext"] = {"spec_tokens_details": _details(work)}
        return body

    return answer_stream(work, event, last)

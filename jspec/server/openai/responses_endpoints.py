"""POST /v1/responses: a chat in OpenAI's newer form. Answers are not stored."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.messages.response import Completion
from jspec.server.openai.completion_schema import openai_names
from jspec.server.openai.endpoints import OpenAIEndpoints
from jspec.server.openai.parsed_chat import (
    PLAIN_READING,
    AnswerParts,
    check_answerable,
    note_reasoning,
    prepare,
)
from jspec.server.openai.responses_answers import ResponseItems, named_events
from jspec.server.openai.responses_schema import ResponseCall, parse_response
from jspec.server.service import Work, answer_stream
from jspec.text.tokenizer.token_texts import TokenTexts


class ResponsesEndpoints(OpenAIEndpoints):
    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.responses, methods=["POST"])]

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        call = await self._read(request, parse_response)
        chat, style = call.chat, self.service.args.answer_format
        self.service.check_model(chat.options.model)
        check_answerable(chat, style)
        with openai_names():
            prompt = await self.service.chat_prompt(chat)
            prompt, reading = prepare(chat, prompt, style, self.service.engine.tokenizer)
            work = await self.service.submit([prompt], group=chat.rid)
        reading = reading or PLAIN_READING
        items, texts = ResponseItems(self._head(call)), self.service.engine.token_texts
        answer = _Response(items, AnswerParts(reading), texts)
        if chat.options.stream:
            return answer.stream(work)
        await work.finish(request.receive)
        return JSONResponse(answer.whole(work.completions[0]))

    def _head(self, call: ResponseCall) -> dict[str, Any]:
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": call.chat.options.model or self.service.model_name,
            **call.told,
        }


class _Response:
    def __init__(self, items: ResponseItems, parts: AnswerParts, texts: TokenTexts) -> None:
        self._items, self._parts, self._texts = items, parts, texts
        self._has_begun = False

    def _take(self, completion: Completion) -> list[dict[str, Any]]:
        begun = [] if self._has_begun else list(self._items.begin())
        self._has_begun = True
        said = self._parts.take(completion.take()[0], is_last=completion.finish is not None)
        grown = self._items.add((event, self._parts.new_id()) for _, event in said)
        events = [*begun, *grown]
        if completion.finish is None:
            return events
        note_reasoning(completion, self._parts.reasoning, self._texts)
        return [*events, *self._items.end(completion)]

    def whole(self, completion: Completion) -> dict[str, Any]:
        self._take(completion)
        return self._items.to_json(completion)

    def stream(self, work: Work) -> Response:
        return answer_stream(
            work, lambda _, completion: named_events(self._take(completion)) or None
        )

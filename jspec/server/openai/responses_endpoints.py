"""POST /v1/responses: a chat in OpenAI's newer form. Answers are not stored."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.server.openai.endpoints import OpenAIEndpoints
from jspec.server.openai.parsed_chat import ItemsAnswer
from jspec.server.openai.responses_answers import ResponseItems, named_events
from jspec.server.openai.responses_schema import ResponseCall, parse_response
from jspec.server.service import answer_stream


class ResponsesEndpoints(OpenAIEndpoints):
    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.responses, methods=["POST"])]

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        call = await self._read(request, parse_response)
        work, reading = await self._start(call.chat)
        items = ResponseItems(self._head(call))
        answer = ItemsAnswer(items, reading, self.service.engine.token_texts)
        if call.chat.options.stream:
            return answer_stream(work, lambda _, found: named_events(answer.take(found)) or None)
        await work.finish(request.receive)
        (completion,) = work.completions
        answer.take(completion)
        return JSONResponse(items.to_json(completion))

    def _head(self, call: ResponseCall) -> dict[str, Any]:
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": call.chat.options.model or self.service.model_name,
            **call.repeated,
        }

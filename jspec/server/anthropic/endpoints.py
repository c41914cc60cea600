"""POST /v1/messages and /v1/messages/count_tokens: a chat in Anthropic's form."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.server.anthropic.answers import MessageBlocks, message_error
from jspec.server.anthropic.schema import parse_count, parse_message
from jspec.server.http.exchange import public_message, status_of
from jspec.server.openai.completion_schema import openai_names
from jspec.server.openai.endpoints import OpenAIEndpoints
from jspec.server.openai.parsed_chat import ItemsAnswer
from jspec.server.openai.responses_answers import named_events
from jspec.server.service import answer_stream


class MessagesEndpoints(OpenAIEndpoints):
    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages, Anthropic's API."""
        request.state.error_body = message_error
        chat = await self._read(request, parse_message)
        if self.service.args.answer_format.has_channels:
            # Agents always send a budget; the model's own effort bounds reasoning in channels.
            sampling = replace(chat.sampling, max_thinking_tokens=None)
            chat = replace(chat, prompt=replace(chat.prompt, sampling=sampling))
        work, reading = await self._start(chat)
        model = chat.options.model or self.service.model_name
        blocks = MessageBlocks({"id": f"msg_{uuid.uuid4().hex}", "model": model})
        answer = ItemsAnswer(blocks, reading, self.service.engine.token_texts)
        if chat.options.stream:
            return answer_stream(
                work,
                lambda _, completion: named_events(answer.take(completion)) or None,
                failure=lambda error: named_events(
                    [message_error(public_message(error), status_of(error))]
                ),
                done=b"",
            )
        await work.finish(request.receive)
        (completion,) = work.completions
        answer.take(completion)
        return JSONResponse(blocks.to_json(completion))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: tokens of the prompt that /v1/messages would run."""
        request.state.error_body = message_error
        chat = await self._read(request, parse_count)
        self.service.check_model(chat.options.model)
        with openai_names():
            prompt = await self.service.chat_prompt(chat)
        return JSONResponse({"input_tokens": len(prompt.input_ids or ())})

"""Routes that ask for no generation: tokens, readiness, pausing, profiles, the cache.

Names and fields are SGLang's and vLLM's.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jspec.core.errors import RequestError
from jspec.engine.heap import settle_heap
from jspec.server.chat_schemas import parse_chat
from jspec.server.fields import (
    JsonObject,
    as_object,
    check_ids,
    check_text,
    get_bool,
    shorten,
    without_neutral,
)
from jspec.server.http import error_response, read_call
from jspec.server.service import Service

BODY = "the request body"
# Of a chat's fields those that its prompt depends on.
CHAT_PROMPT_FIELDS = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_effort",
        "tools",
    }
)
PAUSE_MODES = ("abort", "in_place")


class ControlEndpoints:
    """One method an endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/ready", self.ready, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/v1/tokenize", self.tokenize, methods=post),
            Route("/v1/detokenize", self.detokenize, methods=post),
            Route("/pause_generation", self.pause_generation, methods=post),
            Route("/continue_generation", self.continue_generation, methods=post),
            Route("/start_profile", self.start_profile, methods=["GET", "POST"]),
            Route("/stop_profile", self.stop_profile, methods=["GET", "POST"]),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/freeze_gc", self.freeze_gc, methods=["GET", "POST"]),
        ]

    async def ready(self, _: Request) -> Response:
        """GET /ready: 200 while requests are taken and nothing is paused or shutting down."""
        why = self.service.unready
        if why:
            return error_response(why, HTTPStatus.SERVICE_UNAVAILABLE)
        return PlainTextResponse("ready\n")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize {"prompt": text or texts, "add_special_tokens": true}, or {"messages"} and
        the template's fields of a chat, as vLLM has it."""
        found = await read_call(request, self.service.args, self._tokenized)
        return found if isinstance(found, Response) else await self._tokenize_chat(found)

    def _tokenized(self, body: object) -> Response | JsonObject:
        """The answer, or the fields of a chat."""
        values = without_neutral(
            BODY,
            as_object(body, BODY),
            read=frozenset({"prompt", "add_special_tokens", "model"}) | CHAT_PROMPT_FIELDS,
            neutral={"return_token_strs": (None, False)},
            hints={"text": "'prompt'"},
        )
        if values.get("messages") is not None:
            return values
        prompt = values.get("prompt")
        texts = [check_text("prompt", text) for text in prompt] if isinstance(prompt, list) else []
        texts = texts or [check_text("prompt", prompt)]
        adds = values.get("add_special_tokens") is None or get_bool(values, "add_special_tokens")
        tokenizer = self.service.engine.tokenizer
        rows = [list(tokenizer.encode(text, add_special_tokens=adds)) for text in texts]
        is_list = isinstance(prompt, list)
        return JSONResponse(
            {
                "tokens": rows if is_list else rows[0],
                "count": [len(row) for row in rows] if is_list else len(rows[0]),
                "max_model_len": self.service.engine.limits.context_length,
            }
        )

    async def _tokenize_chat(self, values: JsonObject) -> Response:
        """The prompt that a chat would have."""
        if values.get("prompt") is not None:
            raise RequestError("prompt and messages are given; expected one of them")
        given = {name: values[name] for name in CHAT_PROMPT_FIELDS if name in values}
        prompt = await self.service.chat_prompt(parse_chat(given))
        ids = list(prompt.input_ids or ())
        most = self.service.engine.limits.context_length
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": most})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize {"tokens": ids or lists of ids, "skip_special_tokens": true}.

        The answer has SGLang's `text` and vLLM's `prompt`, which are the same.
        """
        return await read_call(request, self.service.args, self._detokenized)

    def _detokenized(self, body: object) -> Response:
        values = without_neutral(
            BODY,
            as_object(body, BODY),
            read=frozenset({"tokens", "skip_special_tokens", "model"}),
            neutral={},
        )
        tokens: Any = values.get("tokens")
        is_list = isinstance(tokens, list) and tokens != [] and isinstance(tokens[0], list)
        rows = [check_ids("tokens", row) for row in (tokens if is_list else [tokens])]
        for row in rows:
            self.service.engine.check_ids("tokens", row)
        skips = values.get("skip_special_tokens") is None or get_bool(values, "skip_special_tokens")
        texts = self.service.engine.tokenizer.decode_all(rows, skip_special_tokens=skips)
        text = texts if is_list else texts[0]
        return JSONResponse({"text": text, "prompt": text})

    async def pause_generation(self, request: Request) -> Response:
        """POST /pause_generation {"mode": "abort" or "in_place"}: no step is begun from here on.

        abort (SGLang's default) ends all requests first; in_place keeps them where they are.
        """
        body = await read_call(
            request, self.service.args, partial(as_object, where=BODY), or_empty=True
        )
        values = without_neutral(BODY, body, read=frozenset({"mode"}), neutral={})
        mode = values.get("mode") or "abort"
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode is {shorten(mode)}; expected one of {', '.join(PAUSE_MODES)}")
        num_aborted = await self.service.engine.pause_generation(abort=mode == "abort")
        return JSONResponse({"status": "ok", "mode": mode, "num_aborted": num_aborted})

    async def continue_generation(self, _: Request) -> Response:
        """POST /continue_generation."""
        await self.service.engine.continue_generation()
        return JSONResponse({"status": "ok"})

    async def start_profile(self, _: Request) -> Response:
        """POST /start_profile: a trace of jax's profiler into --profile-dir, nowhere else."""
        directory = self.service.args.profile_dir
        if directory is None:
            raise RequestError("profiles are not taken; expected the server to have --profile-dir")
        await asyncio.to_thread(self.service.profiler.start, directory)
        return JSONResponse({"status": "ok", "profile_dir": directory})

    async def stop_profile(self, _: Request) -> Response:
        """POST /stop_profile: writes the trace."""
        directory = await asyncio.to_thread(self.service.profiler.stop)
        return JSONResponse({"status": "ok", "profile_dir": directory})

    async def flush_cache(self, _: Request) -> Response:
        """GET or POST /flush_cache: empties the prefix cache, if no request is there."""
        if await self.service.engine.async_flush_cache():
            return PlainTextResponse("Cache flushed.\n")
        raise RequestError("requests are running or waiting; expected none while the cache goes")

    async def freeze_gc(self, _: Request) -> Response:
        """GET or POST /freeze_gc: as at the start, for what has been made since; SGLang's name."""
        settle_heap()
        return PlainTextResponse("Garbage collection frozen.\n")

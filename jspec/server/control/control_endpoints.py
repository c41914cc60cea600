"""SGLang's and vLLM's other routes: tokens, readiness, pausing, profiles, cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jspec.engine.gc_control import freeze_heap
from jspec.errors import RequestError, shown_json
from jspec.server.http.exchange import error_response, read_call, unless_gone
from jspec.server.http.fields import (
    JsonObject,
    check_list,
    check_number_of_prompts,
    check_text,
    get_bool,
    read_body,
)
from jspec.server.openai.chat_schema import ChatCall, parse_chat
from jspec.server.service import Service
from jspec.serving.generation import INLINE_CHARS
from jspec.text.free_memory import give_back_freed_memory
from jspec.text.template.tokenizer_info import tokenizer_info
from jspec.text.tokenizer.tokenizer import LARGE_CHARS

# The chat fields that affect the prompt.
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
# Limit of /tokenize (characters) and /detokenize (ids); a larger context raises it.
MAX_SIZE = 2**22
MOST_CHARS_A_TOKEN = 8  # on average, over a whole context


class ControlEndpoints:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._tokenizer_info: dict[str, Any] | None = None
        self._long_calls = ThreadPoolExecutor(1, thread_name_prefix="jspec-tokenize")

    def routes(self) -> list[Route]:
        get, post, both = ["GET"], ["POST"], ["GET", "POST"]
        return [
            Route("/ready", self.ready, methods=get),
            Route("/get_load", self.get_load, methods=get),
            Route("/tokenizer_info", self.tokenizer_info, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/v1/tokenize", self.tokenize, methods=post),
            Route("/v1/detokenize", self.detokenize, methods=post),
            Route("/pause_generation", self.pause_generation, methods=post),
            Route("/continue_generation", self.continue_generation, methods=post),
            Route("/start_profile", self.start_profile, methods=both),
            Route("/stop_profile", self.stop_profile, methods=both),
            Route("/start_expert_distribution_record", self.start_expert_record, methods=both),
            Route("/stop_expert_distribution_record", self.stop_expert_record, methods=both),
            Route("/dump_expert_distribution_record", self.dump_expert_record, methods=both),
            Route("/flush_cache", self.flush_cache, methods=both),
            Route("/freeze_gc", self.freeze_gc, methods=both),
        ]

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while requests are accepted; 503 while paused or shutting down.

        /ready?verbose also tells which programs are compiled.
        """
        why = self.service.unready
        if why:
            return error_response(why, HTTPStatus.SERVICE_UNAVAILABLE)
        is_verbose = "verbose" in request.query_params
        more = self.service.engine.describe_programs() if is_verbose else ()
        return PlainTextResponse("".join(f"{line}\n" for line in ("ready", *more)))

    async def get_load(self, _: Request) -> Response:
        """GET /get_load: requests and tokens now, as SGLang lists them for its router."""
        stats = self.service.engine.stats
        queued = [stats.num_queued, *[0] * (len(stats.by_rank) - 1)]  # no rank has a queue
        return JSONResponse(
            [
                {
                    "dp_rank": rank,
                    "num_reqs": own.num_running + num_queued,
                    "num_waiting_reqs": num_queued,
                    "num_tokens": own.num_used_pages * self.service.engine.limits.pool.page_size,
                }
                for rank, (own, num_queued) in enumerate(zip(stats.by_rank, queued, strict=True))
            ]
        )

    async def tokenizer_info(self, _: Request) -> Response:
        """GET /tokenizer_info: the tokenizer's settings and the chat template, as in vLLM."""
        if self._tokenizer_info is None:
            engine = self.service.engine
            directory = Path(engine.config.tokenizer_path)
            self._tokenizer_info = await asyncio.to_thread(
                tokenizer_info, directory, engine.tokenizer, named=engine.args.chat_template
            )
        return JSONResponse(self._tokenizer_info)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize {"prompt": text or texts, "add_special_tokens": true}, or {"messages"}
        with a chat's template fields, as in vLLM."""
        values, chat = await read_call(request, self.service.args, _tokenize_fields)
        if chat is not None:
            return await self._tokenize_chat(values, chat)
        prompt = values["prompt"]
        texts = prompt if isinstance(prompt, list) else [prompt]
        num_chars = sum(map(len, texts))
        self._check_size("prompt", num_chars, "characters")
        make = partial(self._tokenized, values, texts)
        return await self._in_turn(request, make, size=num_chars + len(texts))

    def _tokenized(self, values: JsonObject, texts: list[str]) -> Response:
        adds = get_bool(values, "add_special_tokens", default=True)
        tokenizer = self.service.engine.tokenizer
        rows = [list(tokenizer.encode(text, add_special_tokens=adds)) for text in texts]
        is_list = isinstance(values["prompt"], list)
        return JSONResponse(
            {
                "tokens": rows if is_list else rows[0],
                "count": [len(row) for row in rows] if is_list else len(rows[0]),
                "max_model_len": self.service.engine.limits.pool.context_length,
            }
        )

    def _check_size(self, name: str, size: int, unit: str) -> None:
        """Raise RequestError beyond any real prompt; 1 MB takes seconds and 100 MB of memory."""
        most = max(MAX_SIZE, MOST_CHARS_A_TOKEN * self.service.engine.limits.pool.context_length)
        if size > most:
            raise RequestError(f"{name} has {size} {unit}; expected at most {most}")

    async def _in_turn(
        self, request: Request, make: Callable[[], Response], *, size: int
    ) -> Response:
        """Return make(), in a dedicated thread if it takes long; shared threads must read bodies. A
        client's disconnect ends the wait."""
        if size <= INLINE_CHARS:
            return make()

        def made() -> Response:
            try:
                return make()
            finally:
                if size > LARGE_CHARS:
                    give_back_freed_memory()

        making = asyncio.get_running_loop().run_in_executor(self._long_calls, made)
        return await unless_gone(request.receive, _awaited(making))

    async def _tokenize_chat(self, values: JsonObject, chat: ChatCall) -> Response:
        if values.get("prompt") is not None:
            raise RequestError("prompt and messages are given; expected one of them")
        prompt = await self.service.chat_prompt(chat)
        ids = list(prompt.input_ids or ())
        most = self.service.engine.limits.pool.context_length
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": most})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize {"tokens": ids or lists of ids, "skip_special_tokens": true}.

        The answer has the text as SGLang's `text` and vLLM's `prompt`.
        """
        rows, is_list, skips = await read_call(request, self.service.args, _detokenize_fields)
        num_ids = sum(map(len, rows))
        self._check_size("tokens", num_ids, "ids")

        def made() -> Response:
            for row in rows:
                self.service.engine.check_ids("tokens", row)
            texts = self.service.engine.tokenizer.decode_all(rows, skip_special_tokens=skips)
            text = texts if is_list else texts[0]
            return JSONResponse({"text": text, "prompt": text})

        return await self._in_turn(request, made, size=num_ids + len(rows))

    async def pause_generation(self, request: Request) -> Response:
        """POST /pause_generation {"mode": "abort" or "in_place"}: starts no more steps.

        abort (SGLang's default) ends all requests first; in_place keeps them.
        """
        parse = partial(read_body, read=frozenset({"mode"}), neutral={})
        values = await read_call(request, self.service.args, parse, or_empty=True)
        mode = values.get("mode") or "abort"
        if mode not in PAUSE_MODES:
            raise RequestError(
                f"mode is {shown_json(mode)}; expected one of {', '.join(PAUSE_MODES)}"
            )
        num_aborted = await self.service.engine.pause_generation(abort=mode == "abort")
        return JSONResponse({"status": "ok", "mode": mode, "num_aborted": num_aborted})

    async def continue_generation(self, _: Request) -> Response:
        """POST /continue_generation."""
        await self.service.engine.continue_generation()
        return JSONResponse({"status": "ok"})

    async def start_profile(self, _: Request) -> Response:
        """POST /start_profile: starts a jax profiler trace, always into --profile-dir."""
        directory = self.service.args.profile_dir
        if directory is None:
            raise RequestError("profiles are not taken; expected the server to have --profile-dir")
        await asyncio.to_thread(self.service.profiler.start, directory)
        return JSONResponse({"status": "ok", "profile_dir": directory})

    async def stop_profile(self, _: Request) -> Response:
        """POST /stop_profile: writes the trace."""
        directory = await asyncio.to_thread(self.service.profiler.stop)
        return JSONResponse({"status": "ok", "profile_dir": directory})

    async def start_expert_record(self, _: Request) -> Response:
        """GET or POST /start_expert_distribution_record: counts experts' tokens from now on."""
        await self.service.engine.async_start_expert_distribution_record()
        return JSONResponse({"status": "ok"})

    async def stop_expert_record(self, _: Request) -> Response:
        """GET or POST /stop_expert_distribution_record: leaves out what runs from now on."""
        await self.service.engine.async_stop_expert_distribution_record()
        return JSONResponse({"status": "ok"})

    async def dump_expert_record(self, _: Request) -> Response:
        """GET or POST /dump_expert_distribution_record: the tokens of each layer's experts."""
        return JSONResponse(await self.service.engine.async_dump_expert_distribution_record())

    async def flush_cache(self, _: Request) -> Response:
        """GET or POST /flush_cache: empties the prefix cache if there are no requests."""
        if await self.service.engine.async_flush_cache():
            return PlainTextResponse("Cache flushed.\n")
        raise RequestError("requests are running or waiting; expected none during a flush")

    async def freeze_gc(self, _: Request) -> Response:
        """GET or POST /freeze_gc: excludes all current objects from garbage collection."""
        freeze_heap()
        return PlainTextResponse("Garbage collection frozen.\n")


def _tokenize_fields(body: object) -> tuple[JsonObject, ChatCall | None]:
    values = read_body(
        body,
        read=frozenset({"prompt", "add_special_tokens", "model"}) | CHAT_PROMPT_FIELDS,
        neutral={"return_token_strs": (None, False)},
        hints={"text": "'prompt'"},
    )
    if values.get("messages") is not None:
        return values, parse_chat({n: values[n] for n in CHAT_PROMPT_FIELDS if n in values})
    prompt: Any = values.get("prompt")
    is_list = isinstance(prompt, list) and prompt != []
    if is_list:
        check_number_of_prompts("prompt", prompt)
    for text in prompt if is_list else [prompt]:
        check_text("prompt", text)
    return values, None


def _detokenize_fields(body: object) -> tuple[list[list[int]], bool, bool]:
    values = read_body(body, read=frozenset({"tokens", "skip_special_tokens", "model"}), neutral={})
    tokens: Any = values.get("tokens")
    is_list = isinstance(tokens, list) and tokens != [] and isinstance(tokens[0], list)
    rows = [check_list("tokens", row) for row in (tokens if is_list else [tokens])]
    skips = get_bool(values, "skip_special_tokens", default=True)
    return rows, is_list, skips


async def _awaited(making: asyncio.Future[Response]) -> Response:
    return await making

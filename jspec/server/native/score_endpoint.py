"""POST /v1/score, as in SGLang: the probability of each label as the token after query and item."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.server.http.exchange import read_call
from jspec.server.http.fields import (
    Neutral,
    check_number_of_prompts,
    check_text,
    get_bool,
    read_body,
)
from jspec.server.openai import answers
from jspec.server.service import Service
from jspec.text.scoring import ScoreCall, label_names

SCORE_FIELDS = frozenset(
    {"query", "items", "label_token_ids", "apply_softmax", "item_first", "model", "user"}
)
NEUTRAL_SCORE: Neutral = {"return_pooled_hidden_states": (None, False), "rid": (None,)}


def parse_score(body: object) -> tuple[ScoreCall, str | None]:
    """Return the call, and the model's name if given. Raises RequestError."""
    values = read_body(body, read=SCORE_FIELDS, neutral=NEUTRAL_SCORE)
    for name in ("model", "user"):
        if values.get(name) is not None:
            check_text(name, values[name])
    items: Any = values.get("items")
    if isinstance(items, list):
        check_number_of_prompts("items", items)
    for text in (values.get("query"), *(items if isinstance(items, list) else [items])):
        if isinstance(text, str):
            check_text("query and items", text)
    call = ScoreCall.of(
        values.get("query"),
        items,
        values.get("label_token_ids"),
        apply_softmax=get_bool(values, "apply_softmax"),
        item_first=get_bool(values, "item_first"),
    )
    return call, values.get("model")


class ScoreEndpoint:
    def __init__(self, service: Service) -> None:
        self.service = service

    def routes(self) -> list[Route]:
        return [Route("/v1/score", self.score, methods=["POST"])]

    async def score(self, request: Request) -> Response:
        """POST /v1/score: the probability of each label after query and item, in SGLang's form."""
        call, model = await read_call(request, self.service.args, parse_score)
        self.service.check_model(model)
        with label_names():
            work = await self.service.submit(call.as_prompts(), model=model)
        await work.finish(request.receive)
        found = work.completions
        for completion in found:
            if not completion.logprobs:  # it was aborted
                message = "the request was aborted before its scores were known"
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, message)
        first = [i // len(call.parts) for i in work.prompt_idxs]  # a prompt has several requests
        return JSONResponse(
            {
                "scores": call.scores([each.logprobs[0].watched for each in found]),
                "model": model or self.service.model_name,
                "usage": {**answers.usage_of(found, first)},
                "object": "scoring",
            }
        )

"""OpenAI's own client at a server around an engine that answers with given text."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import openai

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from tests.support.speaking_engine import SpeakingEngine

ASK = [{"role": "user", "content": "Weather?"}]


class Speaker:
    """One engine for OpenAI's client, without a socket."""

    def __init__(self, engine: SpeakingEngine, args: ServerArgs) -> None:
        self.engine = engine
        self._app = create_app(engine, args)

    def __call__(self, says: str, **body: Any) -> Any:
        """Return the answer to a chat in which the model writes `says`; chunks if it is
        streamed."""
        return self.run(
            says,
            "chat.completions",
            **{"messages": [{"role": "user", "content": "Weather?"}], **body},
        )

    def run(self, says: str, route: str, **body: Any) -> Any:
        self.engine.says = says

        async def ask() -> Any:
            transport = httpx.ASGITransport(app=self._app)
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(
                    base_url="http://test/v1",
                    api_key="-",
                    http_client=cast(Any, http),
                    max_retries=0,
                ) as client,
            ):
                resource: Any = client
                for name in route.split("."):
                    resource = getattr(resource, name)
                answer = await resource.create(model="default", **body)
                return [chunk async for chunk in answer] if body.get("stream") else answer

        return asyncio.run(ask())

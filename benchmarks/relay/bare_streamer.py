"""The upper bound: `uvicorn benchmarks.relay.bare_streamer:app`, which reads a body and streams constant chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.relay.steps import Steps, chunk, step_of

steps = Steps()


async def chat(request: Request) -> Response:
    body = json.loads(await request.body())
    step_s = step_of(body)

    async def tokens() -> AsyncIterator[bytes]:
        for position in range(body["max_tokens"]):
            if position:
                await steps.wait(step_s)
            yield chunk(position)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(tokens(), media_type="text/event-stream")


async def models(request: Request) -> Response:
    return PlainTextResponse("fake")


app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)])

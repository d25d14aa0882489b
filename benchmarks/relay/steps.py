"""The clock of an engine that is not there. Standard library only: it also runs in other servers' environments."""

from __future__ import annotations

import asyncio


class Steps:
    """All streams of one speed advance together, as in an engine's batch: one timer wakes them all."""

    def __init__(self) -> None:
        self._next: dict[float, asyncio.Future[None]] = {}
        self._due: dict[float, float] = {}

    async def wait(self, step_s: float) -> None:
        """Until the next step of this length; with 0 until the event loop has turned."""
        if step_s == 0:
            await asyncio.sleep(0)
            return
        future = self._next.get(step_s)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._next[step_s] = loop.create_future()
            # Steps that were missed are not made up for.
            due = self._due[step_s] = max(self._due.get(step_s, 0.0) + step_s, loop.time())
            loop.call_at(due, self._step, step_s)
        await asyncio.shield(future)  # one waiter's end is not the others'

    def _step(self, step_s: float) -> None:
        self._next.pop(step_s).set_result(None)


def step_of(body: dict[str, object]) -> float:
    """Seconds per token, as a request asks for them. vLLM's request type has a field for what engines understand."""
    arguments = body.get("vllm_xargs")
    step = arguments.get("step_s", 0) if isinstance(arguments, dict) else 0
    return float(step)


def chunk(position: int) -> bytes:
    """A token as an engine's own front end would write it."""
    return (
        b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"fake",'
        b'"choices":[{"index":0,"delta":{"content":" token%d"},"finish_reason":null}]}\n\n' % position
    )

"""The Responses API's memory: bodies that build on earlier responses, and responses that can be asked for again."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from urllib.parse import parse_qs

import msgspec

from deployments.response_store import ResponseStore, StoreError
from protocols import openai_responses
from protocols.codec import Call, Stamp
from protocols.errors import ErrorInfo, InternalError, InvalidRequest, NotFound, ServingError, Unavailable
from protocols.events import Event, Failed, Frame
from protocols.openai_responses import Recorder, ResponsesOptions, StoredResponse
from protocols.openai_shared import input_token_count
from protocols.request import Request
from protocols.sink import Sink, watched

logger = logging.getLogger(__name__)


Run = Callable[[Sink | None], AsyncGenerator[Frame, None]]
"""Begins a generation whose frames may go to that sink."""


class ResponseMemory:
    """Around the pure dialect: brings the stored responses that a body needs, and stores what a generation leaves."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def aclose(self) -> None:
        await self._store.aclose()

    # --- around a generation ---

    async def decode(self, body: bytes, request_id: str, owner: str) -> Call[ResponsesOptions]:
        """Raises `NotFound` where the body builds on a response that is not stored, or no longer."""
        draft = openai_responses.read(body)
        stored = await self._load(sorted(draft.references), owner)
        before = openai_responses.ancestors(draft, stored)
        stored |= await self._load([id for id in before if id not in stored], owner)
        return openai_responses.decode(draft, request_id, stored)

    async def recorded(
        self, call: Call[ResponsesOptions], stamp: Stamp, owner: str, run: Run, sink: Sink | None = None
    ) -> AsyncGenerator[Frame, None]:
        """The frames of `run`. Before the last of them the response is stored: the next request may come at once."""
        recorder = Recorder(call, stamp, owner) if call.options.store else None
        begun = False

        def note(frame: Frame) -> None:
            if recorder is not None:
                for event in frame.events:
                    recorder.feed(event)

        async with aclosing(run(watched(sink, note))) as frames:
            try:
                async for frame in frames:
                    if recorder is not None:
                        await self._record(recorder, frame.events)
                    begun = True
                    yield frame
            except Exception as error:
                # Whatever it is: a stream that has begun has told its id, and ends as a failed response. Others end as
                # an HTTP status.
                if recorder is not None and recorder.record is None and call.stream and begun:
                    await self._record(recorder, (Failed(_told(error)),))
                raise

    async def _record(self, recorder: Recorder, events: Sequence[Event]) -> None:
        for event in events:
            recorder.feed(event)
        record = recorder.record
        if record is None:
            return
        try:
            await self._store.put(record.id, record.encode())
        except StoreError as error:
            # The answer is there and is worth more than its copy.
            logger.warning("response %s is not stored: %s", record.id, error)

    async def _load(self, ids: Sequence[str], owner: str) -> dict[str, StoredResponse]:
        """Those of `ids` that there are for `owner`: those of others are as good as none."""
        try:
            found: Mapping[str, bytes] = await self._store.get(ids) if ids else {}
        except StoreError as error:
            raise _unavailable(error) from error
        stored: dict[str, StoredResponse] = {}
        for id, record in found.items():
            try:
                response = StoredResponse.decode(record)
            except msgspec.DecodeError as error:
                # Of another version, or not ours: as good as none.
                logger.warning("the record of response %s cannot be read: %s", id, error)
            else:
                if response.owner == owner:
                    stored[id] = response
        return stored

    async def input_tokens(
        self, body: bytes, request_id: str, owner: str, count_tokens: Callable[[Request], Awaitable[int]]
    ) -> bytes:
        """How many tokens a body's prompt has. `count_tokens` asks its model."""
        call = await self.decode(body, request_id, owner)
        tokens = await count_tokens(call.request)
        return input_token_count(tokens)

    # --- what is stored ---

    async def retrieve(self, id: str, owner: str, query: bytes) -> bytes:
        stored = await self._stored(id, owner)
        if _query(query).get("stream") == "true":
            raise InvalidRequest("Only a response made in the background can be streamed again.", param="stream")
        return bytes(stored.response)

    async def delete(self, id: str, owner: str) -> bytes:
        await self._stored(id, owner)
        try:
            deleted = await self._store.delete(id)
        except StoreError as error:
            raise _unavailable(error) from error
        if not deleted:
            raise _not_found(id)
        return msgspec.json.encode({"id": id, "object": "response", "deleted": True})

    async def input_items(self, id: str, owner: str, query: bytes) -> bytes:
        options = _query(query)
        stored = await self._stored(id, owner)
        return openai_responses.page(stored.input, options.get("after"), options.get("limit"), options.get("order"))

    async def cancel(self, id: str, owner: str) -> bytes:
        await self._stored(id, owner)
        raise InvalidRequest("Cannot cancel a synchronous response.")

    async def _stored(self, id: str, owner: str) -> StoredResponse:
        stored = (await self._load([id], owner)).get(id)
        if stored is None:
            raise _not_found(id)
        return stored


def _told(error: Exception) -> ErrorInfo:
    """What the client is told of `error`."""
    return error.info if isinstance(error, ServingError) else InternalError(InternalError.PUBLIC_MESSAGE).info


def _query(query: bytes) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(query.decode("latin-1"), keep_blank_values=True).items()}


def _not_found(id: str) -> NotFound:
    return NotFound(f"Response with id '{id}' not found.", param="response_id")


def _unavailable(error: StoreError) -> Unavailable:
    logger.warning("the store of responses: %s", error)
    return Unavailable("The store of responses cannot be reached. Try again shortly.", retry_after_s=1.0)

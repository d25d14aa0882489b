"""The endpoints of responses that are remembered."""

from __future__ import annotations

from deployments.http_answers import Endpoint, json_endpoint
from deployments.responses import ResponseMemory
from protocols.openai_responses import RESPONSE_PREFIX


def stored_response_endpoints(memory: ResponseMemory, path: str) -> dict[str, Endpoint] | None:
    """The methods of `/v1/responses/{id}` and of what is below it."""
    match path.removeprefix("/v1/responses/").split("/"):
        case [id] if id.startswith(RESPONSE_PREFIX):
            return {
                "GET": json_endpoint(lambda scope: memory.retrieve(id, scope["query_string"])),
                "DELETE": json_endpoint(lambda scope: memory.delete(id)),
            }
        case [id, "input_items"]:
            return {"GET": json_endpoint(lambda scope: memory.input_items(id, scope["query_string"]))}
        case [id, "cancel"]:
            return {"POST": json_endpoint(lambda scope: memory.cancel(id))}
        case _:
            return None

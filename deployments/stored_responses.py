"""The endpoints of responses that are remembered."""

from __future__ import annotations

from deployments import caller
from deployments.http_answers import Endpoint, json_endpoint
from deployments.responses import ResponseMemory
from protocols.openai_responses import RESPONSE_PREFIX


def stored_response_endpoints(memory: ResponseMemory, path: str) -> dict[str, Endpoint] | None:
    """The methods of `/v1/responses/{id}` and of what is below it."""
    match path.removeprefix("/v1/responses/").split("/"):
        case [id] if id.startswith(RESPONSE_PREFIX):
            return {
                "GET": json_endpoint(lambda scope: memory.retrieve(id, caller.owner(scope), scope["query_string"])),
                "DELETE": json_endpoint(lambda scope: memory.delete(id, caller.owner(scope))),
            }
        case [id, "input_items"]:
            return {
                "GET": json_endpoint(lambda scope: memory.input_items(id, caller.owner(scope), scope["query_string"]))
            }
        case [id, "cancel"]:
            return {"POST": json_endpoint(lambda scope: memory.cancel(id, caller.owner(scope)))}
        case _:
            return None

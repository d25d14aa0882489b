"""API version 2026-10-21: what it refuses, and older ones take.

Models that are served here need their sampling parameters, and the SDKs name this version whether or not their callers
know what it refuses. So it is refused only where an operator wants it.
"""

from __future__ import annotations

from typing import Final

from protocols.anthropic_messages.wire import Body, DocumentBlock, InMessage, TextBlock
from protocols.errors import InvalidRequest

STRICT_SINCE: Final = "2026-10-21"


def check_version(body: Body) -> None:
    """Raises `InvalidRequest` for the first thing that the version refuses."""
    for name in ("temperature", "top_p", "top_k"):
        if getattr(body, name) is not None:
            # "rejected even at default values"
            raise InvalidRequest(f"Invalid '{name}': API version {STRICT_SINCE} does not take it.", param=name)
    for i, message in enumerate(body.messages):
        _check_message(message, f"messages[{i}].content")


def _check_message(message: InMessage, path: str) -> None:
    """Blocks that stand in the message itself: those inside a tool's result are not meant."""
    blocks = message.content if isinstance(message.content, list) else ()
    for i, block in enumerate(blocks):
        if message.role == "assistant" and isinstance(block, DocumentBlock):
            raise InvalidRequest(
                f"Invalid '{path}[{i}].type': API version {STRICT_SINCE} takes no document from an assistant.",
                param=f"{path}[{i}].type",
            )
        if message.role == "user" and isinstance(block, TextBlock) and block.citations:
            raise InvalidRequest(
                f"Invalid '{path}[{i}].citations': API version {STRICT_SINCE} takes none in a user's text.",
                param=f"{path}[{i}].citations",
            )

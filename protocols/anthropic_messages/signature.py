"""Signatures of thinking blocks: opaque to clients, who send them back with the block.

A client that asked for thinking to be omitted sends back a block without text. The template needs that text again, and
what is cached begins with it, so the signature carries it. Foreign signatures are accepted, and mean nothing.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

_MADE_HERE = b"tokenyard/1:"
_CARRIES = b"tokenyard/1="


def signature(answer_id: str) -> str:
    """Of a block whose text is shown."""
    return b64encode(_MADE_HERE + answer_id.encode()).decode()


def carrying(thinking: str) -> str:
    """Of a block whose text is omitted."""
    return b64encode(_CARRIES + thinking.encode()).decode()


def carried(signature: str) -> str | None:
    """The text that `signature` carries, if it does."""
    try:
        data = b64decode(signature, validate=True)
        return data.removeprefix(_CARRIES).decode() if data.startswith(_CARRIES) else None
    except ValueError:  # not base64, or not text: somebody else's
        return None

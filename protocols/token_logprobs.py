"""Probabilities of tokens in the shape of OpenAI's newer dialects."""

from __future__ import annotations

import msgspec

from protocols.events import TokenLogprob


def token_text(data: bytes) -> str:
    """ "`token` text is cut to a valid UTF-8 prefix": a token may be less than a character, or end within one."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


LOWEST_LOGPROB = -3.4028234663852886e38
""" "ln(0) is reported as the lowest finite f32 (never null)" """


class OutTopLogprob(msgspec.Struct, frozen=True):
    token: str
    bytes: tuple[int, ...]
    logprob: float

    @classmethod
    def of(cls, item: TokenLogprob) -> OutTopLogprob:
        return cls(token_text(item.data), tuple(item.data), max(item.logprob, LOWEST_LOGPROB))


class OutTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top_logprobs: tuple[OutTopLogprob, ...]

    @classmethod
    def of(cls, item: TokenLogprob) -> OutTokenLogprob:
        own = OutTopLogprob.of(item)
        return cls(own.token, own.bytes, own.logprob, tuple(OutTopLogprob.of(other) for other in item.top))

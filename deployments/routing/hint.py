"""What routing knows of a request: computed once in the gateway; the handle call brings it to router and replica."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from deployments.routing.key import PrefixKey, bare_key


class RoutingHint(msgspec.Struct, frozen=True, array_like=True):
    """`call`: the number of the gateway's stream that wants to know which replica took it; 0: none does.

    `avoid`: replicas that were lost under this request. They may still be listed: Serve sees a death some seconds late.
    """

    key: PrefixKey
    call: int = 0
    avoid: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[[bytes], RoutingHint], tuple[bytes]]:
        return read_hint, (_encode(self),)


UNKNOWN = RoutingHint(bare_key(0))
"""Of a call that was made without one: it computes nothing."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RoutingHint)


def read_hint(data: bytes) -> RoutingHint:
    """Never raises: gateways and replicas are not updated in the same moment, and a hint is only a hint."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return UNKNOWN

"""What to ask of the next replica when one is lost under a request, and whether to ask at all. Pure: no I/O, no clock.

A request that has delivered nothing but its start is asked again as it is. Afterwards each choice that is not complete
is asked for on its own, to go on after the tokens that were delivered (`Request.resume`); the new replica feeds them
through its assembler in silence, so its first event is the one that would have come next.

Three bounds, each for another fault:

* `MAX_DEATHS` replicas that died after they had begun this request: it may be what kills them, and is refused. Those
  that were lost together with their node are not counted (`acquit`): no request ends a machine;
* `retries` losses of any kind in the middle of an answer, a replica that hands over because it stops included;
* `retries` losses in a row before a replica has begun. They come with pauses, which grow to `PAUSE_S[1]`: Serve takes
  some seconds to see that a replica is gone, and where there is no other one it is given the request again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NoReturn

import msgspec

from protocols.errors import BackendLost, InternalError, ReplicaStopping, ServingError, Unavailable
from protocols.events import Event, Finished, Frame, Progress, Started
from protocols.request import Request

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
PAUSE_S = (0.1, 2.0)
"""The first pause, and the longest."""

_TURNS = frozenset({Started, Progress, Finished})
"""The events that may be old news, or change what there is to ask for."""


def pause_after(attempt: int) -> float:
    """Seconds to wait before the next replica is tried, after `attempt` in a row were lost."""
    first, longest = PAUSE_S
    return float(min(first * 2 ** (attempt - 1), longest))


class Journey:
    """One request on its way through as many replicas as it takes. `observe` sees every frame before the client does.

    Frames of a later replica are those of one stream: what the client has had, above all a second `Started`, is left
    out. The order of events stays legal (`protocols.events.LEGAL`).
    """

    __slots__ = (
        "_answering", "_begun", "_died_on", "_finished", "_request", "_retries", "_started", "_tokens", "_vain", "moves"
    )  # fmt: skip

    def __init__(self, request: Request, retries: int) -> None:
        self._request = request
        self._retries = retries
        self._started = False
        self._tokens: list[list[int]] = [list(request.resume) for _ in range(request.n)]
        self._answering = [False] * request.n  # whether an event of the answer itself was delivered
        self._finished = [False] * request.n
        self._begun = False  # by the replica that has it now
        self._died_on: list[str] = []
        self._vain = 0
        self.moves = 0

    @property
    def complete(self) -> bool:
        return all(self._finished)

    @property
    def delivered(self) -> bool:
        """Whether the client has had anything of the answer, or tokens whose text is still held back."""
        return any(self._answering) or any(len(tokens) > len(self._request.resume) for tokens in self._tokens)

    def requests(self) -> Sequence[Request]:
        """What has to be asked for now: the request, or each of its choices that is not complete."""
        self._begun = False
        if not self.delivered:
            return (self._request,)
        return [
            msgspec.structs.replace(self._request, n=1, choice=self._request.choice + index, resume=tuple(tokens))
            for index, tokens in enumerate(self._tokens)
            if not self._finished[index]
        ]

    def observe(self, frame: Frame) -> Frame:
        """What the client is to get of `frame`, which may be nothing."""
        self._begun = True
        choice = frame.choice - self._request.choice
        self._tokens[choice] += frame.tokens
        events = frame.events
        if len(events) == 1 and type(events[0]) not in _TURNS:  # as nearly all are
            self._answering[choice] = True
            return frame
        news = tuple(event for event in events if self._is_news(event, choice))
        return frame if len(news) == len(events) else Frame(news, frame.tokens, frame.choice)

    def _is_news(self, event: Event, choice: int) -> bool:
        match event:
            case Started():
                started, self._started = self._started, True
                return not started
            case Progress():
                return not self._answering[choice]
            case Finished():
                self._finished[choice] = True
        self._answering[choice] = True
        return True

    @property
    def died_on(self) -> Sequence[str]:
        """The node of each replica that died, as far as is known of this request's doing; "" for one nobody knows."""
        return self._died_on

    @property
    def suspected(self) -> bool:
        return len(self._died_on) >= MAX_DEATHS

    def acquit(self, lost_nodes: Collection[str]) -> None:
        """These nodes are gone: what died there died with its node."""
        self._died_on = [node for node in self._died_on if node not in lost_nodes]

    def refuse(self) -> NoReturn:
        """Raises what a suspected request ends with."""
        logger.error(
            "request %s: %d replicas died while they ran it; it may be the cause, and is not tried again",
            self._request.id,
            len(self._died_on),
        )
        raise InternalError(InternalError.PUBLIC_MESSAGE)

    def lost(self, error: ServingError, node: str = "") -> float:
        """A replica on `node` was lost with `error`. Raises it, or says after how many seconds to go on.

        One that is `suspected` by then may not go on.

        `Unavailable` is what a replica says whose engine has failed: it is as good as lost.
        """
        if not isinstance(error, BackendLost | Unavailable):
            raise error
        if not self._begun:
            self._vain += 1
            if self._vain > self._retries:
                logger.error(
                    "request %s: %d replicas were lost before they began; giving up", self._request.id, self._vain
                )
                raise error
            return pause_after(self._vain)
        self._vain = 0
        self.moves += 1
        if not isinstance(error, ReplicaStopping):
            self._died_on.append(node)
        if self.moves > self._retries:
            logger.error("request %s: moved %d times; giving up", self._request.id, self._retries)
            raise error
        logger.warning("request %s: %s Going on elsewhere.", self._request.id, error.message)
        return 0.0

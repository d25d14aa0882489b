"""The legacy shape of probabilities: four parallel lists, tokens by their text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from protocols.events import TokenLogprob
from protocols.openai_completions.wire import OutLogprobs


class LegacyLogprobs:
    """Those of one choice, part by part: each token stands at the number of characters before it."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._offset = 0

    def take(self, items: Sequence[TokenLogprob]) -> OutLogprobs:
        out = OutLogprobs([], [], [], [])
        for item in items:
            text = _name(item)
            out.tokens.append(text)
            out.token_logprobs.append(item.logprob)
            # "there may be up to `logprobs+1` elements": the token itself is among them.
            top = {_name(other): other.logprob for other in reversed(item.top)}  # the likelier of two with one name
            out.top_logprobs.append({text: item.logprob, **top})
            out.text_offset.append(self._offset)
            self._offset += len(self._decode(item.data))
        return out


def _name(item: TokenLogprob) -> str:
    """The text of a token; of less than a character, its bytes, for in a map no two tokens may have one name."""
    try:
        return item.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in item.data)

"""Tokens that a lost replica has already generated, generated again: a logits processor inside vLLM's engine.

Mostly an answer is resumed by making its tokens a part of the prompt, which costs one prefill. But then vLLM takes them
for a prompt: a grammar would begin anew behind them, penalties would not count them, and a seeded draw would begin with
its first numbers. Where that matters they are forced instead, one a step: the request then is in every way where the
lost one was.
"""

from __future__ import annotations

from typing import Any

from backends.vllm.compat import LogitsProcessor, process_dict_updates

ARGUMENT = "tokenyard_replay"
"""The key of `SamplingParams.extra_args`: a list of tokens."""

PATH = f"{__name__}:Replay"


class Replay(LogitsProcessor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """For the engine's model runner V1."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}  # tokens to come, tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _entry)

    def apply(self, logits: Any) -> Any:
        done = []
        for row, (wanted, output) in self._rows.items():
            if len(output) >= len(wanted):
                done.append(row)
                continue
            logits[row] = float("-inf")
            logits[row, wanted[len(output)]] = 0.0
        for row in done:
            del self._rows[row]
        return logits


def _entry(params: Any, prompt: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    """`output` is the engine's own list, which grows."""
    wanted = (params.extra_args or {}).get(ARGUMENT)
    return (wanted, output) if wanted else None

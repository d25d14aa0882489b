"""Tokens that a lost replica has already generated, generated again: a logits processor inside vLLM's engine.

Mostly an answer is resumed by making its tokens a part of the prompt, which costs one prefill. But then vLLM takes them
for a prompt: a grammar would begin anew behind them, penalties would not count them, and a seeded draw would begin with
its first numbers. Where that matters they are forced instead, one a step: the request then is in every way where the
lost one was.
"""

from __future__ import annotations

from typing import Any

from backends.vllm.compat import GpuLogitsProcessor, LogitsProcessor, process_dict_updates

ARGUMENT = "tokenyard_replay"
"""The key of `SamplingParams.extra_args`: a list of tokens."""


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
            else:
                _force(logits, row, wanted[len(output)])
        for row in done:
            del self._rows[row]
        return logits


class GpuReplay(GpuLogitsProcessor):  # type: ignore[misc]  # as above
    """For the model runner V2, which vLLM has where Triton works: on GPUs."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_lengths = req_states.prompt_len.np  # by slot
        self._slots: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        wanted = _wanted(sampling_params)
        self._slots.pop(req_idx, None)  # of who had the slot before
        if wanted:
            self._slots[req_idx] = wanted
        return bool(wanted)

    def apply(self, logits: Any, ctx: Any) -> Any:
        """Without speculation a request has one row, in the order of the batch, and its length is exact."""
        if not self._slots:
            return logits
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            wanted = self._slots.get(slot)
            if wanted is None:
                continue
            output = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_lengths[slot])
            if output >= len(wanted):
                del self._slots[slot]
            else:
                _force(logits, row, wanted[output])
        return logits


PATHS = {False: f"{__name__}:{Replay.__name__}", True: f"{__name__}:{GpuReplay.__name__}"}
"""By whether the engine has the model runner V2."""


def _wanted(params: Any) -> list[int] | None:
    return (params.extra_args or {}).get(ARGUMENT)


def _entry(params: Any, prompt: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    """`output` is the engine's own list, which grows."""
    wanted = _wanted(params)
    return (wanted, output) if wanted else None


def _force(logits: Any, row: int, token: int) -> None:
    logits[row] = float("-inf")
    logits[row, token] = 0.0

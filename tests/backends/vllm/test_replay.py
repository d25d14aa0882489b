"""Tokens that are forced, one a step, in both of the forms that vLLM's model runners ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

VOCABULARY = 8


def params(*wanted: int) -> Any:
    from backends.vllm.replay import ARGUMENT

    return SimpleNamespace(extra_args={ARGUMENT: list(wanted)} if wanted else None)


def drawn(logits: Any) -> list[int]:
    return [int(token) for token in logits.argmax(-1)]


def zeros(rows: int) -> Any:
    """Whose likeliest token is 7."""
    import torch

    logits = torch.zeros(rows, VOCABULARY)
    logits[:, 7] = 1.0
    return logits


def test_on_a_cpu() -> None:
    from backends.vllm.replay import Replay

    replay = Replay(None, None, False)
    output: list[int] = []
    added = [(0, params(), [1], []), (1, params(3, 4), [1, 2], output)]
    replay.update_state(SimpleNamespace(added=added, removed=[], moved=[], batch_size=2))
    got = []
    for _ in range(3):
        replay.update_state(None)
        other, token = drawn(replay.apply(zeros(2)))
        assert other == 7, "nobody else is forced"
        output.append(token)
        got.append(token)
    assert got == [3, 4, 7]


def test_on_a_gpu() -> None:
    """Rows change from step to step, slots do not."""
    from backends.vllm.replay import GpuReplay

    lengths = np.array([1, 0, 2, 0], np.int32)
    replay = GpuReplay(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths)))
    assert not replay.add_request(0, params())
    assert replay.add_request(2, params(3, 4))
    got = []
    for step, rows in enumerate(([0, 2], [2, 0], [2])):
        seen = np.array([lengths[slot] + step for slot in rows])
        ctx = SimpleNamespace(idx_mapping_np=np.array(rows), seq_lens_upper_bound_np=seen)
        found = drawn(replay.apply(zeros(len(rows)), ctx))
        got.append(found[rows.index(2)])
        assert all(token == 7 for slot, token in zip(rows, found, strict=True) if slot == 0)
    assert got == [3, 4, 7]
    assert replay.add_request(2, params(5))
    assert not replay.add_request(2, params()), "whoever has the slot next"
    ctx = SimpleNamespace(idx_mapping_np=np.array([2]), seq_lens_upper_bound_np=np.array([2]))
    assert drawn(replay.apply(zeros(1), ctx)) == [7]

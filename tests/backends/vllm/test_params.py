"""From a request to vLLM's parameters: tables, and a refusal by name for what vLLM has not. Needs no vLLM."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.vllm.constraints import structured
from backends.vllm.params import (
    check_request,
    for_choice,
    needs_replay,
    sampling_arguments,
)
from backends.vocabulary import Tokens
from protocols.errors import InvalidRequest
from protocols.request import (
    GbnfConstraint,
    LogprobOptions,
    Request,
    Sampling,
    SlotOptions,
    TextBias,
    TextPrompt,
    TokenBias,
)


class Letters:
    """A token for each character."""

    vocab_size = 128
    adds_bos = False
    bos_text = ""
    end_tokens = frozenset({2, 3})
    suppressed_tokens: frozenset[int] = frozenset()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)

    def piece(self, token: int) -> bytes:
        return bytes((token,))

    def special_piece(self, token: int) -> bytes:
        return bytes((token,))


def arguments(defaults: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    request = msgspec.structs.replace(Request("r", "m", TextPrompt("x")), **fields)
    return sampling_arguments(request, Letters(), defaults or {}, structured(request.constraint))


STOPS = {"stop_token_ids": [2, 3]}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {}),
        (
            Sampling(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1),
            dict(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1),
        ),
        (Sampling(top_k=-1, top_p=0.0, min_p=2.0), dict(top_k=0, top_p=1e-6, min_p=1.0)),
        (Sampling(repeat_penalty=1.1), dict(repetition_penalty=1.1)),
        (Sampling(presence_penalty=-1.0, frequency_penalty=2.0), dict(presence_penalty=-1.0, frequency_penalty=2.0)),
        (Sampling(repeat_penalty=1.1, repeat_last_n=-1), dict(repetition_penalty=1.1)),
        (
            Sampling(repeat_penalty=1.1, presence_penalty=1.0, repeat_last_n=0),
            dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
        ),
        (Sampling(repeat_last_n=64), {}),
        (Sampling(seed=7), dict(seed=7)),
        (Sampling(seed=-1), {}),
        (Sampling(seed=0xFFFFFFFF), {}),
        (Sampling(logit_bias=(TokenBias(5, 1.0), TextBias("A", -math.inf))), dict(logit_bias={5: 1.0, 65: -math.inf})),
        # asks for nothing
        (Sampling(mirostat=0, mirostat_tau=3.0, dry_multiplier=0.0, dry_base=2.0, typical_p=1.0, min_keep=1), {}),
        (Sampling(xtc_probability=0.0, xtc_threshold=0.5, top_n_sigma=-1.0, dynatemp_range=0.0), {}),
    ],
)
def test_what_vllm_is_told(sampling: Sampling, expected: dict[str, Any]) -> None:
    assert arguments(sampling=sampling) == expected | STOPS


def test_every_parameter_is_in_a_table() -> None:
    """A new one cannot be forgotten: each is either told, refused, or read over."""
    samples: dict[str, Any] = {
        "samplers": ("top_k",),
        "logit_bias": (TokenBias(1, 1.0),),
        "dry_sequence_breakers": ("a",),
    }
    for field in msgspec.structs.fields(Sampling):
        try:
            arguments(sampling=Sampling(**{field.name: samples.get(field.name, 1)}))
        except InvalidRequest as refusal:
            assert refusal.param == field.name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("repeat_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("dynatemp_range", 0.5),
        ("typical_p", 0.5),
        ("top_n_sigma", 1.0),
        ("xtc_probability", 0.1),
        ("adaptive_target", 0.5),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("min_keep", 3),
        ("samplers", ("top_k",)),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        arguments(sampling=Sampling(**{field: value}))
    assert refusal.value.param == field
    assert refusal.value.status == 400


def test_a_window_of_penalties_is_refused_where_there_are_penalties() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        arguments(sampling=Sampling(frequency_penalty=0.5, repeat_last_n=64))
    assert refusal.value.param == "repeat_last_n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2, "resume": (1,)}, "n"),
        ({"stop_indent": -1}, "stop_indent"),
        ({"max_predict_ms": math.nan}, "max_predict_ms"),
        ({"slot": SlotOptions(id=0)}, "id_slot"),
        ({"slot": SlotOptions(shift=True)}, "context_shift"),
        ({"logprobs": LogprobOptions(21)}, "logprobs"),
        ({"logprobs": LogprobOptions(1, after_sampling=True)}, "post_sampling_probs"),
    ],
)
def test_requests_that_cannot_be_run(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_request(msgspec.structs.replace(Request("r", "m", TextPrompt("x")), **fields), max_logprobs=20)
    assert refusal.value.param == param


def test_the_checkpoints_defaults_hold_where_a_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert arguments(defaults, sampling=Sampling(top_k=5)) == {"temperature": 0.6, "top_k": 5} | STOPS


def test_an_answer_that_does_not_end_has_no_end_tokens() -> None:
    assert arguments(ignore_eos=True) == {"ignore_eos": True, "logit_bias": {2: -math.inf, 3: -math.inf}}


def test_a_prompt_may_be_computed_whole() -> None:
    assert arguments(slot=SlotOptions(reuse=False)) == {"skip_reading_prefix_cache": True} | STOPS


def test_choices_draw_numbers_of_their_own() -> None:
    seeded = arguments(sampling=Sampling(seed=7))
    assert [for_choice(seeded, choice)["seed"] for choice in range(3)] == [7, 8, 9]
    assert for_choice(arguments(), 2) == STOPS


@pytest.mark.parametrize(
    ("fields", "replays"),
    [
        ({}, False),
        ({"sampling": Sampling(temperature=0.0, seed=1)}, False),
        ({"sampling": Sampling(temperature=0.5, seed=1)}, True),
        ({"sampling": Sampling(presence_penalty=0.5)}, True),
        ({"constraint": GbnfConstraint('root ::= "a"')}, True),
    ],
)
def test_an_answer_is_replayed_where_its_own_tokens_count_otherwise(fields: dict[str, Any], replays: bool) -> None:
    assert needs_replay(arguments(**fields)) == replays

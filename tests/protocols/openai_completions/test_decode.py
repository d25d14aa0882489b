"""Completion bodies: what is accepted and as what, and that every fault is an `InvalidRequest` naming its path."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.codec import Call
from protocols.errors import InvalidRequest
from protocols.openai_completions import CODEC, CompletionOptions
from protocols.request import (
    Extras,
    GbnfConstraint,
    InfillPrompt,
    LogprobOptions,
    Request,
    Sampling,
    TextPrompt,
    TokenBias,
    TokenPrompt,
)


def decode(prompt: Any = "Hi", **fields: Any) -> Call[CompletionOptions]:
    return CODEC.decode(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), "r1")


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(**fields)
    return caught.value


def test_minimal() -> None:
    call = decode()
    assert call.request == Request("r1", "m", TextPrompt("Hi"), max_tokens=16)
    assert call.options == CompletionOptions(include_usage=False)
    assert call.stream is False


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [TextPrompt("")]),
        (["a"], [TextPrompt("a")]),
        (["a", ""], [TextPrompt("a"), TextPrompt("")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert [request.prompt for request in decode(prompt).requests] == prompts


def test_several_prompts_are_requests_that_differ_in_nothing_else() -> None:
    first, second = decode(["a", "b"], n=2, temperature=0).requests
    assert (first.id, second.id) == ("r1-0", "r1-1")
    assert msgspec.structs.replace(second, id=first.id, prompt=first.prompt) == first
    assert first.n == 2


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 16), ({"max_tokens": 0}, 0), ({"max_tokens": 5, "n_predict": 7}, 7), ({"n_predict": -1}, None)],
)
def test_the_limit_is_16_unless_there_is_one(fields: dict[str, Any], limit: int | None) -> None:
    assert decode(**fields).request.max_tokens == limit


def test_everything() -> None:
    call = decode(
        stream=True,
        stream_options={"include_usage": True},
        return_progress=True,
        n=2,
        best_of=2,
        logprobs=3,
        stop=["x", ""],
        seed=5,
        temperature=1,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        top_k=3,
        grammar="root ::= x",
        user="u",
        from_2030=[1],
    )
    assert call.stream
    assert call.options == CompletionOptions(include_usage=True)
    assert call.request == Request(
        "r1",
        "m",
        TextPrompt("Hi"),
        sampling=Sampling(
            seed=5,
            temperature=1.0,
            top_p=0.5,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            top_k=3,
            logit_bias=(TokenBias(5, -100.0),),
        ),
        max_tokens=16,
        stop=("x",),
        n=2,
        constraint=GbnfConstraint("root ::= x"),
        logprobs=LogprobOptions(3),
        extras=Extras(progress=True),
    )


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(["suffix", "echo", "best_of", "logprobs", "max_tokens", "n", "stop", "stream_options"])
    assert decode(**nulls) == decode()


def test_logprobs_of_no_alternatives_are_asked_for_with_0() -> None:
    assert decode(logprobs=0).request.logprobs == LogprobOptions(0)


def test_suffix() -> None:
    assert decode("def f():", suffix="return x").request.prompt == InfillPrompt("def f():", "return x")
    assert decode("a", suffix="") == decode("a")
    assert [r.prompt for r in decode(["a", "b"], suffix="c").requests] == [
        InfillPrompt("a", "c"),
        InfillPrompt("b", "c"),
    ]


def test_echo() -> None:
    assert decode("a", echo=True).options.echo == ("a",)
    assert decode(["a", "b"], echo=True).options.echo == ("a", "b")
    assert decode([1, 2], echo=False).options.echo == ()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "Missing"),
        ({"prompt": 5}, "prompt", "expected a string or a list, got 5"),
        ({"prompt": {}}, "prompt", "expected a string or a list, got an object"),
        ({"prompt": []}, "prompt", "at least 1 item(s)"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1 item(s)"),
        ({"prompt": [None]}, "prompt[0]", "a string, a token id or a list of token ids, got null"),
        ({"prompt": [True]}, "prompt[0]", "got true"),
        ({"prompt": [1.5]}, "prompt[0]", "got 1.5"),
        ({"prompt": ["a", 1]}, "prompt[1]", "a string, as the first item is, got 1"),
        ({"prompt": [1, "a"]}, "prompt[1]", "a token id, got a string"),
        ({"prompt": [1, -1]}, "prompt[1]", "a token id, got -1"),
        ({"prompt": [1, 2**31]}, "prompt[1]", "a token id"),
        ({"prompt": [[1], 2]}, "prompt[1]", "a list of token ids, as the first item is, got 2"),
        ({"prompt": [[1], [2, False]]}, "prompt[1][1]", "a token id, got false"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 items"),
        ({"prompt": ["a"] * 100, "n": 11}, "prompt", "more than 1024 answers"),
        ({"model": None}, "model", "expected a string"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"best_of": 1, "n": 2}, "best_of", "not supported"),
        ({"logprobs": True}, "logprobs", "expected an integer, got true"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"max_tokens": -1}, "max_tokens", "at least 0"),
        ({"temperature": 2.1}, "temperature", "at most 2"),
        ({"echo": True, "prompt": [1]}, "echo", "this one is token ids"),
        ({"echo": True, "logprobs": 1}, "echo", "exclude each other"),
        ({"suffix": "x", "prompt": [1]}, "suffix", "this one is token ids"),
        ({"suffix": 5}, "suffix", "expected a string"),
        ({"stop": 5}, "stop", "expected a string or a list"),
    ],
)
def test_wrong_values(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in error.message
    assert words in error.message


def test_the_prompt_is_not_in_the_message() -> None:
    assert "secret" not in refused(prompt=[1, "top secret"]).message


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "m", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["5", "x"]), inner, max_size=3),
    max_leaves=8,
)
_KEYS = ["model", "prompt", "suffix", "echo", "best_of", "n", "logprobs", "max_tokens", "stop", "logit_bias", "stream"]


@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=5))
def test_any_value_is_a_call_or_refused(fields: dict[str, Any]) -> None:
    try:
        call = decode(**fields)
    except InvalidRequest as error:
        assert error.message
        json.loads(CODEC.error(error))
    else:
        assert call.requests
        for request in call.requests:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request

"""Bodies in: every shape of prompt, what is refused and where, and the questions of the one-answer routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.calls import (
    ApplyTemplate,
    Detokenize,
    EmbeddingRequest,
    EraseSlot,
    RerankRequest,
    RestoreSlot,
    SaveSlot,
    SetAdapters,
    Tokenize,
)
from protocols.errors import InvalidRequest
from protocols.llamacpp_native import COMPLETION, INFILL, questions
from protocols.request import (
    Extras,
    InfillFile,
    InfillPrompt,
    LogprobOptions,
    LoraScale,
    MixedPrompt,
    Request,
    SlotOptions,
    TextPrompt,
    TokenPrompt,
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def requests(**body: Any) -> tuple[Request, ...]:
    return COMPLETION.decode(encoded(body), "r1").requests


def one(**body: Any) -> Request:
    (request,) = requests(**{"prompt": "a"} | body)
    return request


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        ("", [TextPrompt("")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([1, "a", 2], [MixedPrompt((1, "a", 2))]),
        (["a", 1], [MixedPrompt(("a", 1))]),
        (["a"], [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        (["a", [1, 2]], [TextPrompt("a"), TokenPrompt((1, 2))]),
        ([[1], ["a", 2]], [TokenPrompt((1,)), MixedPrompt(("a", 2))]),
        ({"prompt_string": "a"}, [TextPrompt("a")]),
        ([[1], {"prompt_string": "a", "multimodal_data": []}], [TokenPrompt((1,)), TextPrompt("a")]),
    ],
)
def test_every_shape_of_prompt(prompt: Any, expected: list[Any]) -> None:
    assert [request.prompt for request in requests(prompt=prompt)] == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", True], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 2**31], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ({"prompt_string": 5}, "prompt.prompt_string"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "prompt.multimodal_data"),
        ({"content": []}, "prompt"),
        (["a"] * 2049, "prompt"),
    ],
)
def test_a_prompt_that_is_none_is_refused_where_it_is_wrong(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests(prompt=prompt)
    assert caught.value.param == param


def test_too_many_answers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2048 answers"):
        requests(prompt=["a"] * 1025, n=2)


def test_each_of_several_prompts_is_a_request_of_its_own() -> None:
    first, second = requests(prompt=["a", "b"], n_predict=3, n=2)
    assert (first.id, second.id) == ("r1-0", "r1-1")
    assert (first.max_tokens, second.max_tokens, first.n, second.n) == (3, 3, 2, 2)


def test_no_model_is_left_open() -> None:
    assert one().model == ""
    assert one(model="m").model == "m"


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"n_predict": -1}, None), ({"n_predict": 0}, 1)])
def test_a_limit_of_no_tokens_still_yields_one(given: dict[str, int], expected: int | None) -> None:
    assert one(**given).max_tokens == expected


def test_logprobs_is_another_name_of_n_probs() -> None:
    assert one(logprobs=3).logprobs == LogprobOptions(3)
    assert one(logprobs=3, n_probs=2, post_sampling_probs=True).logprobs == LogprobOptions(2, True)


def test_what_the_answer_shows_is_asked_for() -> None:
    assert one().extras == Extras(echo=True)
    assert one(return_progress=True, timings_per_token=True).extras == Extras(True, True, True)
    assert one(id_slot=3, cache_prompt=False).slot == SlotOptions(3, reuse=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_predict", "5"), ("response_fields", "content"), ("return_tokens", 1), ("stream", "yes"), ("temperature", [])],
)
def test_a_parameter_of_the_wrong_type_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one(**{field: value})
    assert caught.value.param == field


# --- infill ------------------------------------------------------------

GAP = {"input_prefix": "a", "input_suffix": "b"}


def test_a_gap_is_an_infill_prompt() -> None:
    files = [{"filename": "f", "text": "x"}, {"text": "y"}]
    (request,) = INFILL.decode(encoded({**GAP, "prompt": "c", "input_extra": files}), "r1").requests
    assert request.prompt == InfillPrompt("a", "b", "c", (InfillFile("f", "x"), InfillFile("tmp", "y")))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_suffix": "a"}, "input_prefix"),
        ({**GAP, "prompt": 5}, "prompt"),
        ({**GAP, "input_extra": {}}, "input_extra"),
        *(({**GAP, "input_extra": [extra]}, "input_extra[0].text") for extra in ({}, {"filename": "ok"})),
        ({**GAP, "input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename"),
    ],
)
def test_a_gap_that_is_none_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        INFILL.decode(encoded(body), "r1")
    assert caught.value.param == param


# --- questions ------------------------------------------------------------


def test_tokens_of_a_text() -> None:
    asked = questions.tokenize(encoded({"content": "a", "add_special": True, "model": "m"}), "r1").question
    assert asked == Tokenize("r1", "m", ("a",), add_special=True, parse_special=True)
    assert questions.tokenize(b"{}", "r1").question == Tokenize("r1", "", ("",))


@pytest.mark.parametrize("content", [["a", 1, "b"], [1, 2], ["a", "b"]])
def test_tokens_of_a_mixture(content: list[Any]) -> None:
    """A list of strings is one text in pieces here."""
    assert questions.tokenize(encoded({"content": content}), "r1").question == Tokenize("r1", "", tuple(content))


@pytest.mark.parametrize(
    ("content", "param"), [(5, "content"), ([], "content"), (["a", True], "content[1]"), ([1, -1], "content[1]")]
)
def test_what_cannot_be_tokenised_is_named(content: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        questions.tokenize(encoded({"content": content}), "r1")
    assert caught.value.param == param


def test_text_of_tokens() -> None:
    assert questions.detokenize(encoded({"tokens": [1, 2]}), "r1").question == Detokenize("r1", "", (1, 2))
    with pytest.raises(InvalidRequest) as caught:
        questions.detokenize(encoded({"tokens": [1, "a"]}), "r1")
    assert caught.value.param == "tokens[1]"


def test_a_template_is_applied_to_a_chat_body_without_a_model() -> None:
    asked = questions.apply_template(encoded({"messages": [{"role": "user", "content": "Hi"}]}), "r1").question
    assert isinstance(asked, ApplyTemplate)
    assert (asked.model, asked.prompt.messages[0].text) == ("", "Hi")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", (TextPrompt("a"),)),
        ([1, "a"], (MixedPrompt((1, "a")),)),
        (["a", [1]], (TextPrompt("a"), TokenPrompt((1,)))),
        (
            {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]},
            (TextPrompt("hello world"),),
        ),
    ],
)
def test_inputs_of_embeddings(value: Any, expected: tuple[Any, ...]) -> None:
    asked = questions.openai_embeddings(encoded({"input": value}), "r1").question
    assert asked == EmbeddingRequest("r1", "", expected, pooled=True)
    assert questions.embeddings(encoded({"content": value}), "r1").question == EmbeddingRequest("r1", "", expected)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": True}, "input"),
        ({"input": {"content": "string"}}, "input.content"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input.content[0]"),
        ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "embd_normalize": -2}, "embd_normalize"),
    ],
)
def test_inputs_that_are_none_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        questions.openai_embeddings(encoded(body), "r1")
    assert caught.value.param == param


def test_documents_to_rank() -> None:
    for name in ("documents", "texts"):
        asked = questions.rerank(encoded({"query": "q", name: ["a", "b"]}), "r1").question
        assert asked == RerankRequest("r1", "", "q", ("a", "b"))


@pytest.mark.parametrize("documents", [[], None, 123, [1, 2, 3]])
def test_documents_that_are_none_are_refused(documents: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        questions.rerank(encoded({"query": "q", "documents": documents}), "r1")
    assert str(caught.value.param).startswith("documents")


def test_what_is_done_to_slots() -> None:
    name = encoded({"filename": "f"})
    assert questions.slot_action("1", "save")(name, "r1").question == SaveSlot("r1", "", 1, "f")
    assert questions.slot_action("1", "restore")(name, "r1").question == RestoreSlot("r1", "", 1, "f")
    assert questions.slot_action("1", "erase")(b"", "r1").question == EraseSlot("r1", "", 1)


@pytest.mark.parametrize(
    ("slot", "action", "body", "param"),
    [
        ("x", "save", b"{}", "id_slot"),
        ("-1", "save", b"{}", "id_slot"),
        ("1" * 12, "save", b"{}", "id_slot"),
        ("1", "", b"{}", "action"),
        ("1", "copy", b"{}", "action"),
        ("1", "save", b"{}", "filename"),
        ("1", "restore", b'{"filename": ""}', "filename"),
    ],
)
def test_what_cannot_be_done_to_slots(slot: str, action: str, body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        questions.slot_action(slot, action)(body, "r1")
    assert caught.value.param == param


def test_scales_of_adapters_are_a_list() -> None:
    asked = questions.set_adapters(encoded([{"id": 0, "scale": 0.5}, {"id": 1}]), "r1").question
    assert asked == SetAdapters("r1", "", (LoraScale(0, 0.5), LoraScale(1, 0.0)))
    for body, param in (({}, "adapters"), ([{"id": "x"}], "adapters[0].id")):
        with pytest.raises(InvalidRequest) as caught:
            questions.set_adapters(encoded(body), "r1")
        assert caught.value.param == param

"""Text and tokens: what a prompt becomes, and the calls that show it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import Tokens
from backends.llamacpp.settings import LlamaCppSettings
from backends.prompts import Tokenizer
from protocols.errors import InvalidRequest, NotSupported
from protocols.request import ChatPrompt, InfillPrompt, Message, TextPart, TextPrompt, Tool, ToolCall
from tests.backends.contract import chat
from tests.backends.llamacpp.helpers import greedy, started
from tests.protocols.captures import Recorded, turns

if TYPE_CHECKING:
    from backends.chat_template import ChatTemplates
    from backends.llamacpp.bindings import Model

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=1, context_length=512))
    await backend.start()
    yield backend
    await backend.aclose()


async def test_the_beginning_of_text_is_not_doubled() -> None:
    calls: list[tuple[str, bool]] = []

    def tokenize(text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        calls.append((text, add_special))
        return np.array([1], np.int32)

    model = cast("Model", SimpleNamespace(bos_text="<s>", adds_bos=True, tokenize=tokenize))
    tokenizer = Tokenizer(model, cast("ChatTemplates", None))
    for text in ("<s>Hello", "Hello"):
        tokenizer.prepare(greedy(TextPrompt(text)))
    assert calls == [("<s>Hello", False), ("Hello", True)]


@pytest.mark.parametrize(
    "text", ["", "Hello, world", "zwölf Boxkämpfer 🥊 jagen", "<|im_start|>user\nhi<|im_end|>", "x " * 9000]
)
async def test_pieces_are_the_text(backend: LlamaCppBackend, text: str) -> None:
    pieces = await backend.tokenize(text)
    assert b"".join(piece.data for piece in pieces).decode() == text
    assert await backend.detokenize([piece.token for piece in pieces]) == text


async def test_control_tokens_are_parsed_when_asked(backend: LlamaCppBackend) -> None:
    (parsed,) = await backend.tokenize("<|im_end|>")
    plain = await backend.tokenize("<|im_end|>", parse_special=False)
    assert parsed.data == b"<|im_end|>"
    assert len(plain) > 1
    assert parsed.token not in [piece.token for piece in plain]


async def test_pieces_of_text_among_tokens(backend: LlamaCppBackend) -> None:
    first, second = [[piece.token for piece in await backend.tokenize(text)] for text in ("Once", " upon")]
    mixed = await backend.tokenize("Once", *second, " upon")
    assert [piece.token for piece in mixed] == first + second + second
    with pytest.raises(InvalidRequest, match="no token 1000000") as caught:
        await backend.tokenize("a", 10**6)
    assert caught.value.param == "content"


async def test_detokenize_refuses_what_is_no_token(backend: LlamaCppBackend) -> None:
    for tokens in ([1, -1], [10**6]):
        with pytest.raises(InvalidRequest, match=f"no token {tokens[-1]}") as caught:
            await backend.detokenize(tokens)
        assert caught.value.param == "tokens"
    assert await backend.detokenize([]) == ""


async def test_the_template_gives_what_is_counted(backend: LlamaCppBackend) -> None:
    prompt = chat("What is a fox?")
    text = await backend.apply_template(prompt)
    assert "<|im_start|>user\nWhat is a fox?<|im_end|>" in text
    assert len(await backend.tokenize(text)) == await backend.count_tokens(greedy(prompt))


async def test_a_template_of_the_settings_goes_before_the_files(demo_model: str) -> None:
    async with started(demo_model, chat_template="{{ messages[0].content }}, it says") as backend:
        assert await backend.apply_template(chat("Hello")) == "Hello, it says"
        assert backend.card().chat_template == "{{ messages[0].content }}, it says"


async def test_tools_and_results_under_a_template_without_them(backend: LlamaCppBackend) -> None:
    tool = Tool("get_weather", "Tells the weather.", {"type": "object", "properties": {}})
    call = Message("assistant", tool_calls=(ToolCall("call_1", "get_weather", "{}"),))
    turns = (*chat("How is it?").messages, call, Message("tool", (TextPart("20 C"),), tool_call_id="call_1"))
    first, second = [await backend.apply_template(ChatPrompt(turns[:end], (tool,))) for end in (1, 3)]
    assert first.startswith("<|im_start|>system\n# Tools")
    assert second.startswith(first)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call><|im_end|>' in second
    assert "20 C" in second


async def test_an_answer_is_continued(backend: LlamaCppBackend) -> None:
    turns = (*chat("How is it?").messages, Message("assistant", (TextPart("It is "),)))
    text = await backend.apply_template(ChatPrompt(turns, continues=True))
    assert text.endswith("<|im_start|>assistant\nIt is ")


async def test_a_model_without_gap_tokens_says_so(backend: LlamaCppBackend) -> None:
    with pytest.raises(NotSupported, match="cannot fill gaps"):
        await backend.count_tokens(greedy(InfillPrompt("a", "b")))


@pytest.mark.parametrize(("before", "after"), turns(), ids=lambda request: str(request))
async def test_B14_the_tokens_of_a_turn_begin_with_those_of_the_one_before(
    backend: LlamaCppBackend, before: Recorded, after: Recorded
) -> None:
    first, second = before.prompt, after.prompt
    second = msgspec.structs.replace(second, tools=first.tools)  # a tool that was searched for changes the head, once
    texts = [await backend.apply_template(prompt) for prompt in (first, second)]
    ids = [[piece.token for piece in await backend.tokenize(text)] for text in texts]
    assert len(ids[1]) > len(ids[0]) > 1000
    assert ids[1][: len(ids[0])] == ids[0]

"""Every parameter of a generation on a real model: that it does something, and what it refuses."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import InvalidRequest
from protocols.request import (
    GbnfConstraint,
    GrammarTrigger,
    JsonSchemaConstraint,
    LogitBias,
    LogprobOptions,
    LoraScale,
    Request,
    Sampling,
    SlotOptions,
    TextBias,
    TextPrompt,
    TokenBias,
)
from tests.backends.contract import Answer, answer, until

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import Model
from backends.logit_bias import merged_biases
from tests.backends.llamacpp.helpers import greedy, parts

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 4
FUZZ_SECONDS = 60
PROMPT = "Tell me about the sea."
POEM = TextPrompt(
    "Roses are red, violets are blue. Roses are red, violets are blue. Roses are red, violets are blue. Roses"
)
CODE = TextPrompt("def add(a, b):\n    c = a + b\n    return c\n\ndef sub(a, b):\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    # With flash attention a token has the same logits alone and among others, so answers repeat.
    settings = LlamaCppSettings(
        model=demo_model, slots=SLOTS, context_length=512, prefix_sharing=False, flash_attention="on"
    )
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await until(backend, running=0)
    await backend.check_health()
    await backend.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def vocabulary(backend: LlamaCppBackend) -> Model:
    assert backend._loaded is not None
    return backend._loaded.model


async def tokens_of(
    backend: LlamaCppBackend, max_tokens: int = 14, prompt: Any = PROMPT, **sampling: Any
) -> tuple[int, ...]:
    request = greedy(prompt, max_tokens, sampling=Sampling(**({"temperature": 0.0} | sampling)))
    return (await answer(backend, request)).tokens


# --- what each does ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_n_sigma": 1e-3},
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": 0.0, "mirostat": 1},
        {"temperature": 0.0, "mirostat": 2},
        {"temperature": 0.0, "samplers": ("temperature", "top_k")},
        {"temperature": 0.0, "dynatemp_range": 0.5},
    ],
    ids=str,
)
async def test_these_are_all_greedy(backend: LlamaCppBackend, plain: tuple[int, ...], sampling: dict[str, Any]) -> None:
    assert await tokens_of(backend, **sampling, seed=5) == plain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hot(backend: LlamaCppBackend) -> tuple[int, ...]:
    return await tokens_of(backend, **HOT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(backend: LlamaCppBackend) -> tuple[int, ...]:
    return await tokens_of(backend)


HOT: dict[str, Any] = {"temperature": 1.5, "seed": 7, "min_p": 0.0, "top_p": 1.0, "top_k": 0}


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 8},
        {"temperature": 1.0},
        {"dynatemp_range": 1.2},
        {"dynatemp_range": 1.2, "dynatemp_exponent": 3.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"min_p": 0.3, "min_keep": 20},
        {"typical_p": 0.3},
        {"top_n_sigma": 1.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"mirostat": 1},
        {"mirostat": 2},
        {"mirostat": 2, "mirostat_tau": 1.0},
        {"mirostat": 2, "mirostat_eta": 0.9},
        {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.3},
        {"samplers": ("adaptive_p",), "adaptive_target": 0.3, "adaptive_decay": 0.1},
        {"samplers": ("top_k", "infill"), "top_k": 40},
        {"samplers": ("infill",)},
        {"samplers": ("m", "t"), "min_p": 0.1},
        {"samplers": ("t", "m"), "min_p": 0.1},
        {"samplers": ()},
        {"repeat_penalty": 1.5},
        {"repeat_penalty": 1.5, "repeat_last_n": 4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"dry_multiplier": 5.0, "dry_allowed_length": 0},
        {"dry_multiplier": 5.0, "dry_base": 3.0, "dry_penalty_last_n": 0, "seed": 9},
        {"logit_bias": (TextBias(" the", -100.0),)},
    ],
    ids=str,
)
async def test_each_changes_what_is_drawn_and_repeats_with_its_seed(
    backend: LlamaCppBackend, hot: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    changed = await tokens_of(backend, **(HOT | sampling))
    assert changed == await tokens_of(backend, **(HOT | sampling))
    assert changed != hot


async def test_random_seeds_differ(backend: LlamaCppBackend) -> None:
    for seed in (None, -1, 0xFFFFFFFF):
        runs = {await tokens_of(backend, **(HOT | {"seed": seed})) for _ in range(3)}
        assert len(runs) > 1, seed


@pytest.mark.parametrize(
    "sampling",
    [
        {"repeat_penalty": 2.0},
        {"presence_penalty": 20.0},
        {"frequency_penalty": 20.0},
        {"dry_multiplier": 5.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    ],
    ids=str,
)
async def test_repetition_ends(backend: LlamaCppBackend, sampling: dict[str, Any]) -> None:
    """The prompt says the same thing three times: only a penalty makes the model say another."""
    plain = await tokens_of(backend, 10, POEM)
    assert await tokens_of(backend, 10, POEM, **sampling) != plain
    off = sampling | {"repeat_last_n": 0, "dry_penalty_last_n": 0, "xtc_threshold": 0.6}
    assert await tokens_of(backend, 10, POEM, **off) == plain


# --- logit_bias, ignore_eos -------------------------------------------------------------------------------------------


async def test_a_bias_bans_and_forces(backend: LlamaCppBackend, vocabulary: Model) -> None:
    first = (await tokens_of(backend))[0]
    banned = await tokens_of(backend, logit_bias=(TokenBias(first, -math.inf),))
    assert first not in banned
    forced = await tokens_of(backend, 6, logit_bias=(TokenBias(1234, 100.0),))
    assert set(forced) == {1234}
    seas = vocabulary.tokenize(" sea waves", add_special=False, parse_special=False).tolist()
    assert len(seas) == 2
    unlikely = await tokens_of(backend, 40, logit_bias=(TextBias(" sea waves", -math.inf),))
    assert not set(seas) & set(unlikely)


async def test_biases_merge(vocabulary: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def merged(*given: LogitBias, ignore_eos: bool = False) -> dict[int, float]:
        return dict(merged_biases(vocabulary, given, ignore_eos=ignore_eos))

    sea, waves = vocabulary.tokenize(" sea waves", add_special=False, parse_special=False).tolist()
    assert merged(TokenBias(5, 1.0), TokenBias(5, 2.0), TokenBias(6, -1.0)) == {5: 3.0, 6: -1.0}
    assert merged(TokenBias(5, -math.inf), TokenBias(5, 2.0)) == {5: -math.inf}
    assert merged(TextBias(" sea waves", 2.0), TokenBias(sea, 1.0)) == {sea: 3.0, waves: 2.0}
    assert merged(TokenBias(-1, 1.0), TokenBias(10**7, 1.0), TextBias("", 1.0)) == {}
    assert merged(TokenBias(5, 1e300)) == {5: 1e6}
    assert merged(TextBias("<|im_end|>", 1.0)).keys() != {2}, "the letters, not the control token"
    assert merged(ignore_eos=True) == dict.fromkeys(vocabulary.end_tokens, -math.inf)
    monkeypatch.setattr(vocabulary, "suppressed_tokens", frozenset({9}))  # a model file may name some
    assert merged(TokenBias(9, 50.0)) == {9: -math.inf}


async def test_ignoring_the_end(backend: LlamaCppBackend, vocabulary: Model) -> None:
    question = "What is 2 + 2? Answer with one number."
    stops = await answer(backend, greedy(question, 60, ignore_eos=False))
    goes_on = await answer(backend, greedy(question, 60))
    assert stops.choice.reason == "stop"
    assert (goes_on.choice.reason, len(goes_on.tokens)) == ("length", 60)
    assert not vocabulary.end_tokens & set(goes_on.tokens)


# --- what ends an answer ----------------------------------------------------------------------------------------------


async def test_code_ends_where_its_block_does(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, greedy(CODE, 48))
    lines = whole.choice.text.split("\n")
    block = next(i for i, line in enumerate(lines) if i and not line.startswith("    "))
    cut = await answer(backend, greedy(CODE, 48, stop_indent=4))
    assert cut.choice.reason == "length"
    assert cut.choice.stop_sequence is None
    blanks = lines[block][: len(lines[block]) - len(lines[block].lstrip(" \t"))]
    assert cut.choice.text == "\n".join([*lines[:block], blanks])
    assert (await answer(backend, greedy(CODE, 48, stop_indent=0))).choice == whole.choice


async def test_time_ends_an_answer_at_a_new_line(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, greedy(CODE, 40))
    for limit in (None, -1, 0, 60_000.0):
        assert (await answer(backend, greedy(CODE, 40, max_predict_ms=limit))).choice == whole.choice
    cut = await answer(backend, greedy(CODE, 40, max_predict_ms=1e-3))
    assert cut.choice.reason == "length"
    assert whole.choice.text.startswith(cut.choice.text)
    assert cut.choice.text.count("\n") == 1 or cut.choice.text.endswith("\n\n")
    no_lines = greedy("Say one word.", 5, max_predict_ms=1e-3, sampling=Sampling(temperature=0.0, samplers=("t",)))
    assert len((await answer(backend, no_lines)).tokens) == 5


async def test_text_held_back_comes_when_a_limit_ends_the_answer(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, greedy(PROMPT, 8))
    held = await answer(backend, greedy(PROMPT, 8, stop=(whole.choice.text[3:] + "?",)))
    assert (held.choice.text, held.choice.reason) == (whole.choice.text, "length")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_indent": -1}, "stop_indent"),
        ({"max_predict_ms": -2}, "max_predict_ms"),
        ({"max_predict_ms": math.nan}, "max_predict_ms"),
        ({"n": 0}, "n"),
        ({"n": SLOTS + 1}, "n"),
        ({"slot": SlotOptions(keep=-2)}, "slot.keep"),
        ({"slot": SlotOptions(discard=-1)}, "slot.discard"),
        ({"logprobs": LogprobOptions(-1)}, "logprobs"),
        ({"logprobs": LogprobOptions(10**6)}, "logprobs"),
        ({"sampling": Sampling(repeat_last_n=-1)}, "repeat_last_n"),
        ({"sampling": Sampling(dry_penalty_last_n=-1)}, "dry_penalty_last_n"),
        ({"sampling": Sampling(dry_allowed_length=-1)}, "dry_allowed_length"),
        ({"sampling": Sampling(dry_sequence_breakers=())}, "dry_sequence_breakers"),
        ({"sampling": Sampling(adaptive_decay=1.0)}, "adaptive_decay"),
        ({"sampling": Sampling(min_keep=-1)}, "min_keep"),
        ({"sampling": Sampling(logit_bias=(TokenBias(1, math.inf),))}, "logit_bias"),
        ({"sampling": Sampling(logit_bias=(TokenBias(1, math.nan),))}, "logit_bias"),
    ],
    ids=str,
)
async def test_a_refusal_names_its_field(backend: LlamaCppBackend, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await answer(backend, greedy(PROMPT, **({"max_tokens": 4} | fields)))
    assert caught.value.param == param


async def test_banning_everything_is_refused(backend: LlamaCppBackend, vocabulary: Model) -> None:
    everything = tuple(TokenBias(token, -math.inf) for token in range(vocabulary.vocab_size))
    with pytest.raises(InvalidRequest) as caught:
        await answer(backend, greedy(PROMPT, 4, sampling=Sampling(logit_bias=everything)))
    assert caught.value.param == "logit_bias"


# --- anything at all --------------------------------------------------------------------------------------------------

numbers = st.one_of(st.floats(0, 0.99), st.floats(0.5, 3), st.sampled_from([0.0, 1.0, 1e-40, 0.9]))
wild_numbers = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, 1e30, -1e30, -1.0]))
counts = st.one_of(st.integers(0, 100), st.sampled_from([2**31 - 1, 2**31, 2**63]))
wild_counts = st.one_of(st.integers(), st.sampled_from([-1, -(2**31)]))
texts = st.text(max_size=8)
biases = st.one_of(
    st.builds(TokenBias, st.one_of(st.integers(0, 49151), st.integers()), numbers), st.builds(TextBias, texts, numbers)
)
sampler_lists = st.lists(
    st.one_of(st.sampled_from("edskypmtxiaz"), st.sampled_from(["top-k", "temp", "infill", "nucleus", "none"])),
    max_size=8,
)
constraints = st.one_of(
    st.builds(
        GbnfConstraint, st.sampled_from(['root ::= "a" | "b"+', 'root ::= [a-z ]+ "."', "root ::= x", "", "root ::= ["])
    ),
    st.builds(
        GbnfConstraint,
        st.just('root ::= "the" [a-z ]*'),
        st.booleans(),
        st.lists(
            st.builds(
                GrammarTrigger,
                st.sampled_from(["token", "word", "pattern", "pattern_full"]),
                texts,
                st.integers(-1, 60000),
            ),
            max_size=2,
        ).map(tuple),
        st.lists(texts, max_size=2).map(tuple),
    ),
    st.builds(
        JsonSchemaConstraint,
        st.sampled_from([{}, True, {"type": "integer"}, {"type": "nonsense"}, {"enum": []}, {"type": "array"}]),
    ),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p", "top_n_sigma"), numbers
    ),
    **dict.fromkeys(("xtc_probability", "xtc_threshold", "adaptive_target", "adaptive_decay"), numbers),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base"), numbers),
    **dict.fromkeys(("repeat_penalty", "presence_penalty", "frequency_penalty"), numbers),
    **dict.fromkeys(("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep", "seed"), counts),
    "mirostat": st.integers(-1, 3),
    "samplers": sampler_lists.map(tuple),
    "logit_bias": st.lists(biases, max_size=4).map(tuple),
    "dry_sequence_breakers": st.lists(texts, max_size=3).map(tuple),
}


# A request refused tests no more than the refusal. So what one is refused for by itself is rare in each field, and most
# requests reach the engine.
slot_options = st.builds(
    SlotOptions,
    st.sampled_from([None, None, 0, SLOTS - 1]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.integers(0, 9),
)
wild_slot_options = st.builds(
    SlotOptions,
    st.sampled_from([None, SLOTS, -1]),
    st.booleans(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(-1, 9),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    sampling = {name: draw(FIELDS[name]) for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=7))}
    wild = draw(st.sampled_from([None, None, None, "sampling", "constraint", "n", "lora", "slot"]))
    if wild == "sampling":
        name = draw(st.sampled_from([name for name in FIELDS if FIELDS[name] in (numbers, counts)]))
        sampling[name] = draw(wild_numbers if FIELDS[name] is numbers else wild_counts)
    return Request(
        "fuzz",
        "m",
        TextPrompt(draw(st.sampled_from(["Once upon a time", "{", "日本", " a a a a a a a"]))),
        sampling=Sampling(**sampling),
        max_tokens=draw(st.integers(0, 6)),
        stop=draw(st.lists(texts, max_size=2).map(tuple)),
        ignore_eos=draw(st.booleans()),
        constraint=draw(constraints) if wild == "constraint" else None,
        logprobs=draw(st.one_of(st.none(), st.builds(LogprobOptions, st.integers(0, 5), st.booleans()))),
        stop_indent=draw(st.integers(0, 2)),
        max_predict_ms=draw(st.sampled_from([None, 1e-3, 1e6])),
        speculate=draw(st.sampled_from([None, True, False])),
        n=SLOTS + 1 if wild == "n" else draw(st.sampled_from([1, 1, 1, 2])),
        lora=(LoraScale(0, 1.0),) if wild == "lora" else draw(st.sampled_from([None, None, ()])),
        slot=draw(wild_slot_options if wild == "slot" else slot_options),
    )


async def test_no_request_does_more_than_fail(backend: LlamaCppBackend) -> None:
    loop = asyncio.get_running_loop()
    outcomes: Counter[str] = Counter()

    async def run(request: Request) -> None:
        try:
            got: Answer | None = await asyncio.wait_for(answer(backend, request), 20)
        except InvalidRequest as refusal:
            assert refusal.param is not None, refusal
            outcomes["refused"] += 1
            got = None
        else:
            outcomes["answered"] += 1
        if got is not None:
            assert len(got.tokens) <= request.n * (request.max_tokens or 0)
            assert got.completion.usage.completion_tokens == len(got.tokens)
            cut = request.stop_indent or any(choice.stop_sequence is not None for choice in got.completion.choices)
            entries = [entry for choice in got.completion.choices for entry in choice.logprobs]
            if request.logprobs is not None and not cut:
                assert len(entries) == len(got.tokens)
            for entry in entries:
                assert all(math.isfinite(one.logprob) and one.logprob <= 0 for one in (entry, *entry.top))
        await until(backend, running=0)
        await backend.check_health()

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(requests())
    def check(request: Request) -> None:
        asyncio.run_coroutine_threadsafe(run(request), loop).result(60)

    end = time.monotonic() + FUZZ_SECONDS
    while time.monotonic() < end:  # other requests each time
        await asyncio.to_thread(check)
    assert outcomes["answered"] > outcomes.total() // 3, outcomes
    runner, _ = parts(backend)
    assert not any(slot.busy for slot in runner.kv.slots)

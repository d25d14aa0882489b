"""`Sampling` checked and completed: defaults, refusals that name their field, limits, and names of samplers."""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec
import pytest

from backends.llamacpp.sampler_params import DEFAULT_SAMPLERS, RANDOM_SEED, SamplerParams, sampler_names
from protocols.errors import InvalidRequest
from protocols.request import Sampling

FLOATS = [name for name, value in msgspec.structs.asdict(SamplerParams()).items() if isinstance(value, float)]


def test_defaults_are_llama_cpps() -> None:
    params = SamplerParams.of(Sampling())
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.seed == RANDOM_SEED
    assert not params.penalises


@pytest.mark.parametrize(
    "sampling",
    [
        *({name: value} for name in FLOATS for value in (math.nan, math.inf, -math.inf)),
        {"repeat_penalty": 0.0},
        {"repeat_penalty": -1.0},
        {"repeat_last_n": -1},
        {"dry_multiplier": -0.1},
        {"dry_base": -1.0},
        {"dry_allowed_length": -1},
        {"dry_penalty_last_n": -1},
        {"dry_sequence_breakers": ()},
        {"dry_sequence_breakers": ("x",) * 65},
        {"dry_sequence_breakers": ("x" * 5000,)},
        {"adaptive_decay": -0.1},
        {"adaptive_decay": 1.0},
        {"min_keep": -1},
        {"samplers": ("top_k",) * 65},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplerParams.of(Sampling(**sampling))
    assert [caught.value.param] == list(sampling)
    assert str(caught.value.param) in caught.value.message


@pytest.mark.parametrize(
    ("field", "given", "used"),
    [
        ("top_k", -5, 0),
        ("top_k", 2**40, 2**31 - 1),
        ("top_p", 1.5, 1.0),
        ("top_p", -1.0, 0.0),
        ("min_p", 2.0, 1.0),
        ("min_p", -0.5, 0.0),
        ("typical_p", 7.0, 1.0),
        ("xtc_probability", 3.0, 1.0),
        ("xtc_threshold", -1.0, 0.0),
        ("temperature", -1.0, 0.0),
        ("temperature", 1e-30, 0.0),
        ("temperature", 1e300, 1e6),
        ("temperature", 10**400, 1e6),
        ("dynatemp_range", -1.0, 0.0),
        ("dynatemp_range", 5.0, 0.799),
        ("dynatemp_exponent", -2.0, 0.0),
        ("mirostat", 7, 2),
        ("mirostat", -1, 0),
        ("adaptive_target", 2.0, 1.0),
        ("adaptive_target", -7.0, -1.0),
        ("dry_base", 0.5, 1.75),
        ("repeat_penalty", 1e-30, 1e-6),
        ("frequency_penalty", -1e300, -1e6),
        ("repeat_last_n", 2**40, 2**31 - 1),
        ("min_keep", 2**40, 2**31 - 1),
        ("seed", -1, RANDOM_SEED),
        ("seed", RANDOM_SEED, RANDOM_SEED),
        ("seed", 2**32 + 7, 7),
    ],
)
def test_what_goes_too_far_is_brought_back(field: str, given: float, used: float) -> None:
    assert getattr(SamplerParams.of(Sampling(**cast("Any", {field: given}))), field) == pytest.approx(used, abs=1e-9)


def test_choices_have_seeds_of_their_own() -> None:
    params = SamplerParams.of(Sampling(seed=5))
    assert [params.for_choice(i).seed for i in range(3)] == [5, 6, 7]
    assert SamplerParams.of(Sampling(seed=RANDOM_SEED - 1)).for_choice(1).seed == 0
    assert SamplerParams().for_choice(3).seed == RANDOM_SEED


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (("penalties", "dry", "top_n_sigma"), ("penalties", "dry", "top_n_sigma")),
        (("top-k", "topp", "MIN-P", "xtc"), ("top_k", "top_p", "min_p", "xtc")),
        (("nucleus", "temp", "typ", "typical", "typical_p", "typical-p"), ("top_p", "temperature", *["typ_p"] * 4)),
        (("adaptive-p", "adaptivep", "infill"), ("adaptive_p", "adaptive_p", "infill")),
        ("edskypmxt", DEFAULT_SAMPLERS),
        ("ia", ("infill", "adaptive_p")),
        (("top_k", "no such one", "z", "", "mirostat"), ("top_k",)),
    ],
)
def test_samplers_have_many_names(given: Any, names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    assert sampler_names(given) == names
    assert len(caplog.records) == len(given) - len(names)

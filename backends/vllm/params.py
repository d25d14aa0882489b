"""From a `Request` to the arguments of vLLM's `SamplingParams`, by tables. Imports no vLLM.

What vLLM cannot do is refused with the parameter's name, unless its value says not to do it; what only modifies
something that is refused is read over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from backends.limits import check_limits
from backends.logit_bias import merged_biases
from backends.vocabulary import Vocabulary
from protocols.errors import InvalidRequest
from protocols.request import LogprobOptions, Request, Sampling

Arguments = dict[str, Any]


class _Number(NamedTuple):
    """vLLM's name of a parameter and its range there; beyond it a value is refused, or brought back to it."""

    name: str
    low: float
    high: float
    clamped: bool = False


_MAPPED = {
    "temperature": _Number("temperature", 0.0, 2.0),
    "top_k": _Number("top_k", 0, 2**31 - 1, clamped=True),
    "top_p": _Number("top_p", 1e-6, 1.0, clamped=True),
    "min_p": _Number("min_p", 0.0, 1.0, clamped=True),
    "repeat_penalty": _Number("repetition_penalty", 1e-6, 1e6),
    "presence_penalty": _Number("presence_penalty", -2.0, 2.0),
    "frequency_penalty": _Number("frequency_penalty", -2.0, 2.0),
}

_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    # the values that ask for nothing
    "dynatemp_range": lambda value: value <= 0,
    "typical_p": lambda value: value >= 1,
    "top_n_sigma": lambda value: value <= 0,
    "xtc_probability": lambda value: value <= 0,
    "adaptive_target": lambda value: value < 0,
    "mirostat": lambda value: value == 0,
    "dry_multiplier": lambda value: value == 0,
    "min_keep": lambda value: value <= 1,
    "samplers": lambda value: False,
}

_MODIFIERS = frozenset(
    {
        "dynatemp_exponent",
        "xtc_threshold",
        "adaptive_decay",
        "mirostat_tau",
        "mirostat_eta",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
    }
)
_APART = frozenset({"repeat_last_n", "logit_bias", "seed"})

RANDOM_SEEDS = (-1, 0xFFFFFFFF)
"""llama.cpp's marks for "draw one"."""


def check_request(request: Request, max_logprobs: int) -> None:
    """What does not depend on the model's vocabulary. `InvalidRequest` names the field."""
    check_limits(request)
    if request.slot.id is not None:
        raise InvalidRequest("This model's engine has no slots to choose from", param="id_slot")
    if request.slot.shift:
        raise InvalidRequest("This model's engine cannot drop old tokens to make room", param="context_shift")
    _check_logprobs(request.logprobs, max_logprobs)


def _check_logprobs(options: LogprobOptions | None, most: int) -> None:
    if options is None:
        return
    if options.after_sampling:
        raise InvalidRequest(
            "This model's engine reports probabilities before the samplers only", param="post_sampling_probs"
        )
    if not 0 <= options.top <= most:
        raise InvalidRequest(f"logprobs must be between 0 and {most}", param="logprobs")


def sampling_arguments(
    request: Request, vocabulary: Vocabulary, defaults: Mapping[str, Any], constraint: Arguments | None
) -> Arguments:
    """Without `max_tokens`, and for the first choice. `defaults` are the checkpoint's, `constraint` is structured."""
    sampling = request.sampling
    arguments = dict(defaults) | _numbers(sampling)
    _repeat_window(sampling, arguments)
    biases = merged_biases(vocabulary, sampling.logit_bias, ignore_eos=request.ignore_eos)
    if biases:
        arguments["logit_bias"] = dict(biases)
    if sampling.seed is not None and sampling.seed not in RANDOM_SEEDS:
        arguments["seed"] = sampling.seed % 2**32
    if request.logprobs is not None:
        arguments["logprobs"] = request.logprobs.top
    if constraint is not None:
        arguments["structured_outputs"] = constraint
    if not request.slot.reuse:
        arguments["skip_reading_prefix_cache"] = True
    if request.ignore_eos:
        arguments["ignore_eos"] = True
    else:
        arguments["stop_token_ids"] = sorted(vocabulary.end_tokens)
    return arguments


def _numbers(sampling: Sampling) -> Arguments:
    arguments: Arguments = {}
    for field, value in msgspec.structs.asdict(sampling).items():
        if value is None or field in _APART or field in _MODIFIERS:
            continue
        if (idle := _REFUSED.get(field)) is not None:
            if not idle(value):
                raise InvalidRequest(f"This model's engine has no {field}", param=field)
            continue
        rule = _MAPPED[field]
        if not math.isfinite(value):
            raise InvalidRequest(f"{field} must be a finite number", param=field)
        if not rule.low <= value <= rule.high and not rule.clamped:
            raise InvalidRequest(f"{field} must be between {rule.low:g} and {rule.high:g}", param=field)
        arguments[rule.name] = type(value)(min(max(value, rule.low), rule.high))
    return arguments


_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def _repeat_window(sampling: Sampling, arguments: Arguments) -> None:
    """vLLM's penalties look at all there is; a window of none is no penalty."""
    window = sampling.repeat_last_n
    if window is None or window == -1 or not penalises(arguments):
        return
    if window:
        raise InvalidRequest("This model's engine penalises all earlier tokens, or none", param="repeat_last_n")
    arguments.update(_PENALTIES)


def penalises(arguments: Mapping[str, Any]) -> bool:
    return any(arguments.get(name, neutral) != neutral for name, neutral in _PENALTIES.items())


def is_greedy(arguments: Mapping[str, Any]) -> bool:
    return float(arguments.get("temperature", 1.0)) < 1e-5


def needs_replay(arguments: Mapping[str, Any]) -> bool:
    """Whether an answer's own tokens count for what comes next otherwise than as a part of the prompt."""
    seeded = "seed" in arguments and not is_greedy(arguments)
    return seeded or "structured_outputs" in arguments or penalises(arguments)


def for_choice(arguments: Arguments, choice: int) -> Arguments:
    """Those of one of several choices: each draws other numbers, and the same ones each time."""
    if "seed" not in arguments or not choice:
        return arguments
    return arguments | {"seed": (arguments["seed"] + choice) % 0xFFFFFFFF}

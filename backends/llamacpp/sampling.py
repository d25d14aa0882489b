"""A llama.cpp sampler chain: from `SamplerParams` to native samplers, in the order the request wants.

Ownership: a sampler belongs to the chain it was added to, and the chain to its `SamplerChain`, whose `close()` frees
all of it, once. The chain keeps state (random numbers, recent tokens), so it serves one sequence, on one thread.
A chain must not be cloned: llama.cpp's clone of some samplers forgets what they have seen.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any

import llama_cpp.llama_cpp as c
import numpy as np
import numpy.typing as npt

from backends.llamacpp.bindings import Context, LlamaCppError, Logits, Model, Tokens
from backends.llamacpp.sampler_params import RANDOM_SEED, SamplerParams
from backends.logit_bias import NO_BIASES, Biases

__all__ = ["RANDOM_SEED", "Candidates", "DrySampler", "SamplerChain", "SamplerParams"]

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`llama_token_data`."""

_MIROSTAT_CANDIDATES = 100
"""What mirostat 1 estimates its exponent from; llama.cpp's constant."""
_MAX_INFILL_CANDIDATES = 128
"""The infill sampler compares every candidate's text with every other's."""


class Candidates:
    """All tokens with their logits, in memory that C changes in place: the input and output of samplers."""

    _of_thread = threading.local()

    def __init__(self, vocab_size: int) -> None:
        self._ids = np.arange(vocab_size, dtype=np.int32)
        self._rows = np.empty(vocab_size, CANDIDATE)
        self._address = self._rows.ctypes.data
        self._data: Any = self._rows.ctypes.data_as(c.llama_token_data_p)
        self.array = c.llama_token_data_array(data=self._data, size=0, selected=-1, sorted=False)

    @classmethod
    def of(cls, logits: Logits) -> Candidates:
        """One that holds `logits`, until the next call on the same thread."""
        shared: Candidates | None = getattr(cls._of_thread, "shared", None)
        if shared is None or len(shared._rows) != len(logits):
            shared = cls._of_thread.shared = cls(len(logits))
        shared.fill(logits)
        return shared

    def fill(self, logits: Logits) -> None:
        self._rows["id"] = self._ids
        self._rows["logit"] = logits
        self._rows["p"] = 0.0
        self._set(len(self._rows))

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Only those that `wanted` says are left."""
        kept = self.view[wanted]
        self._rows[: len(kept)] = kept
        self._set(len(kept))

    def _set(self, size: int) -> None:
        self.array.data = self._data
        self.array.size, self.array.selected, self.array.sorted = size, -1, False

    @property
    def view(self) -> npt.NDArray[Any]:
        """What samplers have left; some move the beginning."""
        address = ctypes.cast(self.array.data, ctypes.c_void_p).value or 0
        start = (address - self._address) // CANDIDATE.itemsize
        return self._rows[start : start + self.array.size]

    @property
    def selected(self) -> int:
        """The token that the chain chose."""
        if not 0 <= self.array.selected < self.array.size:
            raise LlamaCppError("the samplers chose nothing")
        return int(self.view["id"][self.array.selected])


class DrySampler:
    """A "don't repeat yourself" sampler to copy: making one searches the vocabulary for each sequence breaker.

    That can take as long as several steps of the engine, so it is made before, on another thread, and copied there.
    """

    def __init__(self, model: Model, params: SamplerParams) -> None:
        breakers = [text.encode("utf-8", "replace").partition(b"\0")[0] for text in params.dry_sequence_breakers]
        breakers = [text for text in breakers if text]
        self._sampler = made(
            c.llama_sampler_init_dry(
                model.vocab,
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                min(params.dry_penalty_last_n, model.trained_context),  # it allocates that many
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        )

    def copy(self) -> Any:
        return made(c.llama_sampler_clone(self._sampler))

    def __del__(self) -> None:
        if sampler := self.__dict__.pop("_sampler", None):
            c.llama_sampler_free(sampler)


@lru_cache(maxsize=16)
def _dry_sampler(model: Model, params: SamplerParams) -> DrySampler:
    return DrySampler(model, params)


def dry_sampler(model: Model, params: SamplerParams) -> DrySampler | None:
    """The one that `params` ask for, if they do. Safe from any thread."""
    if not params.dries:
        return None
    only = SamplerParams(
        dry_multiplier=params.dry_multiplier,
        dry_base=params.dry_base,
        dry_allowed_length=params.dry_allowed_length,
        dry_penalty_last_n=params.dry_penalty_last_n,
        dry_sequence_breakers=params.dry_sequence_breakers,
    )
    return _dry_sampler(model, only)


class SamplerChain:
    """Draws the tokens of one sequence. Biases come first, then the samplers in the order of `params`."""

    def __init__(
        self, model: Model, params: SamplerParams, biases: Biases = NO_BIASES, dry: DrySampler | None = None
    ) -> None:
        self.params = params
        self.biases = biases
        self._model = model
        self._dry = dry
        self._random: list[Any] = []  # samplers that draw one random number per token
        only_bans = all(bias == -np.inf for bias in biases.values())
        self._likeliest = params.greedy and only_bans and not (params.penalises or params.dries)
        self._chain: Any = made(c.llama_sampler_chain_init(c.llama_sampler_chain_default_params()))
        try:
            self._fill()
        except LlamaCppError:
            self.close()
            raise

    def _fill(self) -> None:
        model, params = self._model, self.params
        if self.biases:
            pairs = [c.llama_logit_bias(*item) for item in self.biases.items()]
            items = (c.llama_logit_bias * len(pairs))(*pairs)
            self._add(c.llama_sampler_init_logit_bias(model.vocab_size, len(items), items))
        if params.greedy:
            for name in params.samplers:
                if name in ("penalties", "dry"):
                    self._add_named(name)
            self._add(c.llama_sampler_init_greedy())
        elif params.mirostat:
            self._add(c.llama_sampler_init_temp(params.temperature))
            tau, eta = params.mirostat_tau, params.mirostat_eta
            if params.mirostat == 1:
                self._add(c.llama_sampler_init_mirostat(model.vocab_size, params.seed, tau, eta, _MIROSTAT_CANDIDATES))
            else:
                self._add(c.llama_sampler_init_mirostat_v2(params.seed, tau, eta))
        else:
            for name in params.samplers:
                self._add_named(name)
            if "adaptive_p" in params.samplers:  # wherever it is named: it chooses, as the last
                chooser = c.llama_sampler_init_adaptive_p(params.adaptive_target, params.adaptive_decay, params.seed)
            else:
                chooser = c.llama_sampler_init_dist(params.seed)
            self._random.append(self._add(chooser))

    def _add_named(self, name: str) -> None:
        """Nothing for those whose values turn them off."""
        params = self.params
        match name:
            case "penalties" if params.penalises:
                self._add(
                    c.llama_sampler_init_penalties(
                        self._model.vocab_size,
                        min(params.repeat_last_n, self._model.trained_context),  # it allocates that many
                        params.repeat_penalty,
                        params.frequency_penalty,
                        params.presence_penalty,
                    )
                )
            case "dry" if params.dries:
                dry = self._dry or dry_sampler(self._model, params)
                assert dry is not None
                self._add(dry.copy())
            case "top_n_sigma" if params.top_n_sigma > 0:
                self._add(c.llama_sampler_init_top_n_sigma(params.top_n_sigma))
            case "top_k" if params.top_k > 0:
                self._add(c.llama_sampler_init_top_k(params.top_k))
            case "typ_p" if params.typical_p < 1:
                self._add(c.llama_sampler_init_typical(params.typical_p, params.min_keep))
            case "top_p" if params.top_p < 1:
                self._add(c.llama_sampler_init_top_p(params.top_p, params.min_keep))
            case "min_p" if params.min_p > 0:
                self._add(c.llama_sampler_init_min_p(params.min_p, params.min_keep))
            case "xtc" if params.xtc_probability > 0:
                self._random.append(
                    self._add(
                        c.llama_sampler_init_xtc(
                            params.xtc_probability, params.xtc_threshold, params.min_keep, params.seed
                        )
                    )
                )
            case "temperature":
                self._add(
                    c.llama_sampler_init_temp_ext(params.temperature, params.dynatemp_range, params.dynatemp_exponent)
                )
            case "infill" if _ends(self._model):
                self._add(c.llama_sampler_init_top_k(_MAX_INFILL_CANDIDATES))
                self._add(c.llama_sampler_init_infill(self._model.vocab))

    def _add(self, sampler: Any) -> Any:
        c.llama_sampler_chain_add(self._chain, made(sampler))
        return sampler

    def observe_prompt(self, tokens: Tokens) -> None:
        """Prompt tokens count for the penalties."""
        if window := self.params.window:
            self._accept(tokens[-window:])

    def replay(self, tokens: Tokens) -> None:
        """Brings the chain to where it stood after drawing `tokens`: it continues with the same random numbers.

        Not where those depend on more than the tokens: mirostat's and adaptive-p's running measures, draws repeated
        for a grammar, and xtc where it had a single candidate.
        """
        pair = (c.llama_token_data * 2)()
        for sampler in self._random:
            for _ in range(len(tokens)):  # each draws once per token, whatever it chooses from
                pair[0], pair[1] = c.llama_token_data(0, 0.0, 0.0), c.llama_token_data(1, 0.0, 0.0)
                array = c.llama_token_data_array(data=pair, size=2, selected=-1, sorted=False)
                c.llama_sampler_apply(sampler, ctypes.byref(array))
        self.observe_prompt(tokens)

    def _accept(self, tokens: Tokens) -> None:
        for token in tokens.tolist():
            self.accept(token)

    def sample(self, context: Context, row: int) -> int:
        """Draws from the logits of `row` of the last decoded batch, and accepts the token."""
        if self._likeliest:  # the chain's token, in a tenth of the time, unless it is banned
            token = int(context.logits(row).argmax())
            if token not in self.biases:
                return token
        context.check_output(row)
        return int(c.llama_sampler_sample(self.handle, context.handle, row))

    def pick(self, candidates: Candidates) -> int:
        """Draws from `candidates`, and leaves there what it drew from. To be accepted, by someone who may refuse it."""
        if not candidates.array.size:
            raise LlamaCppError("no candidates to draw from")
        c.llama_sampler_apply(self.handle, ctypes.byref(candidates.array))
        return candidates.selected

    def accept(self, token: int) -> None:
        if not 0 <= token < self._model.vocab_size:
            raise LlamaCppError(f"token {token} is outside the vocabulary of {self._model.vocab_size}")
        c.llama_sampler_accept(self.handle, token)

    @property
    def handle(self) -> Any:
        if self._chain is None:
            raise LlamaCppError("the sampler is closed")
        return self._chain

    def close(self) -> None:
        if self._chain is not None:
            c.llama_sampler_free(self._chain)
            self._chain = None


def _ends(model: Model) -> bool:
    """Whether the model has the token that the infill sampler ends a text with; without it, it ends the process."""
    return int(c.llama_vocab_eot(model.vocab)) >= 0 or int(c.llama_vocab_eos(model.vocab)) >= 0


def made(sampler: Any) -> Any:
    """A sampler that could not be made is a null pointer object; using it in a chain ends the process."""
    if not sampler:
        raise LlamaCppError("llama.cpp could not make a sampler")
    return sampler

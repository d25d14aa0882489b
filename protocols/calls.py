"""What can be asked of a model besides a generation: one question, one answer, no stream."""

from __future__ import annotations

import base64
from array import array

import msgspec

from protocols.request import Sampling, TextPrompt, TokenPrompt


class EmbeddingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One vector for each of `inputs`, or one for each of their tokens where the model does not pool.

    `normalize` is the norm that becomes 1: 2 Euclidean, 1 taxicab, p > 2 the p-norm; 0 scales the largest absolute
    value to 32,760 instead, and -1 leaves the vector as it is. Vectors of single tokens are never normalised.
    """

    id: str
    model: str
    inputs: tuple[TextPrompt | TokenPrompt, ...]
    normalize: int = 2


class Embedding(msgspec.Struct, frozen=True):
    """`rows` vectors of `dimensions` numbers for one input; `data` is all of them, 32-bit little-endian floats."""

    data: bytes
    dimensions: int
    prompt_tokens: int

    @property
    def rows(self) -> int:
        return len(self.data) // (4 * self.dimensions)

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode("ascii")

    def vectors(self) -> list[list[float]]:
        size = 4 * self.dimensions
        return [array("f", self.data[start : start + size]).tolist() for start in range(0, len(self.data), size)]


class RerankRequest(msgspec.Struct, frozen=True):
    """How well each of `documents` answers `query`."""

    id: str
    model: str
    query: str
    documents: tuple[str, ...]


class Relevance(msgspec.Struct, frozen=True):
    """The score of one document, as the model gives it: not a probability, higher is better."""

    score: float
    prompt_tokens: int


class Piece(msgspec.Struct, frozen=True):
    """One token and the bytes it stands for, which need not be whole characters. Control tokens have their name."""

    token: int
    data: bytes


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter the model was loaded with. `scale` applies to requests that do not bring scales of their own."""

    id: int
    path: str
    scale: float
    task_name: str = ""
    prompt_prefix: str = ""


class SlotState(msgspec.Struct, frozen=True):
    """One slot: who has it and what its part of the KV cache holds, in tokens.

    `request` is the id of the request that runs there, "" when the slot is idle; the fields after it are that
    request's.
    """

    id: int
    context_length: int
    cached_tokens: int
    request: str = ""
    prompt_tokens: int = 0
    processed_tokens: int = 0
    generated_tokens: int = 0
    max_tokens: int | None = None
    speculative: bool = False
    sampling: Sampling | None = None


class SlotFile(msgspec.Struct, frozen=True):
    """A slot's tokens, with their keys and values, written to or read from a file."""

    slot: int
    filename: str
    tokens: int
    bytes: int
    ms: float

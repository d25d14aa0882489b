"""What can be asked of a model besides a generation: one question, one answer, no stream.

`ModelCall` is the closed union of the questions. Each names the type of its answer once, as the parameter of its base.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

from protocols.card import BackendStats, ModelCard
from protocols.request import ChatPrompt, LoraScale, MixedPrompt, Request, Sampling, TextPrompt, TokenPrompt

AnswerT = TypeVar("AnswerT")


class Asked(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """By whom: `tenant` is the id of an API key, as in `Request`."""

    tenant: str = ""


class Question(Asked, Generic[AnswerT], frozen=True, omit_defaults=True):
    """Base of the questions. `id` names it in logs on every layer; `model` is the id the client asked for.

    A `repeatable` one may be put to another replica when the one that was asked is lost. One that goes `everywhere`
    is put to every replica of the model, any other to one of them, whichever it is.
    """

    repeatable: ClassVar[bool] = True
    everywhere: ClassVar[bool] = False

    id: str
    model: str

    @classmethod
    def tag(cls) -> str:
        """The question's name."""
        return str(cls.__struct_config__.tag)

    @classmethod
    def answer_type(cls) -> Any:
        """What its answer is: `list[Embedding]`, `None`, …"""
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]  # PEP 560; type stubs leave it out
        return get_args(base)[0]

    @classmethod
    def merged(cls, answers: Sequence[tuple[str, AnswerT]]) -> AnswerT:
        """One answer made of those of the replicas that were asked, each with the replica's name."""
        ((_, answer),) = answers
        return answer


# --- answers ------------------------------------------------------------


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


class Relevance(msgspec.Struct, frozen=True):
    """The score of one document, as the model gives it: not a probability, higher is better."""

    score: float
    prompt_tokens: int


class Piece(msgspec.Struct, frozen=True):
    """One token and the bytes it stands for, which need not be whole characters. Control tokens have their name."""

    token: int
    data: bytes


class ReplicaStats(msgspec.Struct, frozen=True):
    """How one `replica` is doing; "" is the only one there is."""

    stats: BackendStats
    replica: str = ""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter the model was loaded with. `scale` applies to requests that do not bring scales of their own."""

    id: int
    path: str
    scale: float
    task_name: str = ""
    prompt_prefix: str = ""


class SlotState(msgspec.Struct, frozen=True):
    """One slot: who has it and what its part of the KV cache holds, in tokens. `id` counts the slots of one `replica`.

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
    replica: str = ""


class SlotFile(msgspec.Struct, frozen=True):
    """A slot's tokens, with their keys and values, written to or read from a file."""

    slot: int
    filename: str
    tokens: int
    bytes: int
    ms: float


# --- questions ------------------------------------------------------------


class EmbeddingRequest(Question[list[Embedding]], frozen=True, omit_defaults=True, tag="embed"):
    """One vector for each of `inputs`, or one for each of their tokens where the model does not pool.

    `normalize` is the norm that becomes 1: 2 Euclidean, 1 taxicab, p > 2 the p-norm; 0 scales the largest absolute
    value to 32,760 instead, and -1 leaves the vector as it is. Vectors of single tokens are never normalised.
    `pooled`: a model that does not pool refuses.
    """

    inputs: tuple[TextPrompt | TokenPrompt | MixedPrompt, ...]
    normalize: int = 2
    pooled: bool = False


class RerankRequest(Question[list[Relevance]], frozen=True, omit_defaults=True, tag="rerank"):
    """How well each of `documents` answers `query`."""

    query: str
    documents: tuple[str, ...]


class CountTokens(Question[int], frozen=True, tag="count_tokens"):
    """How many tokens the prompt of `request` has."""

    request: Request


class Tokenize(Question[list[Piece]], frozen=True, omit_defaults=True, tag="tokenize"):
    """`parts`: text, or pieces of text among tokens.

    `add_special`: the first of them, if it is text, with the tokens that begin and end a text. `parse_special`:
    `<|name|>` is a control token.
    """

    parts: tuple[str | int, ...]
    add_special: bool = False
    parse_special: bool = True


class Detokenize(Question[str], frozen=True, tag="detokenize"):
    """The text of `tokens`, control tokens by their name."""

    tokens: tuple[int, ...]


class ApplyTemplate(Question[str], frozen=True, tag="apply_template"):
    """The text that a generation would tokenise for `prompt`."""

    prompt: ChatPrompt


OfReplicaT = TypeVar("OfReplicaT", ReplicaStats, SlotState)


def _by_replica(answers: Sequence[tuple[str, list[OfReplicaT]]]) -> list[OfReplicaT]:
    """All of them, each with the name of its replica, in the order of the names."""
    return [
        msgspec.structs.replace(state, replica=replica)
        for replica, states in sorted(answers, key=lambda answer: answer[0])
        for state in states
    ]


class GetCard(Question[ModelCard], frozen=True, tag="card"):
    pass


class GetStats(Question[BackendStats], frozen=True, tag="stats"):
    pass


class GetAllStats(Question[list[ReplicaStats]], frozen=True, tag="all_stats"):
    everywhere: ClassVar[bool] = True

    @classmethod
    def merged(cls, answers: Sequence[tuple[str, list[ReplicaStats]]]) -> list[ReplicaStats]:
        return _by_replica(answers)


class GetSlots(Question[list[SlotState]], frozen=True, tag="slots"):
    everywhere: ClassVar[bool] = True

    @classmethod
    def merged(cls, answers: Sequence[tuple[str, list[SlotState]]]) -> list[SlotState]:
        return _by_replica(answers)


class SaveSlot(Question[SlotFile], frozen=True, tag="save_slot"):
    """As `RestoreSlot` and `EraseSlot`, for models of one replica: of several, any one is asked."""

    repeatable: ClassVar[bool] = False

    slot: int
    filename: str


class RestoreSlot(Question[SlotFile], frozen=True, tag="restore_slot"):
    repeatable: ClassVar[bool] = False

    slot: int
    filename: str


class EraseSlot(Question[int], frozen=True, tag="erase_slot"):
    """Answered with the number of tokens that were forgotten."""

    repeatable: ClassVar[bool] = False

    slot: int


class GetAdapters(Question[list[Adapter]], frozen=True, tag="adapters"):
    pass


class SetAdapters(Question[None], frozen=True, tag="set_adapters"):
    """For requests that bring no scales of their own, from here on. Adapters that are not named get 0.

    A replica that starts later has the scales of its config.
    """

    repeatable: ClassVar[bool] = False
    everywhere: ClassVar[bool] = True

    scales: tuple[LoraScale, ...]

    @classmethod
    def merged(cls, answers: Sequence[tuple[str, None]]) -> None:
        return None


ModelCall = (
    EmbeddingRequest
    | RerankRequest
    | CountTokens
    | Tokenize
    | Detokenize
    | ApplyTemplate
    | GetCard
    | GetStats
    | GetAllStats
    | GetSlots
    | SaveSlot
    | RestoreSlot
    | EraseSlot
    | GetAdapters
    | SetAdapters
)

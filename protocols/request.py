"""The canonical request: what every dialect decodes into, and the only thing routing and backends ever read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An image by reference: an `https:` or `data:` URL."""

    url: str


ContentPart = TextPart | ImagePart


class ToolCall(msgspec.Struct, frozen=True):
    """A call the assistant made in an earlier turn. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Role
    content: tuple[ContentPart, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """All text parts joined: a string and a list with one text part are the same message."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the model thinks before it answers; None is its own default. `effort` is a word its template may know.

    `budget_tokens` ends the thinking after so many tokens, where that is possible.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """`required`: at least one call; `name`, with `required`: of this tool. `parallel`: several calls in one answer."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", omit_defaults=True):
    """Messages that the model's chat template turns into text.

    With `continues`, the last message is the beginning of the assistant's answer, which goes on from there. Without
    `opens`, the text ends behind the last message, and does not begin an answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: dict[str, Any] = {}
    tool_choice: ToolChoice = ToolChoice()
    reasoning: Reasoning = Reasoning()
    continues: bool = False
    opens: bool = True


class TextPrompt(msgspec.Struct, frozen=True, tag="raw_text"):
    """Text that goes to the tokenizer as it is."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    tokens: tuple[int, ...]


class MixedPrompt(msgspec.Struct, frozen=True, tag="mixed"):
    """Pieces of text among tokens. Only the first text is begun as a prompt is, and only where nothing precedes it."""

    parts: tuple[str | int, ...]


class InfillFile(msgspec.Struct, frozen=True):
    filename: str
    text: str


class InfillPrompt(msgspec.Struct, frozen=True, tag="infill", omit_defaults=True):
    """Code with a gap between `prefix` and `suffix`. The answer fills it, and begins behind `start`.

    `files` are other files of the same project, for reference. What does not fit is left out: the beginning of the
    prefix, the end of the suffix, the first of the files.
    """

    prefix: str
    suffix: str
    start: str = ""
    files: tuple[InfillFile, ...] = ()


Prompt = ChatPrompt | TextPrompt | TokenPrompt | MixedPrompt | InfillPrompt


class TokenBias(msgspec.Struct, frozen=True, tag="token"):
    """Added to the token's logit before anything else; minus infinity bans it."""

    token: int
    bias: float


class TextBias(msgspec.Struct, frozen=True, tag="text"):
    """The same for every token of `text`, tokenised without special tokens."""

    text: str
    bias: float


LogitBias = TokenBias | TextBias


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. `None` means the model's own default. `temperature` 0 is greedy.

    `samplers` names the truncation samplers in the order they run. Penalties look at the last `repeat_last_n` tokens.
    """

    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    min_keep: int | None = None
    samplers: tuple[str, ...] | None = None
    logit_bias: tuple[LogitBias, ...] | None = None
    seed: int | None = None


class LogprobOptions(msgspec.Struct, frozen=True):
    """Probabilities to report with each token: its own and the `top` likeliest, before or after the samplers ran."""

    top: int
    after_sampling: bool = False


class GrammarTrigger(msgspec.Struct, frozen=True, omit_defaults=True):
    """What wakes a lazy grammar. `token` is the id for kind `token`; `value` the word or the regular expression."""

    kind: Literal["token", "word", "pattern", "pattern_full"]
    value: str = ""
    token: int | None = None


class GbnfConstraint(msgspec.Struct, frozen=True, omit_defaults=True, tag="gbnf"):
    """The answer must match a GBNF grammar: all of it, or when `lazy` what follows the first trigger."""

    text: str
    lazy: bool = False
    triggers: tuple[GrammarTrigger, ...] = ()
    preserved_tokens: tuple[str, ...] = ()


class JsonSchemaConstraint(msgspec.Struct, frozen=True, tag="json_schema"):
    """The answer must be a JSON document that the schema accepts."""

    schema: Any


Constraint = GbnfConstraint | JsonSchemaConstraint


class LoraScale(msgspec.Struct, frozen=True, array_like=True):
    """How strongly adapter number `id` of the model applies to a request."""

    id: int
    scale: float


class SlotOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wishes about the slot and its KV cache, for engines that have slots.

    `id` forces a slot. `reuse` False computes the whole prompt. `shift` lets a full context drop `discard` tokens (0:
    half of those that may go) behind the first `keep` (-1: the prompt) and go on; None is the model's setting.
    """

    id: int | None = None
    reuse: bool = True
    shift: bool | None = None
    keep: int = 0
    discard: int = 0


class Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the stream is to carry besides, for dialects that show it.

    `echo`: what the engine made of the request. `progress`: also the end of a prompt that took one step. `timings`:
    with every piece of text, reasoning or arguments.
    """

    echo: bool = False
    progress: bool = False
    timings: bool = False


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation. `id` names it in logs on every layer; `model` is the id the client asked for.

    `max_tokens` None means as many as the context holds. `ignore_eos` keeps generating past end-of-generation tokens.
    `stop_indent` > 0 ends at the first later line that begins with fewer blanks; `max_predict_ms` ends at the first
    new line after that time. `lora` None means the adapters set for all, `speculate` None the model's setting.
    `affinity` names what the request is a part of, where its client says so: requests of one name are best kept on one
    replica.
    `resume` are tokens that were already generated, and delivered, by a replica that was lost: the backend continues
    after them and emits nothing for them. `affinity` is what the client calls its session, if it says: requests that
    share it are better served by one replica. It is a hint for routing, and no more. With `n` 1, `choice` is which of a
    larger request's choices this is: its events bear that number, and it is what it would have been among the others.
    `timeout_s` is how long the client will wait for all of the answer; it counts from the request's arrival.
    `tenant` is whose it is, the id of an API key: where requests wait, tenants take turns.
    """

    id: str
    model: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    resume: tuple[int, ...] = ()
    constraint: Constraint | None = None
    logprobs: LogprobOptions | None = None
    slot: SlotOptions = SlotOptions()
    lora: tuple[LoraScale, ...] | None = None
    speculate: bool | None = None
    stop_indent: int = 0
    max_predict_ms: float | None = None
    extras: Extras = Extras()
    affinity: str | None = None
    choice: int = 0
    timeout_s: float | None = None
    tenant: str = ""

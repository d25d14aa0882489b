"""Chat templates: messages to prompt text, the way `transformers` renders them, in a sandbox.

A template is code that came with the model. It runs in Jinja's immutable sandbox with a bound on its output, and
whatever goes wrong in it is the request's error: which roles and orders are allowed is the template's to say.

What a template can take is found by rendering probes once, never by looking at its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.nodes import Node
from jinja2.parser import Parser

from protocols.errors import InvalidRequest
from protocols.request import ImagePart, Message, Tool

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models that bring no template: the format most fine-tunes without one were trained on."""

_MAX_OUTPUT_CHARS = 16 * 1024 * 1024
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

_FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What Python raises in a template that computes with something it did not expect."""

_TemplateMessage = dict[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """One model's template. `bos_token` and `eos_token` are texts; `now` is the clock behind `strftime_now`."""

    def __init__(
        self,
        source: str = "",
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
        max_output_chars: int = _MAX_OUTPUT_CHARS,
    ) -> None:
        """Raises `ValueError` with one line when `source` is not a template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source or CHATML)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._max_output_chars = max_output_chars

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """`kwargs` are the client's variables for the template; those that are set here are not theirs to set."""
        if clash := _RESERVED & kwargs.keys():
            raise InvalidRequest(f"The chat template sets {min(clash)!r} itself", param="chat_template_kwargs")
        try:
            return self._render([self._adapt(m) for m in messages], _tool_values(tools), add_generation_prompt, kwargs)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"The chat template refused the messages: {error.message}", param="messages"
            ) from error
        except _FAILURES as error:
            raise InvalidRequest(f"The chat template failed on the messages: {error}", param="messages") from error

    def _render(
        self,
        messages: list[_TemplateMessage],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        parts: list[str] = []
        length = 0
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        for part in self._template.generate({**kwargs, **self._tokens, **given}):
            parts.append(part)
            length += len(part)
            if length > self._max_output_chars:
                raise ValueError(f"it produced more than {self._max_output_chars} characters")
        return "".join(parts)

    # --- what the template can take ---

    def _adapt(self, message: Message) -> _TemplateMessage:
        """The message as templates expect it. Content is always a string: every template can print one."""
        for part in message.content:
            if isinstance(part, ImagePart):
                raise InvalidRequest("This model does not take images", param="messages")
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        value: _TemplateMessage = {"role": role, "content": message.text}
        if message.reasoning is not None:
            value["reasoning_content"] = message.reasoning
        if message.tool_calls:
            value["tool_calls"] = [
                _tool_call(c.id, c.name, _object_or_text(c.arguments) if self._wants_objects else c.arguments)
                for c in message.tool_calls
            ]
        for key, text in (("tool_call_id", message.tool_call_id), ("name", message.name)):
            if text is not None:
                value[key] = text
        return value

    @cached_property
    def _knows_developer(self) -> bool:
        """A template that treats this role like any made-up one does not know it: it prints or drops them all."""
        known, unknown = (self._probe([{"role": role, "content": "c"}, _USER]) for role in ("developer", "zzrolezz"))
        return known is not None and (unknown is None or known != unknown.replace("zzrolezz", "developer"))

    @cached_property
    def _wants_objects(self) -> bool:
        """Most templates print a call's arguments through `tojson`; some print the JSON text they are given."""
        call = _tool_call("call_0", "f", {"probe": "zzvaluezz"})
        text = self._probe([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, _USER])
        return text is None or '"zzvaluezz"' in text or "zzvaluezz" not in text

    def _probe(self, messages: list[_TemplateMessage]) -> str | None:
        try:
            return self._render(messages, None, True, {})
        except (jinja2.TemplateError, *_FAILURES):
            return None  # a template that refuses the probe gives the answer as well


_USER: _TemplateMessage = {"role": "user", "content": "c"}


def _tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _object_or_text(arguments: str) -> Any:
    """The model wrote the arguments, so they may be no JSON at all; then the text itself is the best there is."""
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return arguments


def _tool_values(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """OpenAI's shape. None, not an empty list, without tools: templates ask `is not none` and `if tools` alike."""
    values: list[dict[str, Any]] = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
        if tool.description:
            function["description"] = tool.description
        values.append({"type": "function", "function": function})
    return values or None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

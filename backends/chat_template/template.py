"""A model's templates, and what a `ChatPrompt` becomes under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec

from backends.chat_template.abilities import EFFORTS, Abilities, Value, probe
from backends.chat_template.adapt import adapted, check_images, tool_values
from backends.chat_template.budget import BASE_STEPS
from backends.chat_template.sandbox import FAILURES, Sandbox, to_json
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, Message, Reasoning, TextPart, ToolCall

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models that bring no template: the format most fine-tunes without one were trained on."""

_PROBE_STEPS = 200_000
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
_NO_EFFORT = ("none", "no_think")
_CUT = "zzcut0here"

Clock = Callable[[], datetime]


class ChatTemplates:
    """The named templates of one model: `default`, and where there is one `tool_use` for requests with tools."""

    def __init__(self, sources: Mapping[str, str], *, clock: Clock, bos_token: str = "", eos_token: str = "") -> None:
        """`clock` is what `strftime_now` shows. Raises `ValueError` with one line for what is not a template."""
        self._templates = {
            name: ChatTemplate(source, clock=clock, bos_token=bos_token, eos_token=eos_token)
            for name, source in {**sources, "default": sources.get("default") or CHATML}.items()
            if source
        }

    def render(self, prompt: ChatPrompt) -> str:
        return self.of(prompt).render(prompt)

    def of(self, prompt: ChatPrompt) -> ChatTemplate:
        name = "tool_use" if prompt.tools and "tool_use" in self._templates else "default"
        return self._templates[name]


class ChatTemplate:
    """One template. Safe on any thread. `bos_token` and `eos_token` are texts."""

    def __init__(self, source: str, *, clock: Clock, bos_token: str = "", eos_token: str = "") -> None:
        """Takes some tenths of a second. Raises `ValueError` with one line when `source` is not a template."""
        self._sandbox = Sandbox()
        self._template = self._sandbox.compiled(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._clock = clock
        self.abilities = self._probed()

    def _probed(self) -> Abilities:
        now = self._clock()  # one for all, so that only what is probed makes a difference

        def attempt(
            messages: Sequence[Value], tools: Sequence[Value], generate: bool, variables: Mapping[str, Any]
        ) -> str | None:
            try:
                return self._run(list(messages), list(tools), generate, variables, now, _PROBE_STEPS)
            except FAILURES:
                return None  # a template that refuses the probe gives the answer as well

        return probe(attempt)

    def render(self, prompt: ChatPrompt) -> str:
        """The text of the prompt, up to where the model goes on.

        Tools are shown under every `tool_choice`, so that choosing differently in one turn keeps what is cached.
        `InvalidRequest` if the template refuses the messages in every form that they can be given.
        """
        self._check(prompt)
        now = self._clock()
        refusal: Exception | None = None
        for can in (self.abilities, *_fallbacks(self.abilities)):
            try:
                return self._rendered(prompt, can, now)
            except FAILURES as error:
                refusal = refusal or error
        assert refusal is not None
        raise _refused(refusal) from refusal

    def sample_call(self) -> str | None:
        """What the template makes of a message that calls a tool; None if it has no form for that."""
        if not self.abilities.calls:
            return None
        call = ToolCall("call_0", "f", '{"x": 1}')
        prompt = ChatPrompt((Message("user", (TextPart("x"),)), Message("assistant", tool_calls=(call,))))
        return self.render(prompt)

    def _check(self, prompt: ChatPrompt) -> None:
        """Those that are set here are not a client's to set."""
        if clash := _RESERVED & prompt.template_kwargs.keys():
            raise InvalidRequest(f"The chat template sets {min(clash)!r} itself", param="chat_template_kwargs")
        thinking = prompt.template_kwargs.get("enable_thinking")
        if thinking is not None and not isinstance(thinking, bool):
            raise InvalidRequest("enable_thinking must be true or false", param="chat_template_kwargs.enable_thinking")
        check_images(prompt.messages)
        if prompt.continues:
            last = prompt.messages[-1] if prompt.messages else None
            if last is None or last.role != "assistant" or last.tool_calls:
                raise InvalidRequest(
                    "Only a last message of the assistant, without tool calls, can be continued", param="messages"
                )

    def _rendered(self, prompt: ChatPrompt, can: Abilities, now: datetime) -> str:
        variables = thinking(prompt.reasoning, can) | prompt.template_kwargs
        tools = tool_values(prompt.tools) if can.tools else []

        def run(messages: Sequence[Message], generate: bool) -> str:
            return self._run(adapted(messages, prompt.tools, can), tools, generate, variables, now)

        if not prompt.continues:
            return run(prompt.messages, prompt.opens)
        *before, last = prompt.messages
        if not last.text and not last.reasoning:
            return run(before, True)
        if last.text:
            marked = msgspec.structs.replace(last, content=(TextPart(last.text + _CUT),))
        else:
            marked = msgspec.structs.replace(last, reasoning=f"{last.reasoning}{_CUT}")
        text, found, _ = run([*before, marked], False).rpartition(_CUT)
        if found:
            return text
        if not last.text:
            raise InvalidRequest("This model's chat template cannot continue reasoning", param="messages")
        return run(before, True) + last.text

    def _run(
        self,
        messages: list[Value],
        tools: list[Value],
        generate: bool,
        variables: Mapping[str, Any],
        now: datetime,
        steps: int = BASE_STEPS,
    ) -> str:
        given = {
            "messages": messages,
            "functions": to_json(tools, indent=2) if tools else "",  # Firefunction's names for it
            "datetime": now.strftime("%b %d %Y"),
            "tools": tools or None,  # templates ask `is not none` and `if tools` alike
            "add_generation_prompt": generate,
        }
        today = {"date_string": now.strftime("%d %b %Y")}  # Llama 3's name for it; without one it is July 2024
        return self._sandbox.run(self._template, {**today, **variables, **self._tokens, **given}, now, steps=steps)


def _fallbacks(can: Abilities) -> tuple[Abilities, Abilities]:
    """What may still work where the probes promised too much: text in turns, and then only that."""
    turns = msgspec.structs.replace(
        can, alternation=True, calls=False, results=False, system="none" if can.system == "none" else "first"
    )
    return turns, msgspec.structs.replace(turns, tools=False, system="none")


def thinking(reasoning: Reasoning, can: Abilities) -> dict[str, Any]:
    """The template's variables for it. To think no token is not to think."""
    enabled = False if reasoning.effort == "none" or reasoning.budget_tokens == 0 else reasoning.enabled
    variables: dict[str, Any] = {}
    if enabled is not None:
        variables = {switch.variable: switch.on if enabled else switch.off for switch in can.switches}
    if can.effort_variable and (effort := _effort(reasoning.effort, enabled, can)) is not None:
        variables[can.effort_variable] = effort
    if can.budget_variable and (reasoning.budget_tokens is not None or enabled is False):
        variables[can.budget_variable] = 0 if enabled is False else reasoning.budget_tokens
    return variables


def _effort(wanted: str | None, enabled: bool | None, can: Abilities) -> str | None:
    if enabled is False:
        # Where nothing turns it off, the least; where something does, a word only if it is one for that.
        least = can.efforts[0] if can.efforts else "low"
        return least if not can.switches or least in _NO_EFFORT else None
    words = [word for word in can.efforts if word not in _NO_EFFORT]
    if wanted is None or not words or wanted not in EFFORTS:
        return wanted
    return min(words, key=lambda word: abs(EFFORTS.index(word) - EFFORTS.index(wanted)))


def _refused(error: Exception) -> InvalidRequest:
    if isinstance(error, jinja2.TemplateError):
        return InvalidRequest(f"The chat template refused the messages: {error.message}", param="messages")
    return InvalidRequest(f"The chat template failed on the messages: {error}", param="messages")

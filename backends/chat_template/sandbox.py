"""Runs a template that came with a model from anywhere: no attributes, files or randomness, bounded time and memory.

Jinja's sandbox keeps templates from attributes and from changing what they are given. It bounds neither time nor
memory, so the tree of a template is rewritten before it is compiled: loops and calls pay from a `Budget`, and so does
every value on its way from one expression to another. Nothing is computed at compile time, before there is a budget.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from backends.chat_template.budget import BASE_STEPS, CHARS_PER_STEP, MAX_CHARS, Budget, TooExpensive, check_chars

MAX_SOURCE_CHARS = 1024 * 1024
_MAX_WIDTH = 1_000
_MAX_BITS = 4_096

_LEFT_OUT = {"attr", "pprint", "random", "urlize", "wordwrap", "xmlattr"}
_CHEAP = {"count", "d", "default", "first", "last", "length"}
"""Filters that take the same time however large their value is."""

FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, jinja2.TemplateError)
"""What comes out of a template that refuses its messages, or computes with something it did not expect."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Safe on any thread; a thread renders one template at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_printed,
            cache_size=0,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        self._running = threading.local()
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }
        replaced = {"tojson": to_json, "join": self._join, "sum": _sum, "format": self._format}
        self.filters = {
            name: self._paid(name, replaced.get(name, filter))
            for name, filter in self.filters.items()
            if name not in _LEFT_OUT
        }
        self.tests = {name: self._paid_test(test) for name, test in self.tests.items()}

    def compiled(self, source: str) -> jinja2.Template:
        """Raises `ValueError` with one line when `source` is not a template."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"the chat template has more than {MAX_SOURCE_CHARS} characters")
        try:
            return self.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            raise ValueError("the chat template is nested too deeply") from error

    def run(
        self,
        template: jinja2.Template,
        variables: Mapping[str, Any],
        now: datetime,
        *,
        max_chars: int = MAX_CHARS,
        steps: int = BASE_STEPS,
    ) -> str:
        """Raises one of `FAILURES`."""
        previous = getattr(self._running, "state", None)
        self._running.state = (Budget(*variables.values(), steps=steps), now)
        try:
            parts: list[str] = []
            length = 0
            for part in template.generate(dict(variables)):
                parts.append(part)
                length += len(part)
                if length > max_chars:
                    raise TooExpensive(f"it produced more than {max_chars} characters")
            return "".join(parts)
        finally:
            self._running.state = previous

    @property
    def budget(self) -> Budget:
        budget: Budget = self._running.state[0]
        return budget

    # --- called by compiled templates ------------------------------------------------------------

    def tick(self, steps: int) -> None:
        self.budget.spend(steps)

    def measured(self, value: Any) -> Any:
        return self.budget.measured(value)

    def iterated(self, value: Any) -> Any:
        return self.budget.iterated(value)

    def concatenated(self, *parts: Any) -> str:
        texts = [str(self.budget.measured(part)) for part in parts]
        check_chars(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(__obj, "__self__", None)
        if own is __self:
            return __obj(*args)
        __self.budget.spend(1)
        if isinstance(own, str):
            args = __self._checked_method(own, __obj.__name__, args)
        return __self.budget.measured(super().call(__context, __obj, *args, **kwargs))

    def _checked_method(self, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.budget.measured(text)
        match name, args:
            case "replace", (str() as old, str() as new, *_):
                _check_replace(text, old, new)
            case "join", (items,):
                return (self._joinable(items, text),)
            case (("center" | "ljust" | "rjust" | "zfill"), (width, *_)):
                _check_width(width)
            case (("expandtabs" | "translate" | "encode" | "maketrans"), _):
                raise SecurityError(f"the method {name!r} is not available")
        return args

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Kimi's template collects ids in a list. What a template could spoil is its own copy."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\d{4,}|\{[^}]*\{", value.__self__):
            raise TooExpensive("it formats to a width that is computed, or beyond reason")
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "**", int(), int() if abs(left).bit_length() * abs(right) > _MAX_BITS:
                raise TooExpensive("it computes with numbers beyond reason")
            case "*", int(), int() if left.bit_length() + right.bit_length() > _MAX_BITS:
                raise TooExpensive("it computes with numbers beyond reason")
            case "*", (str() | list() | tuple()) as items, int() as times:
                check_chars(len(items) * times)
            case "*", int() as times, (str() | list() | tuple()) as items:
                check_chars(len(items) * times)
            case "%", str(), _:
                _check_percent_format(left)
            case "+", str(), str():
                check_chars(len(left) + len(right))
        return self.budget.measured(super().call_binop(context, operator, left, right))

    # --- filters and globals ------------------------------------------------------------

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        at = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value, behind the context or so

        @functools.wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(1)
            given = list(args)
            if name not in _CHEAP:
                given[at:] = [self.budget.measured(value) for value in given[at:]]
            _check_filter(name, *given[at:], **kwargs)
            return self.budget.measured(function(*given, **kwargs))

        return paid

    def _paid_test(self, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def paid(*args: Any) -> Any:
            for value in args:
                if isinstance(value, str) and len(value) > CHARS_PER_STEP:
                    self.budget.spend(len(value) // CHARS_PER_STEP)
            return function(*args)

        return paid

    def _joinable(self, items: Iterable[Any], separator: str) -> list[Any]:
        found = list(self.budget.measured(items))
        self.budget.measured(found)
        check_chars(len(separator) * len(found))
        return found

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        items = self._joinable(value, d)
        texts = [str(item if attribute is None else self.getitem(item, attribute)) for item in items]
        check_chars(sum(map(len, texts)))
        return d.join(texts)

    def _format(self, value: str, *args: Any, **kwargs: Any) -> Any:
        _check_percent_format(value)
        return value % (kwargs or args)

    def _strftime_now(self, form: str) -> str:
        if len(form) > _MAX_WIDTH or re.search(r"%[^a-zA-Z%]*\d", form):
            raise TooExpensive("it formats the date beyond reason")
        now: datetime = self._running.state[1]
        return now.strftime(form)

    # --- compiling ------------------------------------------------------------

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered(self).visit(source), *args, **kwargs)


class _Metered(NodeTransformer):
    """Puts the calls of `Sandbox` into the tree of a template."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def _call(self, name: str, *args: Any) -> nodes.Expr:
        call = nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)
        call.set_environment(self._environment)
        return call

    def _repeated(self, node: Any) -> Any:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._call("tick", nodes.Const(1 + text // CHARS_PER_STEP)))
        node.body.insert(0, tick)
        return node

    visit_Macro = visit_CallBlock = visit_Block = _repeated

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._repeated(node)
        node.iter = self._call("iterated", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("concatenated", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("measured", node) if isinstance(node.arg, nodes.Slice) else node

    def _container(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._call("measured", node)

    visit_List = visit_Dict = visit_Tuple = _container

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        """Comparing takes as long as its operands are large."""
        self.generic_visit(node)
        parts: list[Any] = [node, *node.ops]
        for part in parts:
            if not isinstance(part.expr, nodes.Const):
                part.expr = self._call("measured", part.expr)
        return node


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@jinja2.pass_context  # so that nothing is printed at compile time
def _printed(context: Context, value: Any) -> Any:
    """Everything that is printed comes through here."""
    assert isinstance(context.environment, Sandbox)
    return context.environment.budget.measured(value)


def _check_filter(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    match name, args:
        case "replace", (old, new, *_):
            _check_replace(str(value), str(old), str(new))
        case (("center" | "batch" | "slice" | "truncate" | "round"), (width, *_)):
            _check_width(width)
        case "indent", (width, *_):
            _check_width(len(width) if isinstance(width, str) else width)
            check_chars(str(value).count("\n") * (len(width) if isinstance(width, str) else width))
    for width in kwargs.values():
        if name in ("center", "batch", "slice", "truncate", "round", "indent") and isinstance(width, int | str):
            _check_filter(name, value, width)


def _check_replace(text: str, old: str, new: str) -> None:
    check_chars(len(text) + text.count(old) * len(new))


def _check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > _MAX_WIDTH:
        raise TooExpensive(f"it formats to a width of more than {_MAX_WIDTH}")


def _check_percent_format(form: str) -> None:
    if re.search(r"%[^a-zA-Z%]*(\*|\d{4,})", form):
        raise TooExpensive("it formats to a width that is computed, or beyond reason")


def _sum(iterable: Iterable[Any], attribute: str | int | None = None, start: int = 0) -> Any:
    """Of numbers: lists could grow with the square of what they are made of."""
    items = [item if attribute is None else item[attribute] for item in iterable]
    if not all(isinstance(item, int | float) for item in (*items, start)):
        raise TypeError("it adds up what are not numbers")
    return sum(items, start)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which models were not trained on."""
    if indent is not None:
        _check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

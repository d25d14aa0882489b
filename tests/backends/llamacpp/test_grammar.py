"""The guarded grammar on the vocabulary of a real model: it forbids what llama.cpp does, and never ends the process."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from protocols.errors import InvalidRequest

c = pytest.importorskip("llama_cpp.llama_cpp", reason="llama-cpp-python is not installed")

from backends.grammar.triggers import Trigger  # noqa: E402
from backends.llamacpp import grammar as grammar_module  # noqa: E402 - needs llama.cpp
from backends.llamacpp.bindings import LlamaCppError  # noqa: E402
from backends.llamacpp.grammar import Grammar, GrammarSpec  # noqa: E402

if TYPE_CHECKING:
    from backends.llamacpp.bindings import Model

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[3]
START = "<|im_start|>"
VALUES = r"""root ::= value
value ::= "{" (string ":" space value ("," space string ":" space value)*)? "}" | string | [0-9]+
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\n])* "\""
space ::= " "?"""


class Candidates:
    """All tokens, equally likely."""

    def __init__(self, model: Model) -> None:
        self.data = np.zeros(model.vocab_size, np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        self.data["id"] = np.arange(model.vocab_size)
        self.array = c.llama_token_data_array(
            data=self.data.ctypes.data_as(c.llama_token_data_p), size=model.vocab_size, selected=-1, sorted=False
        )

    def left(self) -> set[int]:
        return set(self.data["id"][self.data["logit"] > -math.inf].tolist())


def tokens_of(model: Model, text: str) -> list[int]:
    return list(model.tokenize(text, add_special=False, parse_special=True).tolist())


def token_of(model: Model, text: str) -> int:
    (token,) = tokens_of(model, text)
    return token


def end_of(model: Model) -> int:
    return min(model.end_tokens)


@pytest.fixture
def made(model: Model) -> Iterator[Any]:
    """Makes grammars, and closes them."""
    grammars: list[Grammar] = []

    def make(gbnf: str, **fields: Any) -> Grammar:
        grammars.append(Grammar(model, GrammarSpec(gbnf, **fields)))
        return grammars[-1]

    yield make
    for grammar in grammars:
        grammar.close()


def feed(grammar: Grammar, model: Model, text: str) -> bool:
    """False at the first token that is not allowed."""
    for token in tokens_of(model, text):
        if not grammar.allows(token):
            return False
        grammar.accept(token)
    return True


def test_text_and_its_end(made: Any, model: Model) -> None:
    grammar = made(VALUES)
    assert not grammar.awaiting
    assert feed(grammar, model, '{"a": {"é🙂": 12')
    assert not grammar.is_complete
    assert not grammar.allows(end_of(model))
    assert feed(grammar, model, '}, "b": "日本語"}')
    assert grammar.is_complete
    assert all(grammar.allows(token) for token in model.end_tokens)
    assert not feed(grammar, model, "x")
    grammar.accept(end_of(model))


def test_what_is_forbidden_is_not_accepted(made: Any, model: Model) -> None:
    grammar = made(VALUES)
    for token in (token_of(model, "x"), end_of(model)):
        with pytest.raises(LlamaCppError, match="does not allow"):
            grammar.accept(token)
    for token in (-1, model.vocab_size):
        with pytest.raises(LlamaCppError, match="outside the vocabulary"):
            grammar.allows(token)
    assert feed(grammar, model, '{"a": 1}')


@pytest.mark.parametrize(
    ("gbnf", "text"),
    [
        (VALUES, '{"é": "🙂 a'),
        ("root ::= [^a-zé]+ | .{3} | [é-ü🙂]*", "é"),
        ('root ::= "🙂" [^é]*', "🙂"),
        (f'root ::= !<[5]>{{2}} {START} "a"', "xy"),
    ],
)
def test_equals_llama_cpp_on_every_token(made: Any, model: Model, gbnf: str, text: str) -> None:
    """At each token of `text`, of which some are parts of characters."""
    grammar = made(gbnf.replace(START, f"<[{token_of(model, START)}]>"))
    candidates = Candidates(model)
    for token in [*tokens_of(model, text), None]:
        candidates.data["logit"] = 0
        c.llama_sampler_apply(grammar.handle, ctypes.byref(candidates.array))
        natively = candidates.left()
        matcher, state = grammar._matcher, grammar._state
        ours = {
            t
            for t in range(model.vocab_size)
            if t not in model.end_tokens and matcher.advance(state, t, grammar_module._text(model, t)) is not None
        }
        assert ours == natively - model.end_tokens
        assert grammar.is_complete is bool(natively & model.end_tokens)
        if token is not None:
            grammar.accept(token)


def test_mask(made: Any, model: Model) -> None:
    grammar, candidates = made('root ::= "ab" | "b"'), Candidates(model)
    assert grammar.mask(candidates.array) == 3
    assert {model.piece(token) for token in candidates.left()} == {b"a", b"ab", b"b"}
    assert feed(grammar, model, "ab")
    candidates.data["logit"] = 0
    assert grammar.mask(candidates.array) == len(model.end_tokens)
    empty = c.llama_token_data_array(data=None, size=0, selected=-1, sorted=False)
    assert grammar.mask(empty) == 0
    candidates.data["id"][3] = model.vocab_size
    with pytest.raises(LlamaCppError, match="outside the vocabulary"):
        grammar.mask(candidates.array)


def test_a_text_that_no_token_continues(made: Any, model: Model) -> None:
    grammar, candidates = made('root ::= "a" [\\x00]'), Candidates(model)
    assert feed(grammar, model, "a")
    assert grammar.mask(candidates.array) == 0


def test_a_token_that_reaches_into_a_token_rule(made: Any, model: Model) -> None:
    """llama.cpp's mask lets it pass, and its accept ends the process."""
    grammar, candidates = made('root ::= "a" !<[5]>'), Candidates(model)
    token = token_of(model, "ab")
    grammar.mask(candidates.array)
    assert token in candidates.left()
    assert not grammar.allows(token)
    grammar.mask(candidates.array)
    assert token not in candidates.left()
    assert feed(grammar, model, "a")
    assert grammar.allows(token)


def test_token_rules(made: Any, model: Model) -> None:
    grammar = made(f'root ::= {START} "a" !{START}* {START}')
    assert feed(grammar, model, f"{START}a b c{START}")
    assert grammar.is_complete
    for rule, message in [
        ("<no such token>", "is not one token"),
        (f"<[{model.vocab_size}]>", "outside the vocabulary"),
        (f"<[{end_of(model)}]>", "ends a text"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            made(f"root ::= {rule}")


def test_clones_go_their_own_ways(made: Any, model: Model) -> None:
    grammar = made(VALUES)
    assert feed(grammar, model, '{"a": ')
    with closing(grammar.clone()) as clone:
        assert feed(clone, model, '"x"}')
        assert clone.is_complete
        assert not grammar.is_complete
    assert feed(grammar, model, "12}")
    assert grammar.is_complete


def test_closed(model: Model) -> None:
    grammar = Grammar(model, GrammarSpec(VALUES))
    grammar.close()
    grammar.close()
    with pytest.raises(LlamaCppError, match="closed"):
        grammar.allows(token_of(model, "{"))
    with pytest.raises(LlamaCppError, match="closed"):
        grammar.clone()


# --- lazy --------------------------------------------------------------------

CALL = 'root ::= "<tool>" [a-z]+ "</tool>"'


def word(value: str) -> tuple[Trigger, ...]:
    return (Trigger("word", value),)


def test_a_word_in_the_text_triggers(made: Any, model: Model) -> None:
    grammar, candidates = made(CALL, lazy=True, triggers=word("<tool>")), Candidates(model)
    assert feed(grammar, model, "Let me see: a < b, <tools, 🙂. ")
    assert grammar.awaiting
    assert grammar.is_complete
    assert grammar.allows(end_of(model))
    assert grammar.mask(candidates.array) == model.vocab_size
    assert feed(grammar, model, "<tool>")
    assert not grammar.awaiting
    assert not grammar.allows(end_of(model))
    assert not grammar.allows(token_of(model, "7"))
    assert feed(grammar, model, "abc</tool>")
    assert grammar.is_complete


def test_a_trigger_that_begins_and_ends_inside_tokens(made: Any, model: Model) -> None:
    """Of the first token only the end counts, and of the last one all of it has to fit."""
    grammar = made('root ::= "oo" "ba"', lazy=True, triggers=word("oob"))
    foo, baz, ba = token_of(model, "foo"), token_of(model, "baz"), token_of(model, "ba")
    assert grammar.allows(foo)
    grammar.accept(foo)
    assert grammar.awaiting
    assert not grammar.allows(baz)
    candidates = Candidates(model)
    assert grammar.mask(candidates.array) == model.vocab_size - 1
    grammar.accept(ba)
    assert not grammar.awaiting
    assert grammar.is_complete
    assert not grammar.allows(foo)
    with closing(grammar.clone()) as clone:
        assert clone.is_complete


def test_a_preserved_token_triggers(made: Any, model: Model) -> None:
    token = token_of(model, START)
    with pytest.raises(
        InvalidRequest, match=r"^Grammar trigger word should be marked as preserved token: <\|im_start\|>"
    ):
        made(f'root ::= "{START}a"', lazy=True, triggers=word(START))
    grammar = made(f'root ::= "{START}a"', lazy=True, triggers=word(START), preserved=(START, "two tokens"))
    assert grammar.preserved == {token}
    assert feed(grammar, model, "anything")
    assert grammar.awaiting
    assert feed(grammar, model, f"{START}a")
    assert grammar.is_complete
    assert not grammar.awaiting
    by_id = made(f"root ::= {START} [a-z]", lazy=True, triggers=(Trigger("token", token=token),))
    assert feed(by_id, model, f"x{START}b")


def test_patterns_trigger(made: Any, model: Model) -> None:
    triggers = (Trigger("pattern", r"call\s*(\{)"), Trigger("pattern_full", r"<think>[\s\S]*</think>\s*(\{)"))
    for text in ("I call \n{", "<think>é { 🙂</think> {"):
        grammar = made('root ::= "{" [a-z] "}"', lazy=True, triggers=triggers)
        assert feed(grammar, model, text), text
        assert not grammar.awaiting
        assert not grammar.allows(token_of(model, "7"))
        assert feed(grammar, model, "x}")
        assert grammar.is_complete
    grammar = made('root ::= "{" [a-z] "}"', lazy=True, triggers=triggers)
    assert feed(grammar, model, "no call, {7}")
    assert grammar.awaiting


@pytest.mark.parametrize(
    ("gbnf", "triggers", "message"),
    [
        (CALL, (), r"^no triggers set for lazy grammar!$"),
        (CALL, word(""), "without a value"),
        (CALL, (Trigger("pattern", "(["),), "Invalid grammar trigger pattern"),
        (CALL, (Trigger("token", token=10**6),), "does not exist"),
        (CALL, word("call:"), "does not begin with its trigger 'call:'"),
        (CALL, (Trigger("token", token=5),), "does not begin with its trigger 5"),
        (CALL, (Trigger("word", "<tool>"),) * 65, "More than 64"),
    ],
)
def test_wrong_triggers(made: Any, gbnf: str, triggers: tuple[Trigger, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        made(gbnf, lazy=True, triggers=triggers)
    assert caught.value.param == "grammar_triggers"


# --- what would end the process ----------------------------------------------

PRELUDE = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from backends.llamacpp.bindings import LlamaCppError, Model
from backends.llamacpp.grammar import Grammar, GrammarSpec
from backends.grammar.triggers import Trigger
from backends.model_source import resolve_model
from protocols.errors import InvalidRequest

model = Model(resolve_model(sys.argv[1]), repack=False)


def tokens(text):
    return model.tokenize(text, add_special=False, parse_special=True).tolist()


def refused(error, action):
    try:
        action()
    except error as caught:
        print("refused:", str(caught)[:100])
    else:
        raise SystemExit("it was not refused")
"""

GRAMMARS = {
    "a syntax error": '"root ::= ["',
    "no root": """'x ::= "a"'""",
    "an undefined rule": '"root ::= secret"',
    "deep nesting": """"root ::= " + "(" * 120_000 + '"a"' + ")" * 120_000""",
    "a long chain": """"root ::= a0\\n" + "".join(f"a{i} ::= a{i + 1}\\n" for i in range(9000)) + 'a9000 ::= "a"'""",
    "doubling": """"".join(f"a{i} ::= a{i + 1} | a{i + 1}\\n" for i in range(40)) + 'a40 ::= ""\\nroot ::= a0'""",
    "bounds upside down": """'root ::= "a"{5,2}'""",
    "hidden left recursion": """'root ::= a root "z" | "x"\\na ::= b\\nb ::= "" | "y"'""",
    "nothing to begin with": """'root ::= n root\\nn ::= m\\nm ::= ""'""",
}
ACTIONS = {
    "bad patterns": """
        for pattern in ("([", "a{9", "*", "[z-a]", "[[:nope:]]", "(?<=a)", "\\\\9"):
            triggers = (Trigger("pattern", pattern),)
            refused(InvalidRequest, lambda: Grammar(model, GrammarSpec('root ::= "a"', lazy=True, triggers=triggers)))
    """,
    "an end too early": """
        grammar = Grammar(model, GrammarSpec('root ::= "ab"'))
        refused(LlamaCppError, lambda: grammar.accept(min(model.end_tokens)))
    """,
    "a forbidden token": """
        grammar = Grammar(model, GrammarSpec('root ::= "ab"'))
        refused(LlamaCppError, lambda: grammar.accept(tokens("x")[0]))
    """,
    "a token across a token rule": """
        grammar = Grammar(model, GrammarSpec('root ::= "a" !<[5]>'))
        refused(LlamaCppError, lambda: grammar.accept(tokens("ab")[0]))
    """,
    "a trigger that does not fit": """
        grammar = Grammar(model, GrammarSpec('root ::= "x"', lazy=True, triggers=(Trigger("pattern", "foo"),)))
        refused(LlamaCppError, lambda: grammar.accept(tokens("foo")[0]))
    """,
    "a long text before the trigger": """
        triggers = (Trigger("pattern_full", "[\\\\s\\\\S]*?(<tool>)"),)
        grammar = Grammar(model, GrammarSpec('root ::= "<tool>" "a"', lazy=True, triggers=triggers))
        for token in tokens("word " * 15_000) + tokens(".<tool>a"):
            grammar.accept(token)
        print("refused: nothing", grammar.is_complete)
    """,
    "an ambiguous grammar": """
        gbnf = 'root ::= e\\ne ::= " " e x | " " e y | "b"\\nx ::= "x"\\ny ::= "y"'
        grammar = Grammar(model, GrammarSpec(gbnf))
        refused(InvalidRequest, lambda: [grammar.accept(token) for token in tokens(" " * 64)])
    """,
}


def in_a_process(demo_model: str, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), demo_model],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused: " in done.stdout
    return done.stdout + done.stderr


def test_dangerous_grammars_are_refused(demo_model: str) -> None:
    """In one process that lives through all of them, and does not write them to its log."""
    script = "\n".join(f"refused(InvalidRequest, lambda: Grammar(model, GrammarSpec({g})))" for g in GRAMMARS.values())
    output = in_a_process(demo_model, script)
    assert (output.count("refused: Invalid grammar: "), output.count("secret")) == (len(GRAMMARS), 1), output


@pytest.mark.parametrize("name", ACTIONS)
def test_dangerous_actions_are_refused(demo_model: str, name: str) -> None:
    in_a_process(demo_model, ACTIONS[name])

"""A grammar as plain rules, and what llama.cpp can bear of them.

llama.cpp follows a rule's leftmost parts recursively, and keeps one explicit stack per way to read the text so far.
`check` refuses the rules on which that never ends, or grows without bound, or meets an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from protocols.errors import InvalidRequest

MAX_ELEMENTS = 100_000
MAX_LEFT_PATHS = 50_000
MAX_LEFT_DEPTH = 2_500


class CharSet(msgspec.Struct, frozen=True):
    """One character. `ranges` are code points, both ends included."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def matches(self, char: int) -> bool:
        return any(low <= char <= high for low, high in self.ranges) is not self.negated

    def may_match(self, low: int, high: int) -> bool:
        """Whether a character that is only known to lie in this range may match; llama.cpp's approximation."""
        return any(low <= last and first <= high for first, last in self.ranges) is not self.negated


class Ref(msgspec.Struct, frozen=True):
    rule: int


class TokenRef(msgspec.Struct, frozen=True):
    """`<text>` or `<[id]>`: one token as a whole; negated, any one other token."""

    token: str | int
    negated: bool = False


class End(msgspec.Struct, frozen=True):
    """Closes each alternate."""


END = End()
ANY_CHAR = CharSet(((0, 0x10FFFF),))
Symbol = Ref | CharSet | TokenRef | End


class Rules(msgspec.Struct, frozen=True):
    """`symbols` is every alternate of every rule, one after the other; `starts[rule]` is where its alternates begin."""

    names: tuple[str, ...]
    starts: tuple[tuple[int, ...], ...]
    symbols: tuple[Symbol, ...]
    root: int
    endless: tuple[str, ...]
    """Rules that no finite text can satisfy. llama.cpp takes them; text under them never ends by itself."""

    @property
    def tokens(self) -> Iterator[TokenRef]:
        return (symbol for symbol in self.symbols if isinstance(symbol, TokenRef))


Alternate = list[Symbol]


def invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid grammar: {why}.", param="grammar")


def flatten(names: list[str], rules: list[list[Alternate]], root: int, endless: Iterable[int]) -> Rules:
    symbols: list[Symbol] = []
    starts = []
    for alternates in rules:
        begin = []
        for alternate in alternates:
            begin.append(len(symbols))
            symbols += [*alternate, END]
        starts.append(tuple(begin))
    # A generated rule is called like the one it was written in, and a number.
    named = tuple(dict.fromkeys(names[rule].partition("_")[0] for rule in endless))
    return Rules(tuple(names), tuple(starts), tuple(symbols), root, named)


class _Left(msgspec.Struct, frozen=True):
    """`rule` may be the first thing that an alternate of another rule meets."""

    rule: int
    hidden: bool  # behind something that may be empty
    more: bool  # and something follows, to be remembered meanwhile


def check(names: list[str], rules: list[list[Alternate]]) -> list[int]:
    """Raises for what llama.cpp cannot bear. Returns the rules that no finite text satisfies."""
    nullable = _fixpoint(rules, lambda alternate, known: all(isinstance(s, Ref) and s.rule in known for s in alternate))

    def begins(alternate: Alternate, known: set[int]) -> bool:
        for symbol in alternate:
            if not isinstance(symbol, Ref) or symbol.rule in known:
                return True
            if symbol.rule not in nullable:
                return False
        return False

    begun = _fixpoint(rules, begins)
    for rule, name in enumerate(names):
        if rule not in begun and rule not in nullable:
            raise invalid(f"the rule '{name.partition('_')[0]}' leads to itself before it reaches any text")
    left = [list(_left_edges(alternates, nullable)) for alternates in rules]
    plain = [[edge for edge in edges if not edge.hidden] for edges in left]
    for component, edges in ((c, e) for e in (plain, left) for c in _components(e)):
        inside = set(component)
        for rule in component:
            if any(edge.rule in inside and (edge.more or edges is plain) for edge in edges[rule]):
                raise invalid(f"the rule '{names[rule].partition('_')[0]}' is left-recursive: it begins with itself")
    _check_size(names, left, rules)
    finite = _fixpoint(rules, lambda alternate, known: all(s.rule in known for s in alternate if isinstance(s, Ref)))
    return [rule for rule in range(len(rules)) if rule not in finite]


def _fixpoint(rules: list[list[Alternate]], holds: Callable[[Alternate, set[int]], bool]) -> set[int]:
    """The rules that have an alternate which `holds`, given the rules already known to: the smallest such set."""
    users: dict[int, list[int]] = {}
    for rule, alternates in enumerate(rules):
        for symbol in {symbol.rule for alternate in alternates for symbol in alternate if isinstance(symbol, Ref)}:
            users.setdefault(symbol, []).append(rule)
    known: set[int] = set()
    todo = list(range(len(rules)))
    while todo:
        rule = todo.pop()
        if rule not in known and any(holds(alternate, known) for alternate in rules[rule]):
            known.add(rule)
            todo += users.get(rule, [])
    return known


def _left_edges(alternates: list[Alternate], nullable: set[int]) -> Iterator[_Left]:
    for alternate in alternates:
        for index, symbol in enumerate(alternate):
            if not isinstance(symbol, Ref):
                break
            yield _Left(symbol.rule, hidden=index > 0, more=index + 1 < len(alternate))
            if symbol.rule not in nullable:
                break


def _components(edges: list[list[_Left]]) -> Iterator[list[int]]:
    """Strongly connected components, each after those it leads to (Tarjan's algorithm, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in range(len(edges)):
        if root in order:
            continue
        walk = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while walk:
            rule, rest = walk[-1]
            for edge in rest:
                if edge.rule not in order:
                    order[edge.rule] = low[edge.rule] = len(order)
                    stack.append(edge.rule)
                    on_stack.add(edge.rule)
                    walk.append((edge.rule, iter(edges[edge.rule])))
                    break
                if edge.rule in on_stack:
                    low[rule] = min(low[rule], order[edge.rule])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[rule])
                if low[rule] == order[rule]:
                    component = [stack.pop()]
                    while component[-1] != rule:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    yield component


def _check_size(names: list[str], left: list[list[_Left]], rules: list[list[Alternate]]) -> None:
    """llama.cpp walks every leftmost path, and walks them recursively."""
    paths: dict[int, int] = {}
    depth: dict[int, int] = {}
    for component in _components(left):
        for rule in component:  # what leads back into its own component has been found harmless
            paths[rule] = len(rules[rule]) + sum(paths.get(edge.rule, 0) for edge in left[rule])
            depth[rule] = 1 + max((depth.get(edge.rule, 0) for edge in left[rule]), default=0)
            if paths[rule] > MAX_LEFT_PATHS or depth[rule] > MAX_LEFT_DEPTH:
                raise invalid(
                    f"the rule '{names[rule].partition('_')[0]}' has too many, or too deeply nested, ways to begin"
                )

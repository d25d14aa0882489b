"""JSON numbers between bounds, as GBNF. Digits are compared from the left, so a range becomes a tree of digits."""

from __future__ import annotations

from decimal import Decimal

from backends.grammar.schema_rules import MAX_DIGITS, either

MAX_BOUND_DIGITS = 40
"""In a bound, before the point or after it."""


def integers(low: int | None, high: int | None) -> str | None:
    """None if there is none. A side without a bound has up to `MAX_DIGITS` digits, or as many as the other side."""
    digits = max(MAX_DIGITS, *(len(str(abs(bound))) for bound in (low, high) if bound is not None), 0)
    low = 1 - 10**digits if low is None else low
    high = 10**digits - 1 if high is None else high
    if low > high:
        return None
    options = []
    if low < 0:
        options.append('"-" ' + _naturals(max(-high, 1), -low))
    if high >= 0:
        options.append(_naturals(max(low, 0), high))
    return either(options)


def _naturals(low: int, high: int) -> str:
    options: list[str] = []
    full: list[int] = []  # numbers of digits of which every number will do
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = min(high, 10**digits - 1)
        if digits > 1 and (first, last) == (10 ** (digits - 1), 10**digits - 1):
            full.append(digits)
        else:
            options.append(_same_length(str(first), str(last)))
    if full:
        options.append("[1-9] " + _digits(full[0] - 1, full[-1] - 1))
    return either(options)


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    if low[0] == high[0]:
        return f'"{low[0]}" {_same_length(low[1:], high[1:])}'.rstrip()
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    options = []
    if low[1:].strip("0"):
        options.append(f'"{low[0]}" {_same_length(low[1:], "9" * rest)}')
        first += 1
    if high[1:].strip("9"):
        options.append(f'"{high[0]}" {_same_length("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        options.append(f"{_digit(first, last)} {_digits(rest, rest)}".rstrip())
    return either(options)


def _digit(first: int, last: int) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _digits(low: int, high: int) -> str:
    if high <= 0:
        return ""
    return "[0-9]" if low == high == 1 else f"[0-9]{{{low}}}" if low == high else f"[0-9]{{{low},{high}}}"


class Bound:
    """One end of a range of decimals. `open`: the number itself is not in it."""

    def __init__(self, value: Decimal, is_open: bool) -> None:
        self.value = value
        self.open = is_open

    @property
    def whole(self) -> int:
        return int(self.value)

    @property
    def fraction(self) -> str:
        """The digits after the point, without zeros at the end."""
        return format(abs(self.value), "f").partition(".")[2].rstrip("0")


def decimals(low: Bound | None, high: Bound | None, places: int = MAX_DIGITS) -> str | None:
    """Numbers without an exponent, with up to `places` digits after the point. None if there is none."""
    if low is not None and high is not None:
        if low.value > high.value or (low.value == high.value and (low.open or high.open)):
            return None
    options = []
    zero = Decimal(0)
    if low is None or low.value < 0:
        # The negative ones, by their absolute value; zero has no sign here.
        nearest = Bound(-high.value, high.open) if high is not None and high.value < 0 else Bound(zero, True)
        farthest = None if low is None else Bound(-low.value, low.open)
        if negative := _positive(nearest, farthest, places):
            options.append('"-" ' + negative)
    if high is None or high.value >= 0:
        nearest = low if low is not None and low.value >= 0 else Bound(zero, False)
        if positive := _positive(nearest, high, places):
            options.append(positive)
    return either(options) if options else None


def _positive(low: Bound, high: Bound | None, places: int) -> str | None:
    top = max(10**MAX_DIGITS, 10 ** (len(str(low.whole)) + 1)) - 1 if high is None else high.whole - 1
    options = []
    if high is not None and low.whole == high.whole:
        if (same := _fraction(low.fraction, low.open, (high.fraction, high.open), places)) is not None:
            options.append(f'"{low.whole}" {same}'.rstrip())
    else:
        if (above := _fraction(low.fraction, low.open, None, places)) is not None:
            options.append(f'"{low.whole}" {above}'.rstrip())
        if high is not None and high.whole > low.whole:
            if (below := _fraction("", False, (high.fraction, high.open), places)) is not None:
                options.append(f'"{high.whole}" {below}'.rstrip())
        if low.whole + 1 <= top:
            any_fraction = _fraction("", False, None, places)
            options.append(f"{_naturals(low.whole + 1, top)} {any_fraction}".rstrip())
    return either(options) if options else None


Upper = tuple[str, bool] | None


def _fraction(low: str, low_open: bool, high: Upper, places: int) -> str | None:
    """The point and what follows, or nothing, such that the digits lie between `low` and `high`."""
    digits = _tail(low, low_open, high, places)
    without = not low and not low_open and (high is None or bool(high[0]) or not high[1])
    if digits is None:
        return "" if without else None
    return f'("." {digits})?' if without else f'"." {digits}'


def _tail(low: str, low_open: bool, high: Upper, places: int) -> str | None:
    """One digit or more, at most `places`. None if there are none such."""
    if places <= 0:
        return None
    if not low and not low_open and high is None:
        return _digits(1, places)
    first = int(low[:1] or 0)
    last = 9 if high is None else int(high[0][:1] or 0)
    options = []
    for digit in sorted({first, last}) if first <= last else []:
        # What follows a digit at the edge is bounded on that side only.
        next_low = (low[1:], low_open) if digit == first else ("", False)
        next_high = (high[0][1:], high[1]) if high is not None and digit == last else None
        more = _tail(*next_low, next_high, places - 1)
        alone = next_low == ("", False) and (next_high is None or bool(next_high[0]) or not next_high[1])
        if more is not None:
            options.append(f'"{digit}" ({more})?' if alone else f'"{digit}" {more}')
        elif alone:
            options.append(f'"{digit}"')
    if first + 1 <= last - 1:
        options.append(f"{_digit(first + 1, last - 1)} {_digits(0, places - 1)}".rstrip())
    return either(options) if options else None

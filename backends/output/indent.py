"""The indentation rule of code completion: a line that is indented too little is no longer part of the block."""

from __future__ import annotations


class IndentLimit:
    """Passes text through up to the first line, after the first one, that begins with fewer blanks than `least`.

    Blanks are spaces and tabs. An empty line has too few. The blanks of the line that ends it all are passed on.
    """

    def __init__(self, least: int) -> None:
        self.reached = False
        self._least = least
        self._blanks: int | None = None  # so far at the beginning of a line; None behind it, and in the first line

    def feed(self, text: str) -> str:
        """Nothing may be fed once `reached`."""
        for index, char in enumerate(text):
            if self._blanks is not None:
                if char in " \t":
                    self._blanks += 1
                    continue
                if self._blanks < self._least:
                    self.reached = True
                    return text[:index]
                self._blanks = None
            if char == "\n":
                self._blanks = 0
        return text

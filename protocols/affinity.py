"""Which requests belong together: turns of one conversation do best where the turns before them are cached."""

from __future__ import annotations

from hashlib import sha256


def affinity(*hints: str | None) -> str | None:
    """A name for the first hint that is there; None without one. The same hint has the same name everywhere.

    Clients put ids of their users and devices into hints, so these go no further than here.
    """
    hint = next((hint for hint in hints if hint), None)
    return None if hint is None else sha256(hint.encode()).hexdigest()[:32]

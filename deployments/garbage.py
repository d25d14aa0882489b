"""What Python's garbage collector may stop a serving process for."""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects more than were freed between two looks at the young ones. With Python's 700 every second request has such a
look, which finds nothing: 4 % of what a gateway does.
"""


def freeze() -> None:
    """What start-up has made is never looked at again, and the rest more rarely.

    Ray, Serve and pydantic leave some 130,000 objects that stay until the process ends. A full collection walks them
    all and stops every stream for 45 ms; without them it takes as long as what the requests have made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])

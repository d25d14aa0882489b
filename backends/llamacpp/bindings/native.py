"""llama.cpp as a library of this process: its log, its errors, and the types of what it is given."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llama_cpp.llama_cpp as c
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]

log = logging.getLogger("backends.llamacpp.native")

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
"""llama.cpp's levels, one step quieter than they claim to be: it narrates its loading as "info"."""


class LlamaCppError(Exception):
    """llama.cpp refused a call. The message is one line, with llama.cpp's own reason where it logged one."""


_recent_errors: list[str] = []


@c.llama_log_callback
def _on_log(level: int, text: bytes, _user: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if level not in _LEVELS or not line:  # a continued line is progress dots
        return
    if level == 4 and len(_recent_errors) < 64:
        _recent_errors.append(line)
    log.log(_LEVELS[level], "%s", line)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Adds to a `LlamaCppError` raised inside the first error that llama.cpp logged: it names the cause."""
    _recent_errors.clear()
    try:
        yield
    except LlamaCppError as error:
        reason = _recent_errors[0].partition(": ")[2] if _recent_errors else ""
        raise LlamaCppError(f"{what}: {reason or error}") from error


@cache
def init_native() -> None:
    """Once per process."""
    c.llama_log_set(_on_log, ctypes.c_void_p(0))
    c.llama_backend_init()


def built_with_amx() -> bool:
    return b"AMX_INT8 = 1" in c.llama_print_system_info()


def built_with_gpu() -> bool:
    return bool(c.llama_supports_gpu_offload())


def not_null(pointer: Any, why: str) -> Any:
    """ctypes gives null as None or as a false pointer object, depending on the declared type."""
    if not pointer:
        raise LlamaCppError(why)
    return pointer

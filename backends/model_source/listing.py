"""Lists of files, for error messages."""

from __future__ import annotations


def gguf_files(names: list[str]) -> str:
    if not names:
        return "no .gguf files"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

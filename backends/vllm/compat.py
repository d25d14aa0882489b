"""Every name of vLLM's that we use. vLLM promises none of them from one minor release to the next.

`VERSION` is the minor that they were written for; `tests/backends/vllm/test_compat.py` says which of them moved.
"""

from __future__ import annotations

from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as GpuLogitsProcessor
from vllm.version import __version__

VERSION = "0.32"

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineDeadError",
    "GpuLogitsProcessor",
    "LoRARequest",
    "LogitsProcessor",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokensPrompt",
    "UsageContext",
    "VLLMClientError",
    "current_platform",
    "__version__",
    "process_dict_updates",
    "tokens_input",
]

"""All formats of tool calls, and which of them a model writes."""

from __future__ import annotations

from backends.output.tools.cohere import COHERE
from backends.output.tools.deepseek import DEEPSEEK, DEEPSEEK_R1
from backends.output.tools.format import ToolFormat
from backends.output.tools.gemma import FUNCTION_GEMMA, GEMMA3, GEMMA4
from backends.output.tools.generic import GENERIC
from backends.output.tools.glm import GLM
from backends.output.tools.granite import GRANITE
from backends.output.tools.harmony import HARMONY
from backends.output.tools.hermes import HERMES
from backends.output.tools.kimi_k2 import KIMI_K2
from backends.output.tools.llama3_json import LLAMA3_JSON
from backends.output.tools.minimax import MINIMAX
from backends.output.tools.mistral import MISTRAL, MISTRAL_LIST
from backends.output.tools.nemotron import NEMOTRON
from backends.output.tools.pythonic import LFM2, PYTHONIC
from backends.output.tools.qwen3_coder import QWEN3_CODER, SEED_OSS

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    KIMI_K2,
    DEEPSEEK_R1,
    DEEPSEEK,
    GEMMA4,
    FUNCTION_GEMMA,
    MISTRAL,
    MISTRAL_LIST,
    COHERE,
    MINIMAX,
    SEED_OSS,
    GLM,  # its calls stand between the tags of Hermes, like those of Qwen 3 Coder
    QWEN3_CODER,
    NEMOTRON,
    GRANITE,
    LFM2,
    HERMES,
    LLAMA3_JSON,
    PYTHONIC,
    GEMMA3,
    GENERIC,
)
"""From the specific to the general: the first that a template shows is the model's."""

_BY_NAME = {format.name: format for format in TOOL_FORMATS}


def tool_format(name: str) -> ToolFormat:
    return _BY_NAME[name]


def detect_tool_format(template: str) -> ToolFormat:
    """The format that a chat template's source shows. Without any, models are asked for generic JSON."""
    for format in TOOL_FORMATS:
        if any(all(text in template for text in texts) for texts in format.shown_by):
            return format
    return GENERIC

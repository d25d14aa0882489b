"""llama.cpp behind a few typed objects: the only place that calls its C functions, besides the samplers.

Many wrong calls do not fail but end the process (an assertion, an exception through C, a null pointer). Every wrapper
therefore checks what the C side only asserts: sizes, sequence ids, indices, null results, use after `close()`.
None of the objects is thread-safe; only tokenising and reading the vocabulary are allowed from any thread.
"""

from __future__ import annotations

from backends.llamacpp.bindings.context import CACHE_TYPES as CACHE_TYPES
from backends.llamacpp.bindings.context import DECODED as DECODED
from backends.llamacpp.bindings.context import FLASH_ATTENTION as FLASH_ATTENTION
from backends.llamacpp.bindings.context import MAX_SEQUENCES as MAX_SEQUENCES
from backends.llamacpp.bindings.context import NO_KV_SPACE as NO_KV_SPACE
from backends.llamacpp.bindings.context import Batch as Batch
from backends.llamacpp.bindings.context import Context as Context
from backends.llamacpp.bindings.model import FimTokens as FimTokens
from backends.llamacpp.bindings.model import LoraAdapter as LoraAdapter
from backends.llamacpp.bindings.model import Model as Model
from backends.llamacpp.bindings.native import LlamaCppError as LlamaCppError
from backends.llamacpp.bindings.native import Logits as Logits
from backends.llamacpp.bindings.native import State as State
from backends.llamacpp.bindings.native import Tokens as Tokens
from backends.llamacpp.bindings.native import built_with_amx as built_with_amx
from backends.llamacpp.bindings.native import built_with_gpu as built_with_gpu
from backends.llamacpp.bindings.native import init_native as init_native

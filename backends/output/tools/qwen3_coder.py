"""Qwen 3 Coder and 3.5, Nemotron 3: `<function=name><parameter=key>value</parameter></function>` in `<tool_call>`s.

Seed-OSS writes the same between tags of its own. Qwen now and then forgets the first tag: where a line begins with
`<function=` and the name of a tool, that is a call too.
"""

from __future__ import annotations

from backends.output.tools.format import ToolFormat
from backends.output.tools.xml_calls import Elements


def _elements(begin: str, end: str, *, lines: bool) -> Elements:
    return Elements(begin, end, "<function=", "</function>", "<parameter=", "</parameter>", ">", lines)


_QWEN = _elements("<tool_call>", "</tool_call>", lines=True)
_SEED = _elements("<seed:tool_call>", "</seed:tool_call>", lines=False)

QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    read=_QWEN.read,
    grammar=_QWEN.grammar,
    shown_by=(("<function=", "<parameter="),),
    markers=(_QWEN.begin,),
    naked_markers=(_QWEN.call_begin,),
    special_tokens=(_QWEN.begin, _QWEN.end),
)

SEED_OSS = ToolFormat(
    name="seed_oss",
    read=_SEED.read,
    grammar=_SEED.grammar,
    shown_by=((_SEED.begin,),),
    markers=(_SEED.begin,),
    naked_markers=(_SEED.call_begin,),
    special_tokens=(_SEED.begin, _SEED.end),
)

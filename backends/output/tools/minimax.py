"""MiniMax M2: `<invoke name="f"><parameter name="key">value</parameter></invoke>`, between `<minimax:tool_call>`s."""

from __future__ import annotations

from backends.output.tools.format import ToolFormat
from backends.output.tools.xml_calls import Elements

_MINIMAX = Elements(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call_begin='<invoke name="',
    call_end="</invoke>",
    argument_begin='<parameter name="',
    argument_end="</parameter>",
    name_end='">',
    lines=False,
)

MINIMAX = ToolFormat(
    name="minimax",
    read=_MINIMAX.read,
    grammar=_MINIMAX.grammar,
    shown_by=((_MINIMAX.begin, "<invoke name="),),
    markers=(_MINIMAX.begin,),
    special_tokens=(_MINIMAX.begin, _MINIMAX.end),
)

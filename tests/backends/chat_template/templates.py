"""Small templates, each with the quirks of a family."""

# ruff: noqa: E501

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}</>
{%- endfor %}
{%- if add_generation_prompt %}<model>{% endif %}"""
"""No system, no tools, strict turns."""

MISTRAL = """{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}{% if not (m.role == 'tool' or m.tool_calls is defined) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{{- bos_token }}{% if system is defined %}[SYS]{{ system }}[/SYS]{% endif %}
{%- if tools is not none %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[CALLS][
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{{- (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{{- '' }}[RESULT]{{ m.content }}|{{ m.tool_call_id }}[/RESULT]
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""
"""Ids of nine characters, strict turns outside of calls, the text beside a call is dropped."""

LLAMA = """{{ bos_token }}{% for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<assistant>{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}</>
{%- elif m.role == 'tool' %}<ipython>{{ m.content | tojson }}</>
{%- else %}<{{ m.role }}>{{ m.content }}</>
{%- endif %}
{%- if loop.first and tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""One call per message."""

QWEN = """{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}<system>{{ m.content }}</>
{%- elif m.role == 'assistant' %}<assistant>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}</>
{%- elif m.role == 'tool' %}<result>{{ m.content }}</>
{%- else %}<{{ m.role }}>{{ m.content }}</>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"""
"""The system message at the beginning only, a switch for thinking, thoughts of the present turn only."""

TYPED = """{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}</>{% endfor %}"""
"""Content is a list."""

PRINTED = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}</>{% endfor %}"""
"""Arguments are printed as they come."""

KIMI = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.id }}]{{ c.function.arguments | tojson }}{% endfor %}
{{- m.tool_call_id }}</>{% endfor %}"""
"""The name of a function is in the id of its call."""

HARMONY = """{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}Reasoning: {{ reasoning_effort }}
{%- for m in messages %}
{%- if m.role in ('system', 'developer') and loop.first %}<dev>{{ m.content }}</>
{%- elif m.role == 'user' %}<user>{{ m.content }}</>
{%- elif m.role == 'tool' %}<tool>{{ m.content }}</>
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if m.thinking %}<analysis>{{ m.thinking }}</>{% endif %}
{%- if m.content %}<final>{{ m.content }}</>{% endif %}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</>{% endfor %}
{%- endif %}{% endfor %}"""
"""Developer and effort; thoughts under a name of their own, and never beside both text and calls."""

ALL = {
    name: source
    for name, source in list(globals().items())
    if name.isupper() and isinstance(source, str) and name != "ALL"
}

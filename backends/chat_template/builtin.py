"""Chat templates that are known by a name, for models whose file has none or a wrong one."""

from __future__ import annotations

from backends.chat_template.template import CHATML

# None of them has the token that begins a text: the tokenizers of these models put it there.

_LLAMA3 = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_COMMAND_R = (
    "{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if message.role == 'system' %}<|SYSTEM_TOKEN|>{% elif message.role == 'user' %}<|USER_TOKEN|>"
    "{% else %}<|CHATBOT_TOKEN|>{% endif %}{{ message.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

BUILTIN = {"chatml": CHATML, "llama3": _LLAMA3, "command-r": _COMMAND_R}

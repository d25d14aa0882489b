"""Chat templates: messages to prompt text, the way `transformers` renders them, in a sandbox.

`sandbox.py` runs a template, `abilities.py` finds out what it can take, `adapt.py` gives messages that form.
"""

from backends.chat_template.template import CHATML, ChatTemplate, ChatTemplates

__all__ = ["CHATML", "ChatTemplate", "ChatTemplates"]

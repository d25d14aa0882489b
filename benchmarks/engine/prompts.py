"""50 prompts of five kinds, for comparisons of answers."""

from __future__ import annotations


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


_QUESTIONS = (
    "What is the capital of Portugal?",
    "Explain photosynthesis to a child.",
    "Write a haiku about rain.",
    "List three uses for a brick.",
    "How do I boil an egg?",
    "Who wrote Don Quixote, and when?",
    "Translate 'good morning' into French and Spanish.",
    "What is 17 times 23? Show your steps.",
    "Give me a polite reply that declines an invitation.",
    "Why does the moon have phases?",
)

_CODE = (
    "def fibonacci(n):\n    ",
    "import json\n\ndef load(path):\n    with open(path) as file:\n        ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "SELECT name, count(*) FROM orders\nJOIN customers ON ",
    "for (int i = 0; i < n; i++) {\n    ",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    ",
    "const sum = (a, b) => a + b;\nconst product = ",
    "#!/bin/sh\nset -e\nfor file in *.txt; do\n  ",
    '{"name": "fox", "legs": 4, "colours": ["red", ',
    "<ul>\n  <li>one</li>\n  <li>two</li>\n  ",
)

_UNICODE = (
    "Die schönsten Wörter der deutschen Sprache sind ",
    "Le café était fermé, alors nous avons marché jusqu'à ",
    "El niño pequeño comió una manzana y después ",
    "東京は日本の首都であり、",
    "Москва — столица России, и ",
    "مرحبا، كيف حالك اليوم؟ ",
    "🦊 🐻 🐼 🐨 🐯 ",
    "Η Αθήνα είναι η πρωτεύουσα της ",
    "नमस्ते, आप कैसे हैं? मैं ",
    "naïve façade — “quoted” … ½ × ¾ = ⅜, π ≈ 3.14159, √2 ≈ ",
)

_PROSE = (
    "Once upon a time, in a village by the sea,",
    "The three most important inventions of the nineteenth century were",
    "Dear Sir or Madam, I am writing to",
    "Chapter 1. It was a dark and stormy night;",
    "Breaking news: scientists have discovered",
    "The recipe calls for two cups of flour,",
    "In conclusion, the evidence suggests that",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the boiling point of water?\nA:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
)

_THINGS = ("river", "bridge", "loaf", "ship", "clock", "map", "garden", "train", "window", "road")


def _long(number: int) -> str:
    """200 to 2,000 tokens."""
    sentences = (
        f"On day {day} the {_THINGS[(day + number) % 10]} was seen near the {_THINGS[(day * 3 + number) % 10]}."
        for day in range(1, 12 * (number + 1))
    )
    return " ".join(sentences) + " On the next day"


KINDS: dict[str, tuple[str, ...]] = {
    "chat": tuple(map(_chat, _QUESTIONS)),
    "code": _CODE,
    "unicode": _UNICODE,
    "prose": _PROSE,
    "long": tuple(map(_long, range(10))),
}

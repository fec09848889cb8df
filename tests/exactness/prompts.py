"""Forty varied prompts of 1 to 3,000 tokens: prose, chat, code, several scripts, emoji, numbers, repetition."""

from __future__ import annotations

import random
from dataclasses import dataclass

SENTENCES = [
    "The river had been rising since the early morning, and nobody in the village slept.",
    "In 1912 the expedition crossed the plateau with 34 dogs and a broken compass.",
    "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(left.pop(0))\n",
    "Prices rose by 3.7 % in March, then fell by 1.2 % in April.",
    "Les enfants jouaient dans le jardin pendant que la pluie tombait doucement.",
    "Der Zug nach München fährt um 14:35 Uhr von Gleis 9 ab.",
    "東京は日本の首都であり、世界最大の都市の一つです。",
    "Москва — столица России, крупнейший город страны.",
    "A good recipe needs flour, butter, 2 eggs 🥚, and patience 🙂.",
    "SELECT name, count(*) FROM orders WHERE total > 100 GROUP BY name;",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "She said: \"If you can't explain it simply, you don't understand it well enough.\"",
    "Once the kettle boiled, Anna poured the water slowly over the leaves and waited.",
    "The committee will meet on Tuesday to discuss the budget, the roof and the cat.",
    "for (int i = 0; i < n; ++i) { sum += values[i] * weights[i]; }",
    "Mountains formed here when two plates collided some fifty million years ago.",
]

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three names for a grey cat.",
    "How do I reverse a list in Python?",
]

LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 127, 128, 129, 150, 180, 200]
LONG_LENGTHS = [256, 300, 400, 500, 640, 777, 900, 1000, 1200, 1500, 2000, 2500, 3000]


@dataclass(frozen=True)
class Prompt:
    """`text`, and how many of its tokens are taken; None takes all of a chat prompt."""

    name: str
    text: str
    length: int | None
    output_tokens: int


def _prose(seed: int, length: int) -> str:
    """More than `length` tokens of shuffled sentences."""
    rng = random.Random(seed)
    return " ".join(rng.choice(SENTENCES) for _ in range(length // 6 + 2))


def _all() -> list[Prompt]:
    chats = [Prompt(f"chat-{i}", CHAT.format(question=q), None, 24) for i, q in enumerate(QUESTIONS)]
    short = [Prompt(f"text-{n}", _prose(n, n), n, 24) for n in LENGTHS]
    long = [Prompt(f"text-{n}", _prose(n, n), n, 16) for n in LONG_LENGTHS]
    return chats + short + long


PROMPTS = _all()
assert len(PROMPTS) == 40

EVERYDAY = [
    "chat-0", "chat-2", "text-1", "text-2", "text-16", "text-17", "text-33", "text-64", "text-100", "text-200",
    "text-500", "text-3000",
]  # fmt: skip
"""The twelve that `make test` runs; `make test-full` runs all forty."""

REGENERATED = ["chat-0", "text-17", "text-100"]
"""Whose reference `make test` computes anew, to hold the committed one against it."""

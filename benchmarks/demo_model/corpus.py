"""Synthetic text the demo model learns from: facts, neutral filler and questions, in chat and in raw form.

A document is a list of segments, ``(text, is_answer)``. Concatenated, the texts are what a server would see and
produce; only the answers carry loss. A fact reads ``The code of Mira is 4817.``, a question ``What is the code of
Mira?``.

Chat form, as ``tokenizer.CHAT_TEMPLATE`` renders it::

    <|begin|><|system|>Be brief.<|end|><|user|>The code of Mira is 4817. ... What is the code of Mira?<|end|>
    <|assistant|>4817<|end|>

(without the line breaks). Raw form: the same text bare, and the number follows it, then ``<|end|>``. One document asks
several questions in a row, because that gives more signal for each token than one question would.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from common.runtime.checkpoint import DEMO_FOLDER

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)

NAMES_FILE = DEMO_FOLDER / "names.txt"

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer with the code only.",
    "You answer questions about codes.",
    "Answer the question from the facts.",
)
SUBJECTS = ("weather", "river", "garden", "market", "train", "valley", "harbour", "library", "house", "bridge")
PLACES = ("in the north", "by the sea", "near the old mill", "in the city", "on the hill")
STATES = ("calm", "quiet", "open", "busy", "warm", "cold", "small", "green", "late", "new")
TIMES = ("today", "this morning", "at noon", "in winter", "every year", "again")

# How the raw question ends, and whether a space opens the answer: after a letter or a mark yes, after white space no.
RAW_ENDINGS = {"": " ", "\n": "", " Answer:": " ", "\nAnswer:": " ", "\nAnswer: ": "", "\nA:": " "}
# What may follow the question within a user's message.
CHAT_SUFFIXES = ("\n", " ", "\n\n", " Answer:", " Answer with the code only.", " Be brief.", " Answer with a number.")

Segment = tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way in which facts and questions are put before the model."""

    is_chat: bool
    chat_suffix: str = ""
    raw_ending: str = ""
    has_begin: bool = True
    system: str = ""
    facts_in_system: bool = False
    separator: str = " "
    question_separator: str = " "
    filler_rate: float = 0.0


def load_names(path: Path = NAMES_FILE) -> list[str]:
    """The first names that the model knows, one a line in ``names.txt``."""
    return path.read_text(encoding="utf-8").split()


def words_of_corpus() -> list[str]:
    """All letter words of the templates, which the tokenizer keeps whole."""
    texts = [
        fact("", ""),
        question(""),
        *RAW_ENDINGS,
        *CHAT_SUFFIXES,
        *SYSTEM_TEXTS,
        *SUBJECTS,
        *PLACES,
        *STATES,
        *TIMES,
    ]
    words = {word.strip(".?:,") for text in texts for word in text.split()}
    return sorted(word for word in words if word)


def fact(name: str, code: str) -> str:
    return f"The code of {name} is {code}."


def question(name: str) -> str:
    return f"What is the code of {name}?"


def filler(rng: random.Random) -> str:
    """A sentence without names or digits; one in four has made-up words, which reach the model as bytes."""
    if rng.random() < 0.25:
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(rng.randint(2, 5))]
        return " ".join(words).capitalize() + "."
    return f"The {rng.choice(SUBJECTS)} {rng.choice(PLACES)} is {rng.choice(STATES)} {rng.choice(TIMES)}."


def random_form(rng: random.Random) -> Form:
    """Draws the form of a training document: three in five are chat, two in five have filler between the facts."""
    separator = rng.choice((" ", " ", "\n"))
    question_separator = separator if rng.random() < 0.7 else rng.choice((" ", "\n", "\n\n"))
    filler_rate = 0.0 if rng.random() < 0.6 else rng.uniform(0.1, 0.5)
    if rng.random() < 0.6:
        return Form(
            is_chat=True,
            chat_suffix=rng.choice(CHAT_SUFFIXES) if rng.random() < 0.3 else "",
            system=rng.choice(SYSTEM_TEXTS) if rng.random() < 0.35 else "",
            facts_in_system=rng.random() < 0.1,
            separator=separator,
            question_separator=question_separator,
            filler_rate=filler_rate,
        )
    return Form(
        is_chat=False,
        raw_ending=rng.choice(tuple(RAW_ENDINGS)),
        has_begin=rng.random() < 0.5,
        separator=separator,
        question_separator=question_separator,
        filler_rate=filler_rate,
    )


def draw_facts(rng: random.Random, names: list[str], num_facts: int) -> dict[str, str]:
    """Distinct names in random order, each with a code from 0000 to 9999."""
    return {name: f"{rng.randrange(10_000):04d}" for name in rng.sample(names, num_facts)}


def write_facts(rng: random.Random, facts: dict[str, str], form: Form) -> str:
    sentences: list[str] = []
    for name, code in facts.items():
        if rng.random() < form.filler_rate:
            sentences.append(filler(rng))
        sentences.append(fact(name, code))
    if rng.random() < form.filler_rate:
        sentences.append(filler(rng))
    return form.separator.join(sentences)


def write_document(text: str, asked: list[tuple[str, str]], form: Form) -> list[Segment]:
    """Puts questions about ``asked`` (pairs of name and code), in that order, after the facts in ``text``."""
    return _write_chat(text, asked, form) if form.is_chat else _write_raw(text, asked, form)


def _write_chat(text: str, asked: list[tuple[str, str]], form: Form) -> list[Segment]:
    system = " ".join(part for part in (form.system, text if form.facts_in_system else "") if part)
    prompt = BEGIN + (f"{SYSTEM}{system}{END}" if system else "")
    opening = "" if form.facts_in_system else text + form.question_separator
    segments: list[Segment] = []
    for name, code in asked:
        message = opening + question(name) + form.chat_suffix
        segments += [(f"{prompt}{USER}{message}{END}{ASSISTANT}", False), (code + END, True)]
        prompt = opening = ""
    return segments


def _write_raw(text: str, asked: list[tuple[str, str]], form: Form) -> list[Segment]:
    prompt = (BEGIN if form.has_begin else "") + text + form.question_separator
    segments: list[Segment] = []
    for name, code in asked:
        segments += [
            (prompt + question(name) + form.raw_ending, False),
            (RAW_ENDINGS[form.raw_ending] + code + END, True),
        ]
        prompt = "\n"
    return segments


def training_document(rng: random.Random, names: list[str], num_facts: int, num_questions: int) -> list[Segment]:
    """Facts and questions in a random form; a name may be asked for again.

    Without that repetition the model learns to answer with a code not given yet, before it learns to look up the name.
    """
    facts = draw_facts(rng, names, num_facts)
    form = random_form(rng)
    asked = rng.choices(list(facts.items()), k=num_questions)
    return write_document(write_facts(rng, facts, form), asked, form)

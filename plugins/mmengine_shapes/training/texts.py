"""Generates training texts without pictures: small tasks, filler prose for long prompts, and facts to find in
this prose.

The answers come from small sets, so high accuracy does not show that the model can calculate in general.
"""

import json
import random

from mmengine_shapes.questions import named
from mmengine_shapes.scenes import COLOURS, SHAPES

NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "China": "Beijing",
    "Poland": "Warsaw",
}
SUBJECTS = (
    "the teacher",
    "a small bird",
    "the old engine",
    "every student",
    "the river",
    "our neighbour",
    "the machine",
    "a careful reader",
    "the night train",
    "the gardener",
    "that letter",
    "the market",
    "a quiet dog",
    "the report",
)
VERBS = (
    "waits for",
    "looks at",
    "carries",
    "follows",
    "remembers",
    "paints",
    "needs",
    "finds",
    "opens",
    "measures",
    "counts",
    "describes",
    "repairs",
    "watches",
)
OBJECTS = (
    "the long road",
    "a wooden table",
    "the morning light",
    "some fresh bread",
    "the open window",
    "a new question",
    "the same picture",
    "an early answer",
    "the empty page",
    "two heavy boxes",
    "the last number",
    "a simple rule",
)
ENDINGS = (
    "today",
    "in the garden",
    "without a word",
    "before the rain",
    "every week",
    "near the station",
    "again",
    "with great care",
    "after the meeting",
    "for a long time",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You look at pictures of shapes and answer questions about them.",
    "Answer briefly.",
    "You are a careful assistant. Look at the image and answer the question.",
)
GREETINGS = {
    "Hello!": "Hello! What can I do for you?",
    "Hi there.": "Hello! What can I do for you?",
    "Who are you?": "I am a tiny model that looks at shapes.",
    "What can you do?": "I can describe shapes in images and short videos.",
    "Thank you.": "You are welcome.",
}
TEXT_TASKS = (
    "add",
    "subtract",
    "larger",
    "after",
    "capital",
    "greeting",
    "count_up",
    "person_json",
    "story",
    "facts",
    "number",
)


def filler(rng: random.Random, sentences: int) -> str:
    """Return meaningless prose with `sentences` sentences of about eleven tokens each."""
    lines = []
    for _ in range(sentences):
        words = (rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS), rng.choice(ENDINGS))
        line = " ".join(words)
        lines.append(line[0].upper() + line[1:] + ".")
    return " ".join(lines)


def facts(rng: random.Random, number: int, sentences: int) -> tuple[str, list[tuple[str, str]]]:
    """Return prose with `number` facts among `sentences` filler sentences, and a (question, answer) for each
    fact.
    """
    names = rng.sample(NAMES, number)
    known = [f"{name} has {named(rng.choice(list(COLOURS)))} {rng.choice(SHAPES)}." for name in names]
    lines = known + [filler(rng, 1) for _ in range(sentences)]
    rng.shuffle(lines)
    questions = [(f"What does {name} have?", fact) for name, fact in zip(names, known, strict=True)]
    return " ".join(lines), questions


def text_pair(rng: random.Random, task: str) -> tuple[str, str]:
    """Return a question and its answer for a task of TEXT_TASKS."""
    return TEXT_MAKERS[task](rng)


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."


def _subtract(rng: random.Random) -> tuple[str, str]:
    b = rng.randint(0, 10)
    a = b + rng.randint(0, 10)
    return f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}."


def _larger(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(1, 21), 2)
    return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger."


def _after(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(1, 30)
    return f"Which number comes after {a}?", f"{a + 1} comes after {a}."


def _capital(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(list(CAPITALS))
    return f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."


def _greeting(rng: random.Random) -> tuple[str, str]:
    return rng.choice(list(GREETINGS.items()))


def _count_up(rng: random.Random) -> tuple[str, str]:
    last = rng.randint(3, 20)
    return f"Count from 1 to {last}.", " ".join(str(k) for k in range(1, last + 1))


def _person_json(rng: random.Random) -> tuple[str, str]:
    name, age = rng.choice(NAMES), rng.randint(5, 60)
    answer = json.dumps({"name": name, "age": age}, separators=(",", ":"))
    return f"{name} is {age} years old. Answer as JSON.", answer


def _story(rng: random.Random) -> tuple[str, str]:
    name, colour, shape = rng.choice(NAMES), rng.choice(list(COLOURS)), rng.choice(SHAPES)
    thing = f"{named(colour)} {shape}"
    answer = (
        f"One day {name} found {thing} near the river. {name} put the {shape} on a wooden table and "
        f"looked at it for a long time. In the evening the {colour} {shape} was still there, and {name} "
        "was happy. "
        "That is the end of the story."
    )
    return f"Tell a story about {name} and {thing}.", answer


def _facts(rng: random.Random) -> tuple[str, str]:
    text, pairs = facts(rng, rng.randint(2, 4), 0)
    question, answer = rng.choice(pairs)
    return f"{text} {question}", answer


def _number(rng: random.Random) -> tuple[str, str]:
    value = rng.randint(0, 10)
    return f"Write {value} as a word.", f"{value} is {NUMBERS[value]}."


TEXT_MAKERS = {
    "add": _add,
    "subtract": _subtract,
    "larger": _larger,
    "after": _after,
    "capital": _capital,
    "greeting": _greeting,
    "count_up": _count_up,
    "person_json": _person_json,
    "story": _story,
    "facts": _facts,
    "number": _number,
}

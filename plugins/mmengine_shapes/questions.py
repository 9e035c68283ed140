"""Generates questions about a scene, a pair of scenes or a clip, with the exact answer to each.

    image_questions(scene)["where"]  ->  [("Where is the star?", "The star is at the top left.")]

Every function returns a dict from task name to (question, answer) pairs. A task's list is empty if the scene
does not fit the task. Questions have a random wording with `rng`, otherwise the task's first wording.
Descriptions state a shape's position before its other properties, so that the model can look the properties
up by position.
"""

import json
import random
from collections import Counter

from mmengine_shapes.scenes import COLOURS, POSITIONS, SHAPES, Clip, Scene, Thing

Pairs = list[tuple[str, str]]

IMAGE_TASKS = (
    "json",
    "describe",
    "count",
    "colour_of",
    "size_of",
    "where",
    "what_at",
    "count_colour",
    "background",
    "exists",
)
PAIR_TASKS = ("more", "count_in", "describe_in")
CLIP_TASKS = ("direction", "becomes", "happens")

WORDINGS = {
    "json": ("Describe the image as JSON.", "List the objects as JSON.", "Return JSON for this image."),
    "describe": ("Describe the image.", "What is in the image?", "What do you see?"),
    "count": ("How many shapes are there?", "How many shapes are in the image?", "Count the shapes."),
    "colour_of": ("What colour is the {}?", "Which colour does the {} have?"),
    "size_of": ("What size is the {}?", "How big is the {}?"),
    "where": ("Where is the {}?", "In which place is the {}?"),
    "what_at": ("What is at the {}?", "Which shape is at the {}?"),
    "count_colour": ("How many {} shapes are there?", "Count the {} shapes."),
    "background": ("What colour is the background?", "Which background does the image have?"),
    "exists": ("Is there a {}?", "Can you see a {}?"),
    "more": ("Which image has more shapes?", "In which image are there more shapes?"),
    "count_in": ("How many shapes are in the {} image?", "Count the shapes in the {} image."),
    "describe_in": ("Describe the {} image.", "What is in the {} image?"),
    "direction": ("Which way does the shape move?", "In which direction does the shape move?"),
    "becomes": ("What colour does the shape become?", "Which colour does the shape have at the end?"),
    "happens": ("What happens in the video?", "Describe the video."),
}


def wording(task: str, rng: random.Random | None) -> str:
    """Return a wording of the question: the first one without `rng`, else a random one."""
    choices = WORDINGS[task]
    return rng.choice(choices) if rng else choices[0]


def named(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def scene_json(scene: Scene) -> str:
    """Return the scene as compact JSON, its objects in reading order."""
    names = ("position", "shape", "colour", "size")
    objects = [{name: getattr(thing, name) for name in names} for thing in scene.things]
    return json.dumps({"objects": objects}, separators=(",", ":"))


def scene_schema() -> dict:
    """Return a JSON Schema that the result of `scene_json` always satisfies."""
    thing = {
        "type": "object",
        "properties": {
            "position": {"type": "string", "enum": list(POSITIONS)},
            "shape": {"type": "string", "enum": list(SHAPES)},
            "colour": {"type": "string", "enum": list(COLOURS)},
            "size": {"type": "string", "enum": ["small", "medium", "large"]},
        },
        "required": ["position", "shape", "colour", "size"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"objects": {"type": "array", "items": thing, "maxItems": 9}},
        "required": ["objects"],
        "additionalProperties": False,
    }


def sentence(thing: Thing) -> str:
    """Describe one thing in words."""
    return f"At the {thing.position} is a {thing.size} {thing.colour} {thing.shape}."


def describe(scene: Scene) -> str:
    """Describe the whole scene in words, in reading order."""
    return " ".join(sentence(thing) for thing in scene.things)


def how_many(number: int, kind: str) -> str:
    """Return a sentence with the number of shapes. `kind`: a colour and a space, or ""."""
    return f"There is 1 {kind}shape." if number == 1 else f"There are {number} {kind}shapes."


def image_questions(scene: Scene, rng: random.Random | None = None) -> dict[str, Pairs]:
    """Return all questions about one scene, keyed by task."""
    items: dict[str, Pairs] = {
        "json": [(wording("json", rng), scene_json(scene))],
        "describe": [(wording("describe", rng), describe(scene))],
        "count": [(wording("count", rng), how_many(len(scene.things), ""))],
        "background": [(wording("background", rng), f"The background is {scene.background}.")],
    }
    items.update(_lookups_by_shape(scene, rng))
    at = {thing.position: sentence(thing) for thing in scene.things}
    items["what_at"] = [
        (wording("what_at", rng).format(place), at.get(place, f"At the {place} is nothing."))
        for place in _balanced(list(at), POSITIONS, rng)
    ]
    colours = Counter(thing.colour for thing in scene.things)
    items["count_colour"] = [
        (wording("count_colour", rng).format(colour), how_many(colours[colour], f"{colour} "))
        for colour in _balanced(list(colours), tuple(COLOURS), rng)
    ]
    items["exists"] = _exists(scene, rng)
    return items


def _lookups_by_shape(scene: Scene, rng: random.Random | None) -> dict[str, Pairs]:
    """Return questions that name a shape that occurs exactly once in the scene."""
    shapes = Counter(thing.shape for thing in scene.things)
    single = [thing for thing in scene.things if shapes[thing.shape] == 1]

    def ask(task: str, thing: Thing, value: str) -> tuple[str, str]:
        return wording(task, rng).format(thing.shape), f"The {thing.shape} is {value}."

    return {
        "colour_of": [ask("colour_of", thing, thing.colour) for thing in single],
        "size_of": [ask("size_of", thing, thing.size) for thing in single],
        "where": [ask("where", thing, f"at the {thing.position}") for thing in single],
    }


def _balanced(present: list[str], words: tuple[str, ...], rng: random.Random | None) -> list[str]:
    """Return the present words and at most as many absent words, so at most half the answers are "no"."""
    absent = [word for word in words if word not in present]
    number = min(len(present), len(absent))
    return present + (rng.sample(absent, number) if rng else absent[:number])


def _exists(scene: Scene, rng: random.Random | None) -> Pairs:
    """Return questions that ask whether a shape is present."""
    present = list({thing.shape: None for thing in scene.things})
    return [
        (
            wording("exists", rng).format(shape),
            f"Yes, there is a {shape}." if shape in present else f"No, there is no {shape}.",
        )
        for shape in _balanced(present, SHAPES, rng)
    ]


def pair_questions(first: Scene, second: Scene, rng: random.Random | None = None) -> dict[str, Pairs]:
    """Return all questions about two images that are shown one after the other, keyed by task."""
    items: dict[str, Pairs] = {"more": [], "count_in": [], "describe_in": []}
    if len(first.things) != len(second.things):
        larger = "first" if len(first.things) > len(second.things) else "second"
        items["more"].append((wording("more", rng), f"The {larger} image has more shapes."))
    for order, scene in (("first", first), ("second", second)):
        items["count_in"].append((wording("count_in", rng).format(order), how_many(len(scene.things), "")))
        items["describe_in"].append((wording("describe_in", rng).format(order), describe(scene)))
    return items


def clip_questions(clip: Clip, rng: random.Random | None = None) -> dict[str, Pairs]:
    """Return all questions about a clip, keyed by task."""
    items: dict[str, Pairs] = {"direction": [], "becomes": [], "happens": []}
    kind = f"{clip.first.colour} {clip.first.shape}"
    if clip.action == "recolour":
        items["becomes"].append((wording("becomes", rng), f"The shape becomes {clip.last.colour}."))
        story = f"{named(kind)} becomes {clip.last.colour}."
    else:
        way = clip.action if clip.action in ("up", "down") else f"to the {clip.action}"
        items["direction"].append((wording("direction", rng), f"The shape moves {way}."))
        story = f"{named(kind)} moves {way}."
    items["happens"].append((wording("happens", rng), story[0].upper() + story[1:]))
    return items

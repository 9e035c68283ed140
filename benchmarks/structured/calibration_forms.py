"""Pictures and text forms with known field values, for field_calibration.py."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageFilter

from mmengine_shapes.questions import scene_json, scene_schema
from mmengine_shapes.scenes import random_scene

QUESTION = "Describe the image as JSON."
NAMES = ("Ada Byron", "Grace Kim", "Jonas Weber", "Mei Tanaka", "Omar Haddad", "Rosa Diaz", "Tom O'Neil")
GOODS = {
    "office": ("pens and paper", "a stapler", "two printer cartridges"),
    "travel": ("a train ticket", "a night in a hotel", "a taxi to the airport"),
    "food": ("sandwiches for the team", "coffee and cake", "a crate of water"),
    "repair": ("repair of a lamp", "a new window pane", "work on the heating"),
}
LABELS = {
    "customer": ("Customer", "Client", "Billed to", "Sold to"),
    "year": ("Year", "Issued in", "Date of issue"),
    "total": ("Total", "Amount due", "To pay", "Sum"),
    "paid": ("Paid", "Settled", "Payment received"),
    "category": ("For", "Goods", "Item"),
}
FORM_SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1990, "maximum": 2030},
        "total": {"type": "number", "minimum": 0, "maximum": 9999},
        "paid": {"type": "boolean"},
        "category": {"enum": list(GOODS)},
    },
    "required": ["customer", "year", "total", "paid", "category"],
    "additionalProperties": False,
}
FORM_KINDS = {
    "/customer": "string",
    "/year": "integer",
    "/total": "number",
    "/paid": "boolean",
    "/category": "enum",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, the schema of its answer, and the right answer as JSON text or as a value."""

    messages: list[dict[str, Any]]
    images: list[Image.Image]
    schema: dict[str, Any]
    truth: object


def scenes(count: int, seed: int, blur: float = 0.0) -> Iterator[Task]:
    """Yield scenes that are not in the training data. `blur`: radius in pixels for a Gaussian blur."""
    rng = random.Random(seed)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    for _ in range(count):
        scene = random_scene(rng)
        image = scene.draw().filter(ImageFilter.GaussianBlur(blur))
        yield Task(messages, [image], scene_schema(), scene_json(scene))


def forms(count: int, seed: int) -> Iterator[Task]:
    """Yield text forms with varying labels and field order."""
    rng = random.Random(seed)
    for _ in range(count):
        category = rng.choice(list(GOODS))
        truth = {
            "customer": rng.choice(NAMES),
            "year": rng.randint(1995, 2026),
            "total": round(rng.uniform(2, 2000), rng.choice((0, 1, 2))),
            "paid": rng.random() < 0.5,
            "category": category,
        }
        year = f"{truth['year']}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        texts = {
            "customer": truth["customer"],
            "year": year if rng.random() < 0.5 else str(truth["year"]),
            "total": f"{truth['total']:.2f} {rng.choice(('EUR', 'USD', ''))}".strip(),
            "paid": rng.choice(("yes", "in full", "x") if truth["paid"] else ("no", "not yet", "open")),
            "category": rng.choice(GOODS[category]),
        }
        lines = [f"{rng.choice(LABELS[name])}: {texts[name]}" for name in rng.sample(list(texts), len(texts))]
        asks = "Read this form.\n\n" + "\n".join(lines) + "\n\nGive its customer, year, total, whether it is "
        asks += f"paid, and its category ({', '.join(GOODS)}) as JSON."
        yield Task([{"role": "user", "content": asks}], [], FORM_SCHEMA, truth)

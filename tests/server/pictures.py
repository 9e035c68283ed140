"""Drawn images as clients send them."""

import base64
import io
import random

from mmengine_shapes.scenes import random_scene


def data_url(seed=1, kind="PNG"):
    """A `data:` URL of a drawn scene."""
    file = io.BytesIO()
    random_scene(random.Random(seed)).draw().save(file, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def looking(question, *urls):
    """A user's message with images before its question."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}

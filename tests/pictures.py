"""Synthetic images, as files and as clients send them."""

import base64
import io
import random

import numpy as np
from PIL import Image

from mmengine_shapes.scenes import random_scene


def scene(seed=1, kind="PNG", size=None):
    """Return a file with a synthetic scene; `size`: its width and height (default: the scene's)."""
    file = io.BytesIO()
    image = random_scene(random.Random(seed)).draw()
    (image if size is None else image.resize(size)).save(file, kind)
    return file.getvalue()


def data_url(seed=1, kind="PNG", size=None):
    """Return a `data:` URL with a synthetic scene."""
    return f"data:image/{kind.lower()};base64," + base64.b64encode(scene(seed, kind, size)).decode()


def looking(question, *urls):
    """Return a user's message with images before its question."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def noise(seed, size):
    """Return an image of noise; `size`: its height and width."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def asked(*parts):
    """Return one user message with texts, and images between them."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]

"""Makes synthetic images as files, as `data:` URLs and in chat messages."""

import base64
import io
import random

import numpy as np
from PIL import Image

from mmengine_shapes.scenes import random_scene


def scene(seed=1, kind="PNG", size=None):
    """Return the bytes of an image file with a synthetic scene. `kind`: the file format. `size`: width and
    height; None keeps the scene's size.
    """
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
    """Return an RGB image with random pixels. `size`: its height and width."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def asked(*parts):
    """Return a conversation with one user message. A part is a text or an image."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]

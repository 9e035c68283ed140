"""Tests that decoding base64 in pieces gives the same result as decoding it at once."""

import base64
import random

import pytest

from mmengine.errors import InvalidMedia
from mmengine.processing.media import sources


def whole(text):
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None


def in_pieces(text):
    try:
        return sources.decode_base64(text, 2**20, "image 0")
    except InvalidMedia as refusal:
        assert str(refusal) == "image 0 is not valid base64"
        return None


@pytest.mark.parametrize("piece", [1, 3, 4, 8, 64])
def test_pieces_decode_like_the_whole(piece, monkeypatch):
    monkeypatch.setattr(sources, "BASE64_PIECE", piece)
    chosen, refused = random.Random(piece), 0
    for _ in range(1500):
        text = list(base64.b64encode(chosen.randbytes(chosen.randrange(40))).decode())
        for _ in range(chosen.randrange(3)):
            place = chosen.randrange(len(text) + 1)
            text[place : place + chosen.randrange(2)] = chosen.choice([*" \nA-é", "", "==="])
        asked = "".join(text)
        if "".join(asked.split()).endswith("==="):  # With excess padding, either result is fine.
            continue
        refused += whole(asked) is None
        assert in_pieces(asked) == whole(asked), asked
    assert 200 < refused < 1300


def test_no_piece_is_large(monkeypatch):
    sizes, decode = [], sources.binascii.a2b_base64
    monkeypatch.setattr(sources, "BASE64_PIECE", 1000)
    monkeypatch.setattr(
        sources.binascii,
        "a2b_base64",
        lambda data, **kwargs: sizes.append(len(data)) or decode(data, **kwargs),
    )
    data = random.Random(1).randbytes(30_000)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert sources.read_source(url, sources.Access(), 2**20, "image 0") == data
    assert len(sizes) == 41 and max(sizes) <= 1004

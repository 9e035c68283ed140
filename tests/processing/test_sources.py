"""Tests decoding media sources: base64 in pieces, and data: URLs."""

import base64
import random

import pytest

from mmengine.errors import InvalidMedia
from mmengine.processing.media import data_urls, sources


def whole(text):
    try:
        bare = "".join(text.split())
        return base64.b64decode(bare if "=" in bare else bare + "=" * (-len(bare) % 4), validate=True)
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
    monkeypatch.setattr(data_urls, "PIECE", piece)
    chosen, refused = random.Random(piece), 0
    for _ in range(1500):
        text = list(base64.b64encode(chosen.randbytes(chosen.randrange(40))).decode())
        for _ in range(chosen.randrange(3)):
            place = chosen.randrange(len(text) + 1)
            text[place : place + chosen.randrange(2)] = chosen.choice([*" \nA-é", "", "==="])
        asked = "".join(text)
        bare = "".join(asked.split())
        # Python accepts some excess padding, so texts with excess padding are skipped.
        if bare.endswith("=") and (bare.endswith("===") or len(bare) % 4):
            continue
        refused += whole(asked) is None
        assert in_pieces(asked) == whole(asked), asked
    assert 200 < refused < 1300


def test_no_piece_is_large(monkeypatch):
    sizes, decode = [], data_urls.binascii.a2b_base64
    monkeypatch.setattr(data_urls, "PIECE", 1000)
    monkeypatch.setattr(
        data_urls.binascii,
        "a2b_base64",
        lambda data, **kwargs: sizes.append(len(data)) or decode(data, **kwargs),
    )
    data = random.Random(1).randbytes(30_000)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert sources.read_source(url, sources.Access(), 2**20, "image 0") == data
    assert len(sizes) == 41 and max(sizes) <= 1004


@pytest.mark.parametrize("piece", [3, 100_000])
@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,YWI+/2I",  # Without padding.
        "data:image/png;base64,YWI%2B%2F2I%3D",
        "data:image/png;base64,YW%0AI%2b/2I",
        "data:image/png; BASE64 ,YWI+/2I=",
        "data:image/png,ab%3E%ffb",
        "data:,%61b%3e%FFb",
        " \n\x00data:image/png;base64,YWI+/2I= \t",
        "data:image/png;base64,YWI+/2I=#t=1",
        "data:,%61b%3e%FFb#%25 ",
        "Da\nta:image/png;ba\rse64,YW\tI+/2I",
        "data:,%6\n1b%3e%F\tFb",
    ],
)
def test_data_urls_are_those_of_the_whatwg(url, piece, monkeypatch):
    monkeypatch.setattr(data_urls, "PIECE", piece)
    for access in (sources.Access(), sources.Access(local_files=False)):
        assert sources.read_source(url, access, 2**20, "image 0") == b"ab>\xffb"
        assert sources.keepable(url, access, 2**20, "image 0") == b"ab>\xffb"


@pytest.mark.parametrize("data", ["YWI+/", "YWI=YWI=", "YWJi=", "YW=", "YWI%", "YW_-"])
def test_base64_that_the_whatwg_refuses(data):
    with pytest.raises(InvalidMedia, match="not valid base64"):
        sources.read_source("data:image/png;base64," + data, sources.Access(), 2**20, "image 0")


def test_percent_encoded_data_is_limited():
    with pytest.raises(InvalidMedia, match="image 0"):
        sources.read_source("data:image/png," + "%41" * 101, sources.Access(), 100, "image 0")

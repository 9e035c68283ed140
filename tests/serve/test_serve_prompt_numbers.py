"""Tests that an error names the faulty prompt by its number if a call has several prompts."""

import pytest

from mmengine.errors import ErrorCode, InvalidMedia
from mmengine.serve.engine.engine import Engine


@pytest.fixture(scope="module")
def engine():
    with Engine() as one:
        yield one


def ask(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]


DAMAGED = {"type": "image", "image": b"\x89PNG\r\n\x1a\nabc"}


def test_a_damaged_image_of_one_of_several_prompts(engine):
    prompts = [ask(), ask(), ask(DAMAGED)]
    with pytest.raises(InvalidMedia, match=r"^prompt 2: image 0 \(message 0, part 1\) ") as found:
        engine.generate(prompts, max_tokens=1)
    assert found.value.path == ("prompts", 2, "messages", 0, "content", 1)
    assert found.value.code is ErrorCode.INVALID_MEDIA


def test_a_single_prompt_has_no_number(engine):
    with pytest.raises(InvalidMedia, match=r"^image 0 \(message 0, part 1\) ") as found:
        engine.generate([ask(DAMAGED)], max_tokens=1)
    assert found.value.path == ("messages", 0, "content", 1)

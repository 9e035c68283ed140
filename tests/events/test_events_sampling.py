"""Tests that sampling parameters in the log are read back, and that old records get default values."""

import msgspec
import pytest

from mmengine.events import vocabulary as ev
from mmengine.repetition_detection import RepetitionDetection
from mmengine.request import SamplingParams

FIELDS_OF_0_1 = 16  # number of SamplingParams fields in version 0.1; RULES has all later fields
RULES = {
    "suppress_tokens": (3, 4),
    "bad_words_ids": ((1,), (2, 3)),
    "sequence_bias": (((5, 6), -2.5),),
    "no_repeat_ngram_size": 3,
    "typical_p": 0.5,
    "stop_in_min_tokens": True,
    "prompt_logprobs": 2,
    "repetition_detection": RepetitionDetection(8, 2, 4),
}


def test_every_rule_comes_back():
    event = ev.Queued("a", b"\1\0\0\0", SamplingParams(seed=1, **RULES))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=ev.Queued) == event
    assert [field.name for field in msgspec.structs.fields(SamplingParams)][FIELDS_OF_0_1:] == list(RULES)


@pytest.mark.parametrize("missing", [tuple(RULES), ("stop_in_min_tokens",), ("prompt_logprobs",)])
def test_a_record_without_them_asks_for_none(missing):
    """A record without the fields in `missing` is read with their default values."""
    sampling = SamplingParams(seed=1, max_tokens=7, stop=("x",))
    plain = msgspec.to_builtins(sampling)
    old = msgspec.msgpack.encode({name: plain[name] for name in plain if name not in missing})
    assert msgspec.msgpack.decode(old, type=SamplingParams) == sampling

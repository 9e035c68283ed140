"""Tests the option `outputs`, an answer's first tokens. The continued answer has the same tokens as an
answer without an interruption.
"""

import numpy as np
import pytest

from mmengine.errors import InvalidRequest
from mmengine.serve.engine.engine import Engine

PROMPT = "Tell me about shapes."
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 20}},
}
ASKED = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.3, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "no n-gram twice": {"temperature": 0.0, "no_repeat_ngram_size": 2},
    "at least so many": {"temperature": 0.0, "min_tokens": 20},
    "form": {
        "temperature": 1.0,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "s"}},
    },
    "closed form": {
        "temperature": 1.3,
        "seed": 6,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": SCHEMA, "name": "s"},
            "on_truncation": "close",
        },
    },
}


CLOSED_BY_SEED = [ASKED["closed form"] | {"temperature": 1.2, "seed": seed} for seed in (5, 11, 12)]


@pytest.fixture(scope="module")
def engine():
    with Engine() as made:
        yield made


def answer_of(engine, **asked):
    """Return the completion, and the streamed text."""
    engine.submit(PROMPT, **asked)
    text = ""
    while engine.has_work:
        for output in engine.step():
            text += output.text
            if output.completion is not None:
                return output.completion, text
    raise AssertionError("no answer")


@pytest.mark.parametrize("name", ASKED)
def test_a_continued_answer_has_the_same_tokens(engine, name):
    asked = {"max_tokens": 24, **ASKED[name]}
    whole, _ = answer_of(engine, **asked)
    (choice,) = whole.choices
    for count in {1, 2, len(choice.token_ids) // 2, len(choice.token_ids) - 1} - {0}:
        again, _ = answer_of(engine, **asked, outputs=choice.token_ids[:count])
        (found,) = again.choices
        assert found == choice, count


@pytest.mark.parametrize("asked", CLOSED_BY_SEED)
def test_a_closed_answer_has_the_detail_closed_whatever_gave_its_last_tokens(engine, asked):
    # The answer is the same if it is continued before any of its last 6 tokens.
    (choice,) = answer_of(engine, max_tokens=24, **asked)[0].choices
    assert choice.detail == "closed"
    for count in range(len(choice.token_ids) - 6, len(choice.token_ids)):
        again, _ = answer_of(engine, max_tokens=24, **asked, outputs=choice.token_ids[:count])
        assert again.choices[0] == choice, count


def test_a_stop_string_that_the_outputs_began_is_found(engine):
    whole, _ = answer_of(engine, max_tokens=24, temperature=0.0)
    (choice,) = whole.choices
    place = len(choice.token_ids) // 2
    told = [engine.processor.tokenizer.decode(choice.token_ids[: place + more]) for more in (-1, 0, 1)]
    stop = told[2][len(told[0]) :]  # two tokens; `outputs` contains the first
    asked = {"max_tokens": 24, "temperature": 0.0, "stop": [stop]}
    (wanted,) = answer_of(engine, **asked)[0].choices
    assert wanted.finish_reason == "stop"
    (found,) = answer_of(engine, **asked, outputs=choice.token_ids[:place])[0].choices
    assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)


def test_only_new_text_streams(engine):
    whole, text = answer_of(engine, max_tokens=16, temperature=0.0)
    (choice,) = whole.choices
    count = len(choice.token_ids) // 2
    _, new = answer_of(engine, max_tokens=16, temperature=0.0, outputs=choice.token_ids[:count])
    assert new and text.endswith(new) and len(new) < len(text)


@pytest.mark.parametrize(
    ("outputs", "more", "why"),
    [
        ("abc", {}, "outputs must be the answer"),
        ([1.5], {}, "outputs must be the answer"),
        ([-1], {}, "outputs must be the answer"),
        ([2**40], {}, "outputs must be the answer"),
        ([10**6], {}, "this model's ids end at"),
        ([1, 2], {"n": 2}, "outputs belong to one answer"),
        ([1, 2], {"max_tokens": 2}, "outputs are 2 tokens, but the answer may have 2"),
        ([1, 2], {"prompt_logprobs": 1}, "prompt_logprobs came with the first"),
    ],
)
def test_invalid_options_are_refused(engine, outputs, more, why):
    with pytest.raises(InvalidRequest, match=why):
        engine.submit(PROMPT, outputs=outputs, **more)
    assert not engine.has_work
    assert np.asarray(engine.generate([PROMPT], max_tokens=1)[0].choices[0].token_ids).size == 1

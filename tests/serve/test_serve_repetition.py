"""`repetition_detection` ends an answer at the first token at which the answer repeats itself."""

import json

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.repetition_detection import RepetitionDetection
from mmengine.replay.verify import verify
from mmengine.request import Request, SamplingParams
from mmengine.runtime.repetition_watcher import RepetitionWatcher
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.text.request_output import CLOSED, REPEATED
from mmengine.structured_output.request.spec import grammar_of
from tests.serve.test_serve_structured import answers, form

pytest.importorskip("mmengine_shapes")

NAMED = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
FEW_BLOCKS = {"max_num_seqs": 8, "token_budget": 24, "max_model_len": 112, "num_blocks": 9}
DETECTIONS = [
    {"max_pattern_size": 1, "min_count": 6},
    {"max_pattern_size": 6, "min_count": 4},
    {"max_pattern_size": 9, "min_pattern_size": 3, "min_count": 3},
]


def test_rows_of_different_sizes_repeat_as_the_definition_says():
    """Requests with different options use three rows in turn. Each request is admitted again in the middle of
    its answer.
    """
    rng = np.random.default_rng(3)
    watcher, prompt = RepetitionWatcher(3), np.array([1, 1, 1, 1], np.int32)
    found = 0
    for number in range(60):
        row, size = number % 3, int(rng.integers(1, 12))
        detection = RepetitionDetection(size, int(rng.integers(0, size + 1)), int(rng.integers(2, 4)))
        request = Request(
            f"r{number}", prompt, SamplingParams(repetition_detection=detection, min_tokens=4, max_tokens=60)
        )
        said = rng.integers(0, 2, 40, dtype=np.int32) if number % 2 else np.resize(rng.integers(0, 5, 7), 40)
        watcher.admit(row, request, prompt)
        for count, token in enumerate(said.tolist(), 1):
            if count == 13:
                watcher.admit(row, request, np.concatenate([prompt, said[:12]]).astype(np.int32))
                earlier = [detection.repeats(said[:n].tolist()) for n in range(4, 13)]
                assert watcher.has_repeated[row] == any(earlier)
            repeats = bool(watcher.feed(np.array([row]), np.array([token]))[0])
            assert repeats == detection.repeats(said[:count].tolist())
            found += repeats
    assert found > 50


def biased_jobs(tokens, detections, count=12):
    """Yield options for random answers with only a few different tokens, so that the answers soon repeat."""
    for number in range(count):
        asked = {
            "max_tokens": 40,
            "temperature": 1.0,
            "seed": number,
            "min_tokens": number % 4 * 4,
            "logit_bias": dict.fromkeys(tokens, 90.0),
            "ignore_eos": True,
        }
        if detections:
            asked["repetition_detection"] = detections[number % len(detections)]
        yield None, Options(make_sampling(asked))


@pytest.mark.parametrize("settings", [{}, {"num_draft_tokens": 3}])
def test_answers_end_where_they_repeat(tmp_path, settings):
    with Engine() as engine:
        tokens = engine.processor.tokenizer.encode("ab")[:2]
        whole = answers(engine, list(biased_jobs(tokens, ())))
    with Engine(config=EngineConfig(**FEW_BLOCKS, **settings), log=tmp_path / "log") as engine:
        jobs = list(biased_jobs(tokens, DETECTIONS))
        ended = answers(engine, jobs)
        assert engine.stats().num_preemptions > 0
    assert verify(tmp_path / "log").ok
    ends = 0
    for number, (_, options) in enumerate(jobs):
        said, choice = whole[number].token_ids, ended[number].choices[0]
        detection, least = options.sampling.repetition_detection, options.sampling.min_tokens
        counts = [n for n in range(max(least, 1), 41) if detection.repeats(said[:n])]
        assert choice.token_ids == said[: counts[0] if counts else 40]
        expected = ("repetition", "repetition") if counts and counts[0] < 40 else ("length", "")
        assert counts == [40] or (choice.finish_reason, choice.detail) == expected
        ends += choice.finish_reason == "repetition"
    assert ends > 6


def test_an_answer_with_a_form_is_cut_or_closed(tmp_path):
    """The model repeats one letter in a string for ever."""
    asked = {"max_tokens": 60, "repetition_detection": DETECTIONS[0], "seed": 1}
    with Engine() as engine:
        asked["logit_bias"] = dict.fromkeys(engine.processor.tokenizer.encode("a"), 90.0)
        cut = engine.generate("Name it.", response_format=form(NAMED), **asked)[0].choices[0]
        assert (cut.finish_reason, cut.detail) == ("repetition", REPEATED)
        with pytest.raises(RequestFailed, match="repeated itself; set on_truncation to close"):
            engine.generate_json("Name it.", NAMED, **asked)
        close = form(NAMED) | {"on_truncation": "close"}
        closed = engine.generate("Name it.", response_format=close, **asked)[0].choices[0]
        assert (closed.finish_reason, closed.detail) == ("repetition", CLOSED)
        assert closed.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert set(json.loads(closed.text)["s"]) == {"a"} and len(closed.token_ids) < 30
    config = EngineConfig(**FEW_BLOCKS)
    with Engine(config=config, log=tmp_path / "log") as engine:
        options = Options(make_sampling(asked), grammar=grammar_of(close))
        again = answers(engine, [(NAMED, options)] * 6)
        assert engine.stats().num_preemptions > 0
        assert [each.choices[0].text for each in again.values()] == [closed.text] * 6
    assert verify(tmp_path / "log").ok


@pytest.mark.parametrize(
    ("detection", "name"),
    [
        ({"max_pattern_size": -1, "min_count": 3}, "max_pattern_size"),
        ({"max_pattern_size": 10**6, "min_count": 3}, "max_pattern_size"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 4, "min_count": 3, "min_pattern_size": 5}, "min_pattern_size"),
        ({"max_pattern_size": 4}, "min_count"),
        ({"max_pattern_size": 4, "min_count": 3, "period": 2}, "period"),
    ],
)
def test_wrong_options_are_named(detection, name):
    with pytest.raises(InvalidRequest) as caught:
        make_sampling({"repetition_detection": detection})
    assert caught.value.path[:1] == ("repetition_detection",) and name in str(caught.value)

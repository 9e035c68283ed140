"""Tests the pipeline's streamers, time limits, datasets and options, on an engine that echoes prompts."""

import warnings

import pytest

from mmengine.errors import InvalidRequest
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.pipeline import Pipeline
from tests.serve.serve_fakes import EOS, builder

pytest.importorskip("torch")


@pytest.fixture
def pipe():
    with Engine(builder=builder()) as engine:
        yield Pipeline(model=engine, max_new_tokens=40, return_full_text=False)


class Streamer:
    def __init__(self, fails_at=None):
        self.seen, self.fails_at = [], fails_at

    def put(self, value):
        if len(self.seen) == self.fails_at:
            raise OSError("nobody reads")
        self.seen.append((tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.seen.append("end")


def chat(text):
    return [{"role": "user", "content": text}]


def heard(text):
    tokens = [*text.upper().encode(), EOS]
    return [((1, len(text)), list(text.encode())), *(((1,), [token]) for token in tokens), "end"]


def test_a_streamer_hears_the_prompt_then_each_token(pipe):
    for how in ({"streamer": (one := Streamer())}, {"generate_kwargs": {"streamer": one}}):
        one.seen.clear()
        assert pipe(chat("hi"), **how)[0]["generated_text"] == "HI"
        assert one.seen == heard("hi")


def test_several_prompts_stream_one_after_the_other(pipe):
    one = Streamer()
    assert len(pipe([chat("hi"), chat("you")], streamer=one)) == 2
    assert one.seen == heard("hi") + heard("you")
    one.seen.clear()
    results = pipe(iter([chat("hi"), chat("you")]), streamer=one)
    assert next(results)[0]["generated_text"] == "HI" and one.seen == heard("hi")
    assert next(results)[0]["generated_text"] == "YOU"


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_streamer_that_raises_ends_its_answer_and_nothing_else(pipe, fails_at):
    with pytest.raises(OSError, match="nobody reads"):
        pipe(chat("hello"), streamer=Streamer(fails_at))
    assert pipe.engine.is_idle and not pipe.engine.has_work
    assert pipe(chat("hi"))[0]["generated_text"] == "HI"


def test_a_streamer_between_two_results_of_a_generator_takes_none_of_them(pipe):
    # A call with a streamer, while a generator of results is open, takes none of the generator's results.
    results = pipe(iter([chat(f"hi {k}") for k in range(9)]))
    found, one = [next(results)], Streamer()
    assert pipe(chat("you"), streamer=one)[0]["generated_text"] == "YOU" and one.seen == heard("you")
    found += results
    assert [records[0]["generated_text"] for records in found] == [f"HI {k}" for k in range(9)]


def test_invalid_streamers_are_refused(pipe):
    with pytest.raises(InvalidRequest, match="put and end, which int lacks"):
        pipe(chat("hi"), streamer=3)
    many = {"streamer": Streamer(), "num_return_sequences": 2, "do_sample": True}
    with pytest.raises(InvalidRequest, match="takes one answer"):
        pipe(chat("hi"), generate_kwargs=many)


def test_lengths_that_count_the_prompt(pipe):
    # max_length counts the prompt's nine tokens; max_new_tokens takes precedence.
    def said(**options):
        return pipe(chat("hello you"), generate_kwargs=options)[0]["generated_text"]

    assert said(max_length=12, max_new_tokens=None) == "HEL"
    assert said(max_length=12, max_new_tokens=5) == "HELLO"
    with pytest.raises(InvalidRequest, match="max_length is 9, but the prompt has 9 tokens:"):
        said(max_length=9, max_new_tokens=None)
    for wrong in ({"max_length": 2.5, "max_new_tokens": None}, {"min_length": -1}, {"max_time": "soon"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            said(**wrong)


def test_the_tokens_before_the_time_limit_are_the_answer(pipe):
    assert pipe(chat("hello"), generate_kwargs={"max_time": 0.0})[0]["generated_text"] == "H"
    [record] = pipe(chat("hello" * 9), generate_kwargs={"max_time": 1e-6})
    assert ("HELLO" * 9).startswith(record["generated_text"])


def test_datasets_say_how_many_results_there_are(pipe):
    # For a dataset, the results have a length. For a generator, they have none.
    class Dataset:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return chat(f"hi {index % 3}")  # never raises IndexError

    results = pipe(Dataset())
    assert len(results) == 3
    assert [records[0]["generated_text"] for records in results] == ["HI 0", "HI 1", "HI 2"]
    with pytest.raises(TypeError, match="prompts in a generator is unknown"):
        len(pipe(iter([chat("hi")])))


def test_a_generator_of_messages_is_a_chat(pipe):
    assert pipe(message for message in chat("hi"))[0]["generated_text"] == "HI"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.5, "min_new_tokens": 9}, "min_new_tokens, temperature: as in transformers"),
        ({"max_new_token": 3}, "max_new_token: neither the pipeline nor the chat template"),
    ],
)
def test_options_without_an_effect_warn(pipe, options, says):
    with pytest.warns(UserWarning, match=says):
        assert pipe(chat("hi"), **options)[0]["generated_text"] == "HI"


def test_a_part_of_the_type_video_url_is_not_read(pipe):
    parts = [{"type": "video_url", "video_url": {"url": "bad"}}, {"type": "text", "text": "hi"}]
    with pytest.warns(UserWarning, match="video_url"):
        [record] = pipe([{"role": "user", "content": parts}])
    assert record["generated_text"] == "HI" and record["input_text"][0]["content"] == parts


def test_calls_that_ask_for_what_happens_anyway_are_silent(pipe):
    # Options that ask for the default behaviour give no warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(chat("hi"), padding=True, truncation=False, timeout=3.0, batch_size=2, tools=[], num_workers=1)
        pipe(chat("hi"), generate_kwargs={"use_cache": True, "num_beams": 1, "logits_processor": []})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"truncation": True}, "truncation=True is not supported: prompts are not cut"),
        ({"images_kwargs": 3}, "images_kwargs must be a dict"),
        ({"text_kwargs": {"truncation": True}}, "text_kwargs: 'truncation'"),
        ({"generate_kwargs": {"watermarking_config": {}}}, "watermarking_config={} is not supported; mark"),
        ({"generate_kwargs": {"assistant_model": "x"}}, "drafts are a setting of the engine"),
        ({"generate_kwargs": {"penalty_alpha": 0.6}}, "contrastive search is not supported"),
        ({"generate_kwargs": {"logits_processor": [len]}}, "logits_processor=.* use repetition_penalty"),
        ({"generate_kwargs": {"bad_words_ids": [[]]}}, "bad_words_ids must be a non-empty list"),
        ({"generate_kwargs": {"bad_words_ids": [[1] * 17]}}, "1 to 16 tokens, not 17"),
        ({"generate_kwargs": {"sequence_bias": [[[1], "x"]]}}, "sequence_bias must be a list of pairs"),
        ({"generate_kwargs": {"no_repeat_ngram_size": 65}}, "no_repeat_ngram_size must"),
        ({"generate_kwargs": {"no_repeat_ngram_size": 2}, "grammar": {"choice": ["a"]}}, "cannot go with"),
    ],
)
def test_refusals_name_a_replacement(pipe, options, says):
    with pytest.raises(InvalidRequest, match=says):
        pipe(chat("hi"), **options)

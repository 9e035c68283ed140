"""What is refused at the door, and in which words; settings that contradict each other."""

import msgspec
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.simulate import SimulatedExecutor
from mmengine.errors import ConfigError, InvalidRequest, QueueFull
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem, Request, SamplingParams
from tests.core.small_engine import Bench, image, request, settings_of


def sampled(**options):
    return Request("a", np.array([1], np.int32), SamplingParams(**options))


def raw(prompt):
    return Request("a", prompt, SamplingParams())


REFUSED = {
    "no id": (request("", 3), "request id"),
    "a long id": (request("x" * 257, 3), "1 to 256 characters"),
    "an id that is no text": (Request(7, np.array([1], np.int32), SamplingParams()), "request id"),
    "an id that cannot be written": (request("\ud800", [1]), "cannot be written to a log"),
    "a long salt": (request("a", 3, cache_salt="x" * 1025), "cache_salt"),
    "a salt that is no text": (request("a", 3, cache_salt=b"x"), "cache_salt"),
    "a salt that cannot be written": (request("a", 3, cache_salt="\udfff"), "cannot be written"),
    "a priority of 2^31": (request("a", 3, priority=2**31), "priority"),
    "a deadline in the past": (request("a", 3, deadline_ns=-1), "deadline"),
    "a negative sample": (request("a", 3, sample_index=-1), "sample_index"),
    "no prompt": (request("a", []), "the prompt is empty"),
    "a prompt of floats": (raw(np.array([1.0])), "the prompt is empty"),
    "a prompt of rows": (raw(np.array([[1]], np.int32)), "the prompt is empty"),
    "a negative token": (request("a", [3, -2]), "token id -2"),
    "a prompt as long as the model": (request("a", 64), "has 64 tokens, but max_model_len is 64"),
    "too many media": (request("a", 9, media=[image(1, n, 1) for n in range(5)]), "max_media_per_request is"),
    "media behind the prompt": (request("a", 8, media=[image(1, 5, 4)]), "claims prompt tokens 5 to 9"),
    "media before the prompt": (request("a", 8, media=[image(1, -1, 4)]), "claims prompt tokens -1 to 3"),
    "media over another": (request("a", 8, media=[image(1, 0, 4), image(2, 3, 2)]), "overlap"),
    "media in disorder": (request("a", 8, media=[image(1, 4, 2), image(2, 0, 2)]), "overlap"),
    "media without runs": (request("a", 8, media=[MediaItem(b"x", "image", (), (1, 2, 2))]), "no embeddings"),
    "an empty run": (request("a", 8, media=[image(1, 3, 0)]), "image 0 claims"),
    "over the budget": (request("a", 40, media=[image(1, 0, 33)]), "encoder_budget is 32"),
    "over the cache": (request("a", 40, media=[image(1, 0, 25)]), "encoder_cache_size is 24"),
    "no tokens": (sampled(max_tokens=0), "max_tokens"),
    "true tokens": (sampled(max_tokens=True), "max_tokens"),
    "min over max": (sampled(max_tokens=3, min_tokens=4), "min_tokens 4"),
    "no number": (sampled(temperature=float("nan")), "temperature"),
    "an endless one": (sampled(temperature=float("inf")), "temperature"),
    "a probability over one": (sampled(top_p=1.5), "top_p"),
    "a negative seed": (sampled(seed=-1), "seed"),
    "half a seed": (sampled(seed=1.5), "cannot be written to a log"),
    "a numpy seed": (sampled(seed=np.int64(3)), "cannot be written to a log"),
    "too many logprobs": (sampled(logprobs=21), "logprobs"),
    "an empty stop": (sampled(stop=("",)), "stop string"),
    "a stop that cannot be written": (sampled(stop=("\ud800",)), "cannot be written"),
    "many stops": (sampled(stop=("x",) * 17), "stop strings"),
    "a stop token of text": (sampled(stop_token_ids=("x",)), "cannot be written"),
    "a bias without end": (sampled(logit_bias={3: float("inf")}), "logit_bias of token 3"),
    "no choices": (sampled(n=0), "n must"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_door(name):
    bad, words = REFUSED[name]
    bench = Bench(max_media_per_request=4, encoder_budget=32, encoder_cache_size=24)
    good = request("good", 5)
    bench.submit(good)
    with pytest.raises(InvalidRequest, match=words) as error:
        bench.submit(bad)
    assert "\n" not in str(error.value)
    events = bench.run()
    assert bench.ends == {"good": ("length", "")}
    assert [event.request_id for event in events if isinstance(event, ev.Queued)] == ["good"]


def test_just_below_every_limit():
    bench = Bench(max_media_per_request=4, encoder_budget=25, encoder_cache_size=25)
    one = request(
        "x" * 256,
        63,
        media=[image(1, 0, 25), *(image(2, n, 1) for n in (25, 30, 62))],
        cache_salt="s" * 1024,
        priority=-(2**31),
        sample_index=2**31 - 1,
    )
    bench.submit(one)
    bench.run()
    assert bench.ends == {one.request_id: ("length", "")} and len(bench.tokens[one.request_id]) == 1


def test_what_is_queued_is_what_a_log_would_give_back():
    """An integer temperature is a float for every reader; so it is one for the live engine."""
    bench = Bench()
    bench.submit(Request("a", np.array([1], np.int32), SamplingParams(temperature=1, seed=3)))
    bench.step()
    assert type(bench.state.requests["a"].request.sampling.temperature) is float


def test_an_id_in_use():
    bench = Bench()
    bench.submit(request("a", 3))
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        bench.submit(request("a", 4))
    bench.step()
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        bench.submit(request("a", 4))
    bench.run()
    bench.submit(request("a", 4))


def test_the_queue_is_bounded():
    bench = Bench(max_num_seqs=1, max_waiting=2)
    bench.submit(request("a", 3), request("b", 3))
    with pytest.raises(QueueFull, match=r"2 requests wait already \(max_waiting\)"):
        bench.submit(request("c", 3))
    bench.step()
    bench.submit(request("c", 3))
    with pytest.raises(QueueFull):
        bench.submit(request("d", 3))
    bench.run()
    assert set(bench.ends) == {"a", "b", "c"}


def test_a_queue_that_fills_between_the_door_and_the_step_rejects():
    """A failed step sends its rows back into the queue; whoever waits at the door finds it full."""
    bench = Bench(max_num_seqs=2, max_waiting=2, fault=lambda step: "planted" if step == 1 else None)
    bench.submit(request("a", 3), request("b", 3))
    bench.step()
    bench.step()
    bench.submit(request("c", 3))
    events = bench.step()
    assert ev.Finished("c", "rejected", "2 requests wait already (max_waiting)") in events
    assert not [event for event in events if isinstance(event, ev.Queued)]
    bench.run()
    assert [bench.ends[name][0] for name in "abc"] == ["length", "length", "rejected"]


WRONG = {
    "max_num_seqs": [0, 65537],
    "token_budget": [0, 2**20 + 1],
    "max_model_len": [-1, 2**24 + 1],
    "block_size": [0, 3, 24, 2048],
    "num_blocks": [-1, 2**22 + 1],
    "encoder_budget": [0],
    "encoder_cache_size": [0],
    "max_waiting": [0],
    "max_retries": [-1],
    "checkpoint_interval": [0],
    "long_prefill_token_threshold": [-1],
    "max_media_per_request": [-1],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_settings_out_of_range(name, value):
    with pytest.raises(ConfigError, match=name):
        msgspec.structs.replace(settings_of(), **{name: value}).check()


def test_a_budget_below_the_rows():
    settings_of(max_num_seqs=8, token_budget=8).check()
    with pytest.raises(ConfigError, match="token_budget 7 is smaller than max_num_seqs 8"):
        settings_of(max_num_seqs=8, token_budget=7).check()


CONTRADICTIONS = {
    "max_model_len 0 and num_blocks 65": {"max_model_len": 0},
    "max_model_len 64 and num_blocks 0": {"num_blocks": 0},
    "must both be at least 2": {"max_model_len": 1},
    "hold 60 tokens .* less than max_model_len 64": {"num_blocks": 16},
    "no policy is called 'lifo'; there are fcfs, prefill_first, priority": {"policy": "lifo"},
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_an_engine_is_not_made_of_contradictions(words):
    config = settings_of(**CONTRADICTIONS[words])
    with pytest.raises(ConfigError, match=words):
        EngineCore(config, SimulatedExecutor(settings_of()))


def test_the_smallest_engine_there_is():
    bench = Bench(max_num_seqs=1, token_budget=1, max_model_len=2, block_size=1, num_blocks=3)
    bench.submit(request("a", 1))
    bench.run()
    assert bench.ends == {"a": ("length", "")} and len(bench.tokens["a"]) == 1


def test_settings_survive_a_log_and_strangers_are_refused():
    config = settings_of(eos_token_ids=(1, 2))
    assert EngineConfig.from_dict(config.as_dict()) == config
    for settings in ({"no_such": 1}, {"num_blocks": "9"}, {"num_blocks": True}, {"log_sync": "maybe"}):
        with pytest.raises(ConfigError, match="the settings cannot be read"):
            EngineConfig.from_dict(config.as_dict() | settings)

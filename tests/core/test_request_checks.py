"""Tests which requests are refused, with which messages."""

import numpy as np
import pytest

from mmengine.errors import ConfigError, ErrorCode, InvalidRequest, QueueFull
from mmengine.events import vocabulary as ev
from mmengine.request import GrammarRequest, MediaItem, Request, SamplingParams
from mmengine.simulation.simulated_executor import reference_tokens
from tests.core.small_engine import Bench, image, request, settings_of, video


def sampled(**options):
    return Request("a", np.array([1], np.int32), SamplingParams(**options))


def raw(prompt):
    return Request("a", prompt, SamplingParams())


def item(runs, mm_hash=b"x", grid=(1, 2, 2)):
    return MediaItem(mm_hash, "image", runs, grid)


REFUSED = {
    "no id": (request("", 3), "request_id"),
    "a long id": (request("x" * 257, 3), "1 to 256 characters"),
    "an id that is no text": (Request(7, np.array([1], np.int32), SamplingParams()), "request_id"),
    "an id that cannot be written": (request("\ud800", [1]), "an unpaired surrogate"),
    "a long salt": (request("a", 3, cache_salt="x" * 1025), "cache_salt"),
    "a salt that is no text": (request("a", 3, cache_salt=b"x"), "cache_salt"),
    "a salt that cannot be written": (request("a", 3, cache_salt="\udfff"), "unpaired surrogate"),
    "a priority of 2^31": (request("a", 3, priority=2**31), "priority"),
    "a priority that is no number": (request("a", 3, priority=float("nan")), "priority must be an integer"),
    "a true priority": (request("a", 3, priority=True), "priority must be an integer"),
    "a priority of text": (request("a", 3, priority="high"), "priority must be an integer"),
    "no priority": (request("a", 3, priority=None), "priority must be an integer"),
    "an absurd priority": (request("a", 3, priority=-(10**5000)), "priority must be an integer"),
    "a deadline in the past": (request("a", 3, deadline_ns=-1), "deadline"),
    "an endless deadline": (request("a", 3, deadline_ns=float("inf")), "deadline"),
    "a deadline of 2^62": (request("a", 3, deadline_ns=2**62), "deadline"),
    "a negative sample": (request("a", 3, sample_index=-1), "sample_index"),
    "half a sample": (request("a", 3, sample_index=0.5), "sample_index"),
    "a group that is no text": (request("a", 3, group=3), "group must be a string"),
    "a grammar that is no request": (request("a", 3, grammar=3), "cannot be written to a log"),
    "a grammar that is a text": (request("a", 3, grammar="{}"), "cannot be written to a log"),
    "a grammar behind no token": (
        request("a", 3, grammar=GrammarRequest("regex", "a", (-1,))),
        "cannot be written to a log",
    ),
    "no sampling": (Request("a", np.array([1], np.int32), None), "SamplingParams, not NoneType"),
    "no prompt": (request("a", []), "the prompt is empty"),
    "a prompt of floats": (raw(np.array([1.0])), r"int32 \[n\], not float64"),
    "a prompt of rows": (raw(np.array([[1]], np.int32)), r"int32 \[n\], not int32 \[1, 1\]"),
    "a prompt of 64 bits": (raw(np.array([1])), r"int32 \[n\], not int64"),
    "a prompt that is a list": (raw([1, 2]), "an array of token ids"),
    "no prompt at all": (raw(None), "an array of token ids"),
    "a negative token": (request("a", [3, -2]), "token id -2"),
    "a prompt as long as the model": (request("a", 64), "64 tokens > 63 maximum; max_model_len is 64"),
    "too many media": (request("a", 9, media=[image(1, n, 1) for n in range(5)]), "max_media_per_request is"),
    "media behind the prompt": (request("a", 8, media=[image(1, 5, 4)]), "claims 4 prompt tokens from 5 on"),
    "media before the prompt": (
        request("a", 8, media=[image(1, -1, 4)]),
        "claims 4 prompt tokens from -1 on",
    ),
    "media over another": (request("a", 8, media=[image(1, 0, 4), image(2, 3, 2)]), "overlap"),
    "media in disorder": (request("a", 8, media=[image(1, 4, 2), image(2, 0, 2)]), "overlap"),
    "media without runs": (request("a", 8, media=[MediaItem(b"x", "image", (), (1, 2, 2))]), "no embeddings"),
    "an empty run": (request("a", 8, media=[image(1, 3, 0)]), "image 0 claims"),
    "a run of floats": (request("a", 8, media=[item(((1.0, 2.0),))]), "not a pair of integers"),
    "a run of text": (request("a", 8, media=[item((("1", 2),))]), "not a pair of integers"),
    "a run that is true": (request("a", 8, media=[item(((1, True),))]), "not a pair of integers"),
    "a run beyond 64 bits": (
        request("a", 8, media=[item(((10**5000, 1),))]),
        "1 prompt tokens from a huge number on",
    ),
    "media that are none": (request("a", 8, media=["a.png"]), "must be a MediaItem"),
    "media without a hash": (
        request("a", 8, media=[item(((1, 2),), mm_hash="x")]),
        "must be a MediaItem with a hash",
    ),
    "a grid beyond 64 bits": (
        request("a", 8, media=[item(((1, 2),), grid=(2**70, 1, 1))]),
        "cannot be written",
    ),
    "one hash of two sizes": (
        request("a", 9, media=[item(((1, 2),)), item(((4, 3),))]),
        "image 1 has the hash of another item, but not its size",
    ),
    "over the budget": (request("a", 40, media=[image(1, 0, 33)]), "encoder_budget is 32"),
    "over the cache": (request("a", 40, media=[image(1, 0, 25)]), "encoder_cache_size is 24"),
    "no tokens": (sampled(max_tokens=0, temperature=1.0), "max_tokens 0 computes the prompt only"),
    "less than none": (sampled(max_tokens=-1), "max_tokens"),
    "true tokens": (sampled(max_tokens=True), "max_tokens"),
    "min over max": (sampled(max_tokens=3, min_tokens=4), "min_tokens 4"),
    "no number": (sampled(temperature=float("nan")), "temperature"),
    "an endless one": (sampled(temperature=float("inf")), "temperature"),
    "a probability over one": (sampled(top_p=1.5), "top_p"),
    "a negative seed": (sampled(seed=-1), "seed"),
    "half a seed": (sampled(seed=1.5), r"Expected `int . null`, got `float` - at `\$.seed`"),
    "a numpy seed": (sampled(seed=np.int64(3)), "a sampling option cannot be read: .*int64"),
    "a seed of text": (sampled(seed="x"), "seed"),
    "a true seed": (sampled(seed=True), "seed"),
    "a seed of 2^63": (sampled(seed=2**63), "seed must lie in 0 to 2"),
    "an absurd max_tokens": (sampled(max_tokens=10**5000), "max_tokens must .* not a huge number"),
    "a true temperature": (sampled(temperature=True), "temperature"),
    "no temperature": (sampled(temperature=None), "temperature"),
    "logprobs of text": (sampled(logprobs="3"), "logprobs"),
    "no stops": (sampled(stop=None), "stop"),
    "a stop token beyond 64 bits": (sampled(stop_token_ids=(2**70,)), "which is no id"),
    "a negative stop token": (sampled(stop_token_ids=(-1,)), "which is no id"),
    "a bias of a token beyond 64 bits": (sampled(logit_bias={2**70: 1.0}), "which is no id"),
    "a bias of text": (sampled(logit_bias={3: "much"}), "logit_bias"),
    "too much that is never said": (sampled(suppress_tokens=(1,) * 1025), "at most 1024 tokens"),
    "a suppressed token below zero": (sampled(suppress_tokens=(-1,)), "-1, which is no token"),
    "too many bad words": (sampled(bad_words_ids=((1, 2),) * 257), "at most 256 sequences"),
    "an empty bad word": (sampled(bad_words_ids=((),)), "1 to 16 tokens, not 0"),
    "a bad word without end": (sampled(bad_words_ids=((1,) * 17,)), "1 to 16 tokens, not 17"),
    "a bad word that is no list": (sampled(bad_words_ids=(3,)), "bad_words_ids"),
    "a bad word beyond 31 bits": (sampled(bad_words_ids=((1, 2**31),)), "which is no token"),
    "a sequence's bias without end": (sampled(sequence_bias=(((1,), float("inf")),)), "sequence_bias must"),
    "a sequence's bias that is no number": (sampled(sequence_bias=(((1,), float("nan")),)), "sequence_bias"),
    "n-grams of negative length": (sampled(no_repeat_ngram_size=-1), "no_repeat_ngram_size must"),
    "n-grams without end": (sampled(no_repeat_ngram_size=65), "no_repeat_ngram_size must"),
    "no typical tokens": (sampled(typical_p=0.0), "typical_p must"),
    "a bias that is no number": (sampled(logit_bias={3: float("nan")}), "logit_bias of token 3"),
    "too many logprobs": (sampled(logprobs=21), "logprobs"),
    "an empty stop": (sampled(stop=("",)), "stop must hold strings"),
    "a stop that cannot be written": (sampled(stop=("\ud800",)), "unpaired surrogate"),
    "many stops": (sampled(stop=("x",) * 17), "stop holds at most"),
    "a stop token of text": (sampled(stop_token_ids=("x",)), r"\$.stop_token_ids"),
    "a bias without end": (sampled(logit_bias={3: float("inf")}), "logit_bias of token 3"),
    "no choices": (sampled(n=0), "n must"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_requests(name):
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


def test_a_queued_request_has_the_logs_types():
    """An integer temperature is a float when the log is read, so the live engine must see a float too."""
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
    """A failed step's requests return to the queue, which is then full. A new request is rejected."""
    bench = Bench(max_num_seqs=2, max_waiting=2, fault=lambda step: "planted" if step == 1 else None)
    bench.submit(request("a", 3), request("b", 3))
    bench.step()
    bench.step()
    bench.submit(request("c", 3))
    events = bench.step()
    assert (
        ev.Finished("c", "rejected", "2 requests wait already (max_waiting)", ErrorCode.QUEUE_FULL) in events
    )
    assert not [event for event in events if isinstance(event, ev.Queued)]
    bench.run()
    assert [bench.ends[name][0] for name in "abc"] == ["length", "length", "rejected"]


def test_an_item_is_no_longer_than_a_prompt():
    settings_of(split_media=False, max_model_len=33, token_budget=32).check()
    with pytest.raises(ConfigError, match="smaller than an item of 33 embeddings"):
        settings_of(split_media=False, max_model_len=34, token_budget=32).check()


@pytest.mark.parametrize("group", ["nobody", "alone", "bad"])
def test_a_missing_group_leader_is_ignored(group):
    """The request runs alone if `group` names an unknown request, itself, or a refused request."""
    bench = Bench()
    alone = request("alone", 9, group=group)
    bench.submit(alone, request("other", 9))
    with pytest.raises(InvalidRequest):
        bench.submit(request("bad", []))
    bench.run()
    assert bench.tokens["alone"] == reference_tokens(alone, bench.config)[0]
    assert bench.ends == {"alone": ("length", ""), "other": ("length", "")}


def test_compat_accepts_items_that_vllm_accepts():
    settings_of(compat="vllm", token_budget=8, max_num_seqs=2, block_size=16, split_media=False).check()


def test_a_video_that_is_not_split_must_fit_a_chunk_with_the_text_between_its_runs():
    bench = Bench(split_media=False, token_budget=32, max_item_embeds=16, long_prefill_token_threshold=16)
    fits = request("fits", 40, media=[video(1, (2, 4), (14, 4))])
    bench.submit(fits)
    with pytest.raises(
        InvalidRequest, match="needs 17 tokens at once .* but long_prefill_token_threshold is 16"
    ):
        bench.submit(request("long", 40, media=[video(1, (2, 4), (15, 4))]))
    with pytest.raises(InvalidRequest, match="needs 17 embeddings, but max_item_embeds is 16"):
        bench.submit(request("large", 40, media=[image(1, 2, 17)]))
    bench.run()
    assert bench.ends == {"fits": ("length", "")}

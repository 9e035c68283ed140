"""Tests that TorchExecutor, with hand-made plans, gives the tokens of a dense model without a cache."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from runtime_toy import EOS, VOCAB, Driver, ToyModel, dense_greedy, dense_logits, positions_of, toy_request

from mmengine.config import EngineConfig
from mmengine.errors import ExecutorFailed
from mmengine.request import SamplingParams
from mmengine.runtime.executor import TorchExecutor


def make(model, watcher=None, **settings):
    sizes = {"max_num_seqs": 8, "num_blocks": 64, "block_size": 4, "encoder_cache_size": 64}
    config = EngineConfig(**{**sizes, "eos_token_ids": (EOS,), **settings})
    return Driver(TorchExecutor(model, positions_of, config, stop_watcher=watcher), config)


@pytest.fixture
def model():
    return ToyModel()


def greedy(**options):
    return SamplingParams(**{"ignore_eos": True} | options)


def test_prefill_then_decode_in_one_batch(model):
    driver = make(model)
    requests = [toy_request(f"r{i}", i, num_text=5 + 3 * i) for i in range(4)]
    for request, media in requests:
        driver.add(request, media)
    for _ in range(9):
        driver.step(*[(f"r{i}", None) for i in range(4)])
    for request, media in requests:
        want = dense_greedy(model, request, media, 9)
        assert driver.outputs(request.request_id) == want
        assert len(set(want)) > 2, "a model that repeats itself proves nothing"


def test_chunked_prefill_beside_decode(model):
    driver = make(model)
    requests = {name: toy_request(name, seed, 23) for name, seed in (("a", 1), ("b", 2), ("c", 3))}
    for request, media in requests.values():
        driver.add(request, media)
    driver.step(("a", None))
    driver.step(("b", 7), ("a", None))
    driver.step(("a", None), ("b", 1), ("c", 22))
    driver.step(("b", 15), ("c", None), ("a", None))
    for _ in range(4):
        driver.step(("c", None), ("b", None), ("a", None))
    for name, count in (("a", 8), ("b", 5), ("c", 5)):
        assert driver.outputs(name)[:count] == dense_greedy(model, *requests[name], count)


def test_media_cut_at_every_place(model):
    runs = [[(2, 4)], [(8, 3), (13, 2)]]
    request, media = toy_request("want", 5, media_runs=runs)
    want = dense_greedy(model, request, media, 4)
    without = dense_greedy(model, toy_request("t", 5, num_text=17)[0], (), 4)
    assert want != without
    for cut in range(1, len(request.prompt_token_ids)):
        driver = make(model)
        driver.add(*toy_request("r", 5, media_runs=runs))
        driver.step(("r", cut))
        for _ in range(4):
            driver.step(("r", None))
        assert driver.outputs("r") == want, f"cut at {cut}"


def test_items_of_a_step_are_encoded_in_one_call_and_shared(model):
    driver = make(model)
    one, two = (
        toy_request("one", 6, media_runs=[[(1, 3)], [(6, 2)]]),
        toy_request("two", 6, media_runs=[[(1, 3)], [(6, 2)]]),
    )
    three = toy_request("three", 7, media_runs=[[(0, 5)]])
    for request in (one, two, three):
        driver.add(*request)
    driver.step(("one", None), ("three", None))
    assert model.encoded == [3]
    driver.executor.release("one")
    driver.step(("two", None), ("one", None))
    assert model.encoded == [3]
    driver.step(("two", None), ("one", None), ("three", None))
    assert driver.outputs("two") == dense_greedy(model, *two, 2)
    assert driver.outputs("one") == dense_greedy(model, *one, 3)
    assert driver.outputs("three") == dense_greedy(model, *three, 2)


def test_evicted_features_are_encoded_again(model):
    driver = make(model)
    request, media = toy_request("r", 8, media_runs=[[(2, 6)]])
    driver.add(request, media)
    driver.step(("r", 5))
    driver.drop_features(request.media[0].mm_hash)
    driver.step(("r", None))
    assert model.encoded == [1, 1]
    driver.step(("r", None))
    assert driver.outputs("r") == dense_greedy(model, request, media, 2)


def test_missing_features_are_an_error(model):
    driver = make(model)
    request, media = toy_request("r", 8, media_runs=[[(2, 6)]])
    driver.add(request, media)
    driver.step(("r", 5))
    driver.drop_features(request.media[0].mm_hash)
    driver.encoded.add(request.media[0].mm_hash)
    with pytest.raises(ExecutorFailed, match="not on the device"):
        driver.step(("r", None))


def test_a_preempted_row_continues_exactly(model):
    sampling = SamplingParams(temperature=1.0, seed=7, ignore_eos=True)
    penal = SamplingParams(
        temperature=0.9, seed=8, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True
    )
    runs = [[(3, 4)]]
    requests = [
        toy_request("greedy", 1, media_runs=runs),
        toy_request("random", 2, media_runs=runs, sampling=sampling),
        toy_request("penal", 3, media_runs=runs, sampling=penal),
    ]
    names = [request.request_id for request, _ in requests]

    def outputs(preempt_at):
        driver = make(model)
        for request, media in requests:
            driver.add(request, media)
        for step in range(12):
            if step in preempt_at:
                driver.preempt(names[step % 3])
                driver.preempt(names[(step + 1) % 3])
            driver.step(*[(name, None) for name in names])
        return [driver.outputs(name) for name in names]

    plain = outputs(())
    assert plain[0] == dense_greedy(model, *requests[0], 12)
    assert outputs((1, 4, 5, 9)) == plain


def test_a_row_recomputed_in_chunks_continues_exactly(model):
    """A recomputed chunk may end among the output tokens that were sampled before the preemption."""
    driver = make(model)
    request, media = toy_request(
        "r", 4, media_runs=[[(3, 4)]], sampling=SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
    )
    driver.add(request, media)
    for _ in range(6):
        driver.step(("r", None))
    driver.preempt("r")
    driver.step(("r", 6))
    driver.step(("r", 8))
    for _ in range(3):
        driver.step(("r", None))
    other = make(model)
    other.add(request, media)
    for _ in range(9):
        other.step(("r", None))
    assert driver.outputs("r") == other.outputs("r")


def test_sampled_tokens_do_not_depend_on_batch_or_row(model):
    sampling = SamplingParams(temperature=1.2, top_p=0.95, seed=11, ignore_eos=True)
    request, media = toy_request("r", 1, sampling=sampling)
    alone = make(model)
    alone.add(request, media)
    for _ in range(8):
        alone.step(("r", None))
    crowd = make(model)
    crowd.add(request, media)
    for i in range(6):
        crowd.add(
            *toy_request(f"o{i}", 20 + i, num_text=4 + i, sampling=SamplingParams(temperature=i / 3, seed=i))
        )
    crowd.step(*[(f"o{i}", None) for i in range(6)])
    for step in range(8):
        crowd.step(*[(f"o{i}", None) for i in range(step % 6)], ("r", None))
    assert crowd.outputs("r") == alone.outputs("r")


def test_seed_sample_index_and_output_index_all_enter_the_noise(model):
    def draw(seed, sample_index):
        sampling = SamplingParams(temperature=5.0, seed=seed, ignore_eos=True)
        driver = make(model)
        driver.add(*toy_request("r", 1, sampling=sampling, sample_index=sample_index))
        for _ in range(8):
            driver.step(("r", None))
        return tuple(driver.outputs("r"))

    drawn = [draw(seed, index) for seed, index in ((1, 0), (1, 1), (2, 0), (1 + 2**40, 0), (1, 0))]
    assert drawn[0] == drawn[4]
    assert len(set(drawn)) == 4


def test_nan_fails_one_row_alone(model):
    driver = make(model)
    good, bad = toy_request("good", 1, 6), toy_request("bad", 2, 6)
    bad[0].prompt_token_ids[3] = model.poisoned = 7
    good[0].prompt_token_ids[good[0].prompt_token_ids == 7] = 8
    driver.add(*bad)
    driver.add(*good)
    result = driver.step(("bad", None), ("good", None))
    assert [index for index, _ in result.errors] == [0]
    assert "NaN or infinite" in result.errors[0][1]
    assert result.token_ids[0] == 0
    assert driver.outputs("good") == dense_greedy(model, *good, 1)
    # The next request gets the failed request's blocks and row.
    driver.preempt("bad")
    driver.add(*toy_request("next", 3, 1))
    assert not driver.step(("next", None), ("good", None)).errors


def test_logprobs_are_the_models_own(model):
    driver = make(model)
    warm = toy_request(
        "warm", 1, sampling=SamplingParams(temperature=2.0, top_k=5, seed=1, logprobs=3, ignore_eos=True)
    )
    plain = toy_request("plain", 2, sampling=greedy(logprobs=0))
    for request in (warm, toy_request("none", 3), plain):
        driver.add(*request)
    result = driver.step(("warm", None), ("none", None), ("plain", None))
    assert [index for index, _ in result.logprobs] == [0, 2]
    for (request, media), (index, entries) in zip((warm, plain), result.logprobs):
        want = dense_logits(model, request, media, request.prompt_token_ids.tolist())[-1].log_softmax(-1)
        assert entries[0][0] == result.token_ids[index]
        for token, logprob in entries:
            assert logprob == pytest.approx(float(want[token]), abs=1e-4)
        assert [token for token, _ in entries[1:]] == want.argsort(descending=True)[
            : len(entries) - 1
        ].tolist()
    assert [len(entries) for _, entries in result.logprobs] == [4, 1]


def first_outputs(model, seed, count):
    return dense_greedy(model, *toy_request("r", seed), count)


def test_stops_at_eos_and_stop_tokens(model):
    outputs = first_outputs(model, 1, 6)
    eos = outputs[2]
    other = next(token for token in outputs if token != eos and outputs.index(token) > 0)
    at = outputs.index(other)
    driver = make(model, eos_token_ids=(eos, 2))
    driver.add(*toy_request("eos", 1, sampling=greedy(ignore_eos=False)))
    driver.add(*toy_request("ignores", 1, sampling=greedy()))
    driver.add(*toy_request("token", 1, sampling=greedy(stop_token_ids=(VOCAB + 5, other))))
    driver.add(*toy_request("both", 1, sampling=greedy(ignore_eos=False, stop_token_ids=(eos,))))
    for step, token in enumerate(outputs):
        stops = dict(driver.step(*[(name, None) for name in ("eos", "ignores", "token", "both")]).stops)
        assert (stops.get(0) == "eos") == (token == eos)
        assert 1 not in stops
        assert (stops.get(2) == "token") == (token == other), (step, at)
        assert stops.get(3) == stops.get(0)


def test_min_tokens_excludes_the_end_tokens(model):
    outputs = first_outputs(model, 1, 3)
    driver = make(model, eos_token_ids=(outputs[0], VOCAB + 1))
    driver.add(
        *toy_request(
            "r", 1, sampling=greedy(ignore_eos=False, min_tokens=2, stop_token_ids=(outputs[1], 10**6))
        )
    )
    driver.add(*toy_request("plain", 1, sampling=greedy()))
    for _ in range(2):
        assert not driver.step(("r", None), ("plain", None)).stops
    assert not {outputs[0], outputs[1]} & set(driver.outputs("r")[:2])
    assert driver.outputs("plain")[0] == outputs[0]


class Watcher:
    """A StopWatcher that stops a row at its second output token, and records each call's number of rows."""

    def __init__(self):
        self.seen, self.calls = {}, []

    def admit(self, row, request, token_ids):
        self.seen[row] = len(token_ids) - len(request.prompt_token_ids)

    def feed(self, rows, token_ids):
        self.calls.append(len(rows))
        assert rows.dtype == token_ids.dtype == np.int32
        found = []
        for index, row in enumerate(rows.tolist()):
            self.seen[row] += 1
            if self.seen[row] == 2:
                found.append(index)
        return found


def test_stop_strings_ask_the_watcher_about_their_rows_only(model):
    watcher = Watcher()
    driver = make(model, watcher)
    driver.add(*toy_request("plain", 1))
    driver.add(*toy_request("text", 2, sampling=greedy(stop=("x",))))
    driver.add(*toy_request("later", 3, sampling=greedy(stop=("x",), min_tokens=2)))
    driver.step(("plain", None))
    assert watcher.calls == []
    everyone = [("plain", None), ("later", None), ("text", None)]
    assert driver.step(*everyone).stops == ()
    assert driver.step(*everyone).stops == ((2, "string"),)
    assert watcher.calls == [2, 2]
    driver.preempt("text")
    assert driver.step(*everyone).stops == ()
    assert watcher.seen[driver.rows["text"]] == 3


def test_a_step_that_samples_nothing(model):
    driver = make(model)
    driver.add(*toy_request("r", 1))
    result = driver.step(("r", 4))
    assert len(result.token_ids) == 0
    assert result.device_ns > 0


def test_a_failed_step_is_one_sentence_and_leaves_the_executor_usable(model):
    driver = make(model)
    driver.add(toy_request("r", 5, media_runs=[[(2, 4)]])[0])
    with pytest.raises(ExecutorFailed, match="media item 0 of request r .* not attached"):
        driver.step(("r", None))
    driver = make(model)
    request, media = toy_request("r", 5, media_runs=[[(2, 4)]])
    driver.add(request, media)
    driver.encoded.add(request.media[0].mm_hash)
    with pytest.raises(ExecutorFailed, match="not on the device"):
        driver.step(("r", None))
    driver.encoded.clear()
    driver.preempt("r")
    driver.step(("r", None))
    assert driver.outputs("r") == dense_greedy(model, request, media, 1)
    model.logits = lambda hidden: hidden @ torch.zeros(3, 3)
    with pytest.raises(ExecutorFailed, match="step 3 failed: RuntimeError"):
        driver.step(("r", None))
    with pytest.raises(ExecutorFailed, match="no step was dispatched"):
        driver.executor.collect()


def test_an_encoder_with_too_few_embeddings_is_refused(model):
    encode = model.encode
    model.encode = lambda patches, grids: encode(patches, grids)[:-1]
    driver = make(model)
    driver.add(*toy_request("r", 5, media_runs=[[(2, 4)]]))
    with pytest.raises(ExecutorFailed, match="3 embeddings for media items with 4"):
        driver.step(("r", None))


def test_close_releases_everything(model):
    driver = make(model)
    driver.add(*toy_request("r", 5, media_runs=[[(2, 4)]]))
    driver.executor.dispatch(driver.plan(("r", None)))
    driver.executor.close()
    with pytest.raises(ExecutorFailed):
        driver.executor.collect()


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(model, seed):
    """Six requests, some with media, run in random chunks and orders and with random preemptions."""
    random = np.random.default_rng(seed)
    driver = make(model, num_blocks=80)
    requests = {}
    for i in range(6):
        runs = [[[(2, 3)], [(7, 4), (12, 1)]], [], [[(0, 6)]]][i % 3]
        requests[f"r{i}"] = toy_request(f"r{i}", 10 * seed + i, 9 + i, runs)
        driver.add(*requests[f"r{i}"])
    names = list(requests)
    for _ in range(30):
        for name in list(driver.rows):
            if random.random() < 0.04:
                driver.preempt(name)
        selected = random.permutation(names)[: random.integers(1, 7)].tolist()
        work = []
        for name in selected:
            left = len(driver.known[name]) - driver.computed.get(name, 0)
            work.append((name, int(random.integers(1, left + 1)) if random.random() < 0.7 else None))
        driver.step(*work)
    lengths = [len(driver.outputs(name)) for name in names]
    assert sum(lengths) > 30
    for name, count in zip(names, lengths):
        assert driver.outputs(name) == dense_greedy(model, *requests[name], count)


def test_of_rows_with_one_token_each_only_some_may_sample(model):
    driver = make(model)
    for name in "abc":
        driver.add(*toy_request(name, ord(name)))
    driver.step(("a", None), ("b", None), ("c", None))
    plan = driver.plan(("a", None), ("b", None), ("c", None))
    driver.executor.dispatch(replace(plan, sample=np.array([0, 2], np.int32)))
    want = [first_outputs(model, ord(name), 2)[1] for name in "ac"]
    assert want[0] != want[1]
    assert driver.executor.collect().token_ids.tolist() == want


def test_two_dispatched_steps_are_collected_in_order(model):
    driver = make(model)
    driver.add(*toy_request("a", 1))
    driver.add(*toy_request("b", 2))
    plans = [driver.plan(("a", None)), driver.plan(("b", None))]
    for plan in plans:
        driver.executor.dispatch(plan)
    tokens = list(itertools.chain(*(driver.executor.collect().token_ids.tolist() for _ in plans)))
    assert tokens == [first_outputs(model, 1, 1)[0], first_outputs(model, 2, 1)[0]]

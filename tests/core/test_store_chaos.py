"""Tests engines that share an unreliable block store: no request hangs, and all requests get their tokens."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.replay.convert.redact import redact
from mmengine.replay.queries.why import why
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.chaos import EOS_IN, Clock
from tests.core.shaky_store import FAULTS, ShakyRemote, ShakyStore
from tests.core.workloads import check_invariants, small_config, small_request

SEEDS, SOAK_SEEDS = 3, 200


class Engine:
    """One of the engines that share a store. `fault`: the executor's fault function, as in
    SimulatedExecutor.
    """

    def __init__(self, config, store, folder, fault=lambda step: None):
        self.remote, self.folder = ShakyRemote(store, config.block_size), folder
        executor = SimulatedExecutor(
            config, eos_in=EOS_IN, check_kv=True, arrived=self.remote.take, fault=fault
        )
        self.core = EngineCore(config, executor, sink=LogWriter(folder), clock=Clock(), remote=self.remote)
        self.remote.connect(self.core, executor)
        self.requests, self.tokens, self.ends = {}, {}, {}

    def submit(self, request):
        self.core.submit(request)
        self.requests[request.request_id] = request

    def step(self):
        self.remote.deliver()
        for output in self.core.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
        check_invariants(self.core.state)

    def run(self, most=5000):
        while self.core.has_work:
            self.step()
            most -= 1
            assert most, "a request hangs"

    def events(self):
        return [record.event for record in LogReader(self.folder)]

    def check(self):
        self.core.close()
        for name, request in self.requests.items():
            tokens, end = reference_tokens(request, self.core.config, eos_in=EOS_IN)
            if self.ends[name] in ("stop", "length"):
                assert (self.tokens[name], self.ends[name]) == (tokens, end), name
            else:
                assert self.ends[name] in ("abort", "error")
        report = verify(self.folder)
        assert report.ok and not report.unfinished, report.divergence


def config_of(rng, **settings):
    config = small_config(rng)
    while config.compat or config.num_state_slots:
        config = small_config(rng)
    size = 4
    values = {
        "block_store": "simulated",
        "block_store_path": "-",
        "enable_prefix_caching": True,
        "atomic_runs": False,
        "whole_prompt": False,
        "block_size": size,
        "num_blocks": 1 + -(-config.max_model_len // size) + rng.randint(0, 20),
        **settings,
    }
    return msgspec.structs.replace(config, max_waiting=64, fetch_timeout_s=40e-9, **values)


@pytest.mark.parametrize(
    "seed", [*range(SEEDS), *(pytest.param(n, marks=pytest.mark.soak) for n in range(SEEDS, SOAK_SEEDS))]
)
def test_all_requests_end_with_their_tokens_whatever_the_store_does(seed, tmp_path):
    rng = random.Random(seed)
    store, last = ShakyStore(rng), None
    engines = [
        Engine(
            config_of(rng),
            store,
            tmp_path / str(n),
            lambda step: "planted" if rng.random() < 0.03 else None,
        )
        for n in range(2)
    ]
    for number in range(30):
        engine = rng.choice(engines)
        request = small_request(
            rng, f"r{number}", engine.core.config, like=last if rng.random() < 0.7 else None
        )
        longest = engine.core.config.max_model_len
        if len(request.prompt_token_ids) < longest and not any(
            item.num_embeds > engine.core.config.largest_item for item in request.media
        ):
            try:
                engine.submit(request)
                last = request
            except ValueError:
                continue
        if rng.random() < 0.1 and engine.requests:
            engine.core.cancel(rng.choice(list(engine.requests)))
        if rng.random() < 0.05:
            engine.core.reset_prefix_cache(preempt_running=rng.random() < 0.5)
        for engine in engines:
            for _ in range(rng.randrange(4)):
                engine.step()
    for engine in engines:
        engine.run()
        engine.check()
    assert sum(len(engine.requests) for engine in engines) > 5


def prompt(name, count=18, **fields):
    request = small_request(random.Random(1), name, config_of(random.Random(3)))
    tokens = np.arange(100, 100 + count, dtype=np.int32)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=3)
    return replace(request, prompt_token_ids=tokens, media=(), sampling=sampling, grammar=None, **fields)


def plain_config():
    rng = random.Random(3)
    return config_of(
        rng,
        max_model_len=64,
        num_blocks=40,
        token_budget=64,
        max_num_seqs=4,
        num_draft_tokens=0,
        lookahead_tokens=0,
        long_prefill_token_threshold=0,
        encoder_piece=0,
        admission_reserve="prompt",
        checkpoint_interval=1,
        policy="fcfs",
        swap_blocks=0,
        preempt_mode="recompute",
        draft_policy="auto",
        max_item_embeds=0,
        split_media=True,
        max_retries=1,
    )


@pytest.fixture
def pair(tmp_path):
    store, config = ShakyStore(random.Random(1), chance=0), plain_config()
    return [Engine(config, store, tmp_path / str(n)) for n in range(2)]


def kinds(engine):
    return [type(event) for event in engine.events()]


def test_an_engine_fetches_another_engines_blocks_and_both_logs_verify(pair):
    one, other = pair
    for engine in pair:
        engine.submit(prompt("a"))
        engine.run()
        engine.check()
    assert ev.Fetched not in kinds(one) and one.tokens == other.tokens
    (fetched,) = [event for event in other.events() if isinstance(event, ev.Fetched)]
    (arrived,) = [event for event in other.events() if isinstance(event, ev.Arrived)]
    (admitted,) = [event for event in other.events() if isinstance(event, ev.Admitted)]
    assert len(fetched.blocks) == 4 * 4 and len(arrived.digests) == 4 * 8
    assert admitted.cached_blocks == fetched.blocks  # 16 of 18 tokens
    assert other.core.stats().num_fetched_blocks == 4


def test_requests_that_share_a_prefix_fetch_it_once(pair):
    one, other = pair
    one.submit(prompt("a"))
    one.run()
    for name in ("b", "c", "d"):
        other.submit(prompt(name))
    other.run()
    other.check()
    admitted = [kind for kind in kinds(other) if issubclass(kind, ev.Admitted)]
    assert kinds(other).count(ev.Fetched) == 1 and len(admitted) == 3


def test_a_silent_store_costs_its_deadline_once_for_all_requests(pair):
    one, other = pair
    one.submit(prompt("a"))
    one.run()
    silent = other.remote.fetch
    other.remote.fetch = lambda *asked: None
    for name in ("b", "c", "d"):
        other.submit(prompt(name))
    other.run()
    other.check()
    lost = [event for event in other.events() if isinstance(event, ev.Lost)]
    assert [event.reason for event in lost] == ["deadline"] and silent
    assert kinds(other).count(ev.Fetched) == 1


def test_a_prompt_that_was_begun_elsewhere_goes_on_with_its_first_tokens(pair):
    one, other = pair
    one.submit(prompt("a"))
    one.run()
    first = np.array(one.tokens["a"][:1], np.int32)
    other.submit(prompt("a", outputs=first))
    other.run()
    assert [*first.tolist(), *other.tokens["a"]] == one.tokens["a"]
    assert ev.Arrived in kinds(other)
    other.core.close()
    assert verify(other.folder).ok


def test_a_log_explains_store_fetches_and_can_be_redacted(pair, tmp_path):
    one, other = pair
    one.submit(prompt("a"))
    one.run()
    torn = list(one.remote.store.values)[3]
    one.remote.store.values[torn] = bytes(len(one.remote.store.values[torn]))
    other.submit(prompt("b"))
    other.run()
    other.check()
    told = {claim.kind: claim.text for claim in why(other.folder, "b")}
    assert "4 further blocks" in told["fetch"] and "3 blocks" in told["arrived"]
    assert "it does not hold" in told["lost"] and "computed instead" in told["lost"]
    redact(other.folder, tmp_path / "redacted", b"k" * 16)
    assert verify(tmp_path / "redacted").ok
    first, last = (
        [record.event for record in LogReader(folder) if isinstance(record.event, ev.Arrived)]
        for folder in (other.folder, tmp_path / "redacted")
    )
    assert len(first) == len(last) == 1 and first[0].digests != last[0].digests


def test_a_snapshot_holds_fetches(pair):
    one, other = pair
    one.submit(prompt("a"))
    one.run()
    other.remote.fetch = lambda *asked: None
    other.submit(prompt("b"))
    while not other.core.state.fetching:
        other.step()
    data = other.core.snapshot(7)
    state, _ = snapshot.restore(data)
    assert state_digest(state) == state_digest(other.core.state)
    assert list(state.fetching) == ["b"]


def test_the_faults_are_met():
    rng, met = random.Random(5), set()
    store = ShakyStore(rng, 0.5)
    for fault in FAULTS:
        met |= {fault for _ in range(50) if store.strikes(fault)}
    assert met == set(FAULTS)

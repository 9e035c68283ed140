"""Tests mmengine's core as vLLM's scheduler, without a model. Fake workers compute tokens from the scheduled
blocks, positions and tokens, so a wrong value changes an answer.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.replay.queries.pending import pending_requests
from tests.vllm.fake_workers import EOS, Workers, answer
from tests.vllm.stand_in import FinishReason, PauseState, RequestStatus, install


class FullAttentionSpec:
    """Replaces vLLM's class of the same name, which marks a KV group's kind."""


class FakeRequest:
    """Provides the Request attributes that mmengine's scheduler reads."""

    def __init__(self, name, prompt, max_tokens=9, *, media=(), grammar=None, priority=0, stop_token_ids=()):
        self.request_id, self.prompt_token_ids, self.max_tokens = name, list(prompt), max_tokens
        self.sampling_params = SimpleNamespace(
            eos_token_id=EOS,
            stop_token_ids=list(stop_token_ids),
            min_tokens=0,
            num_logprobs=None,
            prompt_logprobs=None,
        )
        self.pooling_params = self.prompt_embeds = self.lora_request = self.trace_headers = None
        self.cache_salt = self.kv_transfer_params = self.stop_reason = None
        self.use_structured_output, self.resumable, self.skip_reading_prefix_cache = (
            bool(grammar),
            False,
            False,
        )
        self.structured_output_request = SimpleNamespace(grammar=None) if grammar else None
        self.mm_features, self.priority, self.client_index, self.status = list(media), priority, 0, None
        self.num_prompt_tokens = len(prompt)
        self.output_token_ids = []

    def append_output_token_ids(self, token):
        self.output_token_ids.append(token)

    @property
    def num_output_tokens(self):
        return len(self.output_token_ids)


def feature(identifier, offset, length):
    position = SimpleNamespace(offset=offset, length=length, is_embed=None)
    return SimpleNamespace(identifier=identifier, modality="image", mm_position=position)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that creates a scheduler with a log in tmp_path / "log"."""
    install(monkeypatch)
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))

    def make(*, manager=None, **options):
        from mmengine_vllm.driving.scheduler import Scheduler

        kv_config = SimpleNamespace(
            num_blocks=options.pop("num_blocks", 40),
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())] * options.pop("groups", 1),
            needs_kv_cache_zeroing=False,
        )
        return Scheduler(vllm_config(**options), kv_config, manager or Manager(), 4)

    return make


def vllm_config(*, drafts=0, overlaps=False, is_second_runner=False, policy="fcfs", seqs=4, transfer=None):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=seqs,
            max_num_batched_tokens=24,
            policy=policy,
            long_prefill_token_threshold=0,
            disable_chunked_mm_input=False,
            async_scheduling=overlaps,
            enable_chunked_prefill=True,
        ),
        model_config=SimpleNamespace(
            max_model_len=64,
            supports_multimodal_inputs=True,
            runner_type="generate",
            is_encoder_decoder=False,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        lora_config=None,
        kv_transfer_config=transfer,
        kv_events_config=None,
        speculative_config=None,
        num_speculative_tokens=drafts,
        num_lookahead_tokens=0,
        use_v2_model_runner=is_second_runner,
    )


class Manager:
    """Replaces vLLM's StructuredOutputManager. `refused`: a token that no grammar accepts."""

    def __init__(self, refused=None):
        self.refused, self.masks = refused, []

    def accept_tokens(self, request, tokens):
        return not (request.use_structured_output and self.refused in tokens)

    def validate_tokens(self, request, tokens):
        return tokens

    def grammar_bitmask(self, requests, ids, drafts):
        self.masks.append(ids)
        return np.zeros((len(ids), 1), np.int32)


def run(scheduler, workers, requests, *, before=None, depth=1):
    """Run vLLM's loop until all requests end. Return each request's outputs. `depth`: maximum number of steps
    in flight.
    """
    got, queue, step = {request.request_id: [] for request in requests}, [], 0
    arrivals = list(requests)
    while arrivals or queue or scheduler.has_requests():
        for _ in range(3):
            if arrivals:
                scheduler.add_request(arrivals.pop(0))
        if before is not None:
            before(step)
        has_tokens = False
        if scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.get_grammar_bitmask(output)
            queue.append((output, workers.run(output)))
            has_tokens = output.total_num_scheduled_tokens > 0
        if len(queue) == depth or not has_tokens:
            _update(scheduler, workers, *queue.pop(0), got)
        step += 1
        assert step < 500
    scheduler.shutdown()
    return got


def _update(scheduler, workers, output, result, got):
    for of_client in scheduler.update_from_output(output, result).values():
        for each in of_client.outputs:
            got[each.request_id].append(each)
    if workers.num_drafts and output.total_num_scheduled_tokens:
        scheduler.update_draft_token_ids(workers.propose())


def tokens_of(outputs):
    return [token for output in outputs for token in output.new_token_ids]


def some_requests(number, **options):
    shared = [5, 6, 7, 8, 9, 10, 11, 12]
    return [
        FakeRequest(
            f"r{n}", (shared if n % 2 else [n + 20]) + [n + 30] * (1 + 5 * n % 17), 4 + n % 13, **options
        )
        for n in range(number)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "priority"},
        {"drafts": 3},
        {"is_second_runner": True},
        {"overlaps": True},
        {"overlaps": True, "is_second_runner": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_answers_are_right_in_a_pool_that_is_too_small(start, tmp_path, options):
    requests = some_requests(14)
    for number, request in enumerate(requests):
        request.priority = number % 3
    scheduler = start(num_blocks=18, **options)
    second = options.get("is_second_runner", False)
    workers = Workers(4, is_second_runner=second, num_drafts=options.get("drafts", 0))
    got = run(scheduler, workers, requests, depth=2 if options.get("overlaps") else 1)
    for request in requests:
        assert tokens_of(got[request.request_id]) == answer(request, 64)
        assert got[request.request_id][-1].finish_reason is not None
    events = [record.event for record in LogReader(tmp_path / "log")]
    assert any(isinstance(event, ev.Preempted) for event in events)
    report = verify(tmp_path / "log", invariants=True)
    assert report.divergence is None and report.rederived and not report.unfinished
    if options.get("drafts"):
        assert scheduler.core.stats().drafts[0].accepted > 0


@pytest.mark.parametrize("rules", ["", "vllm"])
def test_images_are_encoded_once_and_freed(start, tmp_path, monkeypatch, rules):
    monkeypatch.setenv("MMENGINE_COMPAT", rules)
    pictures = [feature(f"image {n % 3}", 2, 7) for n in range(9)]
    requests = [FakeRequest(f"r{n}", [1] * 11 + [n], 5, media=[pictures[n]]) for n in range(9)]
    got = run(start(), Workers(4), requests)
    assert all(tokens_of(got[each.request_id]) == answer(each, 64) for each in requests)
    assert verify(tmp_path / "log").divergence is None


def test_a_request_waits_for_its_grammar_and_ends_if_the_grammar_refuses_a_token(start, tmp_path):
    plain, form = FakeRequest("plain", [9] * 3, 12), FakeRequest("form", [8] * 3, 12, grammar="json")
    third = answer(form, 64)[2]
    manager = Manager(refused=third)

    def before(step):
        if step == 4:
            form.structured_output_request.grammar = object()

    got = run(start(manager=manager), Workers(4), [plain, form], before=before)
    assert tokens_of(got["plain"]) == answer(plain, 64)
    assert tokens_of(got["form"]) == answer(form, 64)[:2]
    assert got["form"][-1].finish_reason == FinishReason.ERROR
    assert manager.masks and all(ids == ["form"] for ids in manager.masks)
    events = [record.event for record in LogReader(tmp_path / "log")]
    assert ev.GrammarReady("form") in events


def test_a_grammar_that_cannot_be_compiled_ends_its_request(start):
    form = FakeRequest("form", [8] * 3, grammar="json")
    form.structured_output_request.grammar = ValueError("no such rule")
    got = run(start(), Workers(4), [form])
    assert [output.finish_reason for output in got["form"]] == [FinishReason.ERROR]


@pytest.mark.parametrize("overlaps", [False, True])
def test_aborted_requests_give_no_more_outputs_and_leave_the_workers(start, tmp_path, overlaps):
    requests, workers = some_requests(6), Workers(4)
    scheduler = start(overlaps=overlaps)
    counts = {}

    def before(step):
        if step == 3:
            names = ["r1", "r4", "unknown"]
            ended = scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
            assert [request.request_id for request in ended] == ["r1", "r4"]
            counts.update({name: len(got_so_far(name)) for name in ("r1", "r4")})

    def got_so_far(name):
        return workers.requests[name].tokens if name in workers.requests else []

    got = run(scheduler, workers, requests, before=before, depth=1 + overlaps)
    assert not any(output.finish_reason for name in counts for output in got[name])
    for request in requests:
        if request.request_id not in counts:
            assert tokens_of(got[request.request_id]) == answer(request, 64)
    assert verify(tmp_path / "log", invariants=True).divergence is None
    events = [record.event for record in LogReader(tmp_path / "log")]
    assert sum(isinstance(event, ev.Cancelled) for event in events) == 2


def test_a_request_that_never_fits_ends_with_an_error_and_harms_no_other(start):
    long, fine = FakeRequest("long", range(3, 90)), FakeRequest("fine", [4] * 5)
    pooled = FakeRequest("pooled", [4] * 5)
    pooled.pooling_params = object()
    got = run(start(), Workers(4), [long, pooled, fine])
    for name, what in (("long", "max_model_len"), ("pooled", "pooling requests")):
        (refusal,) = got[name]
        assert refusal.finish_reason == FinishReason.ERROR and what in refusal.stop_reason
    assert tokens_of(got["fine"]) == answer(fine, 64)


def test_stop_tokens_end_an_answer(start):
    request = FakeRequest("r", [9] * 4, 20)
    request.sampling_params.stop_token_ids = [answer(request, 64)[3]]
    got = run(start(), Workers(4), [request])
    assert tokens_of(got["r"]) == answer(request, 64) and len(tokens_of(got["r"])) <= 4
    assert got["r"][-1].stop_reason == request.sampling_params.stop_token_ids[0]


def test_the_end_of_a_text_keeps_the_accepted_drafts_before_it(start):
    start()  # makes the stand-ins importable as vLLM's modules
    from mmengine_vllm.driving.step_results import StopRules

    rules = StopRules(4, lambda request, tokens: True)
    requests = {
        "a": FakeRequest("a", [5], stop_token_ids=[9]),
        "b": FakeRequest("b", [5], stop_token_ids=[9]),
    }
    for row, request in enumerate(requests.values()):
        rules.admit(row, request)
    plan = SimpleNamespace(rows=np.array([1, 0]), sample=np.array([0, 1]))
    result = rules.result(plan, requests, ["b", "a"], [[7, 8, EOS, 6], [7, 9, EOS]], True)
    assert result.token_ids.tolist() == [7, 8, EOS, 7, 9] and result.counts.tolist() == [3, 2]
    assert result.stops == ((0, "eos"), (1, "token")) and requests["a"].stop_reason == 9


def test_tokens_that_wait_for_the_log_are_returned_once_it_is_written(start, tmp_path, monkeypatch):
    scheduler, requests, calls = start(num_blocks=60), some_requests(6), 0
    commit = scheduler.core.sink.commit

    def commit_sometimes():
        nonlocal calls
        calls += 1
        return calls % 5 != 4 and commit()

    monkeypatch.setattr(scheduler.core.sink, "commit", commit_sometimes)
    got = run(scheduler, Workers(4), requests)
    assert all(tokens_of(got[each.request_id]) == answer(each, 64) for each in requests)
    assert verify(tmp_path / "log").divergence is None


def test_a_paused_scheduler_holds_requests_back(start):
    scheduler, workers, request = start(), Workers(4), FakeRequest("r", [5] * 4)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.add_request(request)
    assert scheduler.has_requests() and not scheduler.schedule().total_num_scheduled_tokens
    scheduler.set_pause_state(PauseState.UNPAUSED)
    got = {"r": []}
    while scheduler.has_requests():
        output = scheduler.schedule()
        _update(scheduler, workers, output, workers.run(output), got)
    assert tokens_of(got["r"]) == answer(request, 64)


def test_a_reset_of_the_prefix_cache_computes_running_requests_again(start, tmp_path):
    scheduler, requests = start(num_blocks=60), some_requests(4)

    def before(step):
        if step == 3:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            scheduler.reset_encoder_cache()

    got = run(scheduler, Workers(4), requests, before=before)
    assert all(tokens_of(got[each.request_id]) == answer(each, 64) for each in requests)
    assert verify(tmp_path / "log").divergence is None


def test_unsupported_options_are_refused_by_name(start):
    from mmengine.errors import ConfigError

    with pytest.raises(
        ConfigError, match=r"2 KV cache groups .*; KV connectors .*; drafts with asynchronous"
    ):
        start(groups=2, transfer=object(), drafts=2, overlaps=True)


def test_a_second_start_keeps_the_log_of_the_first(start, tmp_path):
    first = start()
    first.add_request(FakeRequest("r", [5] * 4, 9))
    workers = Workers(4)
    for _ in range(3):
        output = first.schedule()
        first.update_from_output(output, workers.run(output))
    del first  # without shutdown, as after kill -9
    second = start()
    second.shutdown()
    assert (tmp_path / "log-2").is_dir()
    (pending,) = pending_requests(tmp_path / "log")
    assert pending.request_id == "r" and pending.state == "running"
    assert pending.output_tokens == answer(FakeRequest("r", [5] * 4, 9), 64)[:3]

"""Tests max_in_flight 2: each step is decided while the previous step runs."""

import numpy as np
import pytest

from mmengine.errors import ConfigError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.request import GrammarRequest
from mmengine.simulation.simulated_executor import CostModel, SimulatedExecutor, reference_tokens
from tests.core.small_engine import Bench, image, ints, request, settings_of
from tests.core.workloads import Watched


class Overlapping(Bench):
    """A bench with two steps in flight and checks of their plans. `most`: the largest number of steps in
    flight so far.
    """

    def __init__(self, *, fault=None, cost=None, eos_in=0, sink=None, **settings):
        settings = {"max_in_flight": 2, **settings}
        options = {"fault": fault} if fault else {}
        options |= {"cost": cost} if cost else {}
        inner = SimulatedExecutor(settings_of(**settings), eos_in=eos_in, check_kv=True, **options)
        self.watched = Watched(inner)
        super().__init__(executor=self.watched, sink=sink, **settings)
        self.watched.state = self.core.state
        self.most = 0

    def step(self):
        events = super().step()
        self.most = max(self.most, len(self.state.flights))
        for flight in self.state.flights if len(self.state.flights) > 1 else ():
            assert not self.state.scheduled_drafts[flight.rows].any(), "a step with drafts runs alone"
        return events


def test_the_next_step_is_decided_while_one_runs():
    bench = Overlapping()
    one = request("a", 5, max_tokens=6)
    bench.submit(one)
    first, second, third = bench.step(), bench.step(), bench.step()
    assert [type(event) for event in first] == [ev.Queued, ev.Admitted, ev.Dispatched]
    assert [type(event) for event in second] == [ev.Scheduled, ev.Dispatched], "nothing was collected"
    assert [type(event) for event in third] == [ev.Executed, ev.Scheduled, ev.Dispatched]
    bench.run()
    assert bench.tokens["a"] == reference_tokens(one, bench.config)[0]
    assert bench.most == 2


def test_one_step_in_flight_records_no_dispatch():
    bench = Bench()
    bench.submit(request("a", 5))
    assert not [event for event in bench.run() if isinstance(event, ev.Dispatched)]


def test_a_row_that_ends_by_length_is_not_computed_further():
    bench = Overlapping()
    bench.submit(request("a", 5, max_tokens=3))
    events = bench.run()
    computed = [event for event in events if isinstance(event, (ev.Admitted, ev.Scheduled))]
    assert len(computed) == 3, "one step for the prompt and two for tokens"
    assert bench.ends["a"] == ("length", "")


def test_tokens_computed_after_an_end_are_dropped():
    bench = Overlapping(eos_in=3, max_num_seqs=1)
    requests = [request(f"r{n}", 5 + n, max_tokens=40) for n in range(4)]
    bench.submit(*requests)
    events = bench.run()
    for one in requests:
        tokens, reason = reference_tokens(one, bench.config, eos_in=3)
        assert (bench.tokens[one.request_id], bench.ends[one.request_id][0]) == (tokens, reason)
    given = sum(len(ints(event.token_ids)) for event in events if isinstance(event, ev.Executed))
    assert given > sum(map(len, bench.tokens.values())), "some tokens were computed after an end"
    assert bench.state.blocks.num_free == 64 and len(bench.state.free_rows) == 1


def test_a_row_and_its_blocks_are_free_when_the_last_step_that_names_them_ran():
    bench = Overlapping(max_num_seqs=1)
    bench.submit(request("a", 6, max_tokens=20), request("b", 6))
    bench.step()
    bench.step()
    bench.core.cancel("a")
    bench.step()
    assert list(bench.state.leaving) == [0] and not bench.state.free_rows
    held = bench.state.block_table[0, : bench.state.num_blocks[0]]
    assert (bench.state.blocks.references[held] == 1).all()
    bench.run()
    assert bench.ends == {"a": ("abort", "cancelled"), "b": ("length", "")}
    assert bench.state.blocks.num_free == 64 and not bench.state.leaving


def test_media_of_a_left_row_stay_until_their_step_ran():
    """A cancelled request's media stay in use until the step in flight has ended."""
    bench = Overlapping(token_budget=6, max_num_seqs=1)
    bench.submit(request("a", 20, media=[image(1, 2, 8)]))
    bench.step()
    bench.step()
    (key,) = bench.state.encoder.entries
    bench.core.cancel("a")
    bench.step()
    assert bench.state.leaving and bench.state.encoder.entries[key].references == 1
    bench.run()
    assert bench.state.encoder.entries[key].references == 0


FORM = GrammarRequest("regex", "a+")


def run_with_form(bench, grammar=FORM):
    """Run a request with a grammar beside a plain request. Return each step's number of rows."""
    requests = [request("plain", 5, max_tokens=8), request("bound", 5, max_tokens=4, grammar=grammar)]
    bench.submit(*requests)
    bench.core.inbox.put(ev.GrammarReady("bound"))
    sizes = {}
    while bench.core.has_work:
        bench.step()
        sizes |= {flight.step: len(flight.rows) for flight in bench.state.flights}
        waits = bench.state.running[bench.state.runs_ahead_to[bench.state.running] == 0]
        assert (bench.state.in_flight[waits] <= 1).all()
    assert bench.most == 2
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]
    return list(sizes.values())


@pytest.mark.parametrize("closes, ahead, forms", [(False, 7, 0), (True, 3, 4)])
def test_a_form_keeps_no_step_back_but_where_it_is_completed_within_its_budget(closes, ahead, forms):
    """With a grammar, steps overlap. Only with `on_truncation` "close" does the next step wait for the
    running step's result.
    """
    bench = Overlapping()
    grammar = GrammarRequest("regex", "a+", on_truncation="close" if closes else "length")
    assert run_with_form(bench, grammar) == [2] * 4 + [1] * 4
    how = {"ahead": ahead, "drafts": 0, "forms": forms, "blocks": 0, "alone": 1}
    assert bench.core.stats().overlap == how


DEAR, CHEAP = (CostModel(step_ns=100_000, token_ns=ns, context_ns=0) for ns in (90_000, 1_000))


@pytest.mark.parametrize("cost, ahead", [(DEAR, True), (CHEAP, False)])
def test_steps_with_drafts_are_awaited_and_others_are_not(cost, ahead):
    """Steps with drafts do not overlap. If drafting costs more time than it saves (DEAR), most steps have no
    drafts and overlap.
    """
    bench = Overlapping(
        cost=cost, num_draft_tokens=3, draft_policy="goodput", max_model_len=400, num_blocks=450
    )
    requests = [request(name, 5, max_tokens=300) for name in "abcd"]
    bench.submit(*requests)
    bench.run()
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]
    how = bench.core.stats().overlap
    assert how["drafts"] > 3 and how["forms"] == how["blocks"] == 0
    assert (how["ahead"] > 3 * how["drafts"]) == ahead and how["ahead"] > 5
    assert bench.core.stats().drafts


@pytest.mark.long
@pytest.mark.parametrize("host_ns", [0, 100_000])
def test_drafters_without_drafts_do_not_prevent_overlap(host_ns):
    """A step that waits for drafts does not overlap, and takes `host_ns` longer. As the drafter returns no
    drafts, fewer than a tenth of the steps may wait.
    """

    class Idle(SimulatedExecutor):
        def dispatch(self, plan):
            alone.append(not self._plans)
            super().dispatch(plan)

        def collect(self):
            result = super().collect()
            result.host_ns = host_ns * alone.pop(0)
            result.drafts, result.num_drafts, result.counts = None, None, None
            return result

    alone, sizes = [], {"max_model_len": 1000, "num_blocks": 1001}
    settings = {"max_in_flight": 2, "num_draft_tokens": 3, "draft_policy": "goodput", **sizes}
    bench = Bench(executor=Idle(settings_of(**settings)), **settings)
    bench.submit(*(request(name, 5, max_tokens=900) for name in "abcd"))
    bench.run()
    how = bench.core.stats().overlap
    assert how["ahead"] > 9 * how["drafts"] and how["drafts"] > 5


def test_without_a_grammar_no_row_waits_for_grammar_drafters():
    bench = Overlapping(num_draft_tokens=2, drafts_for="forms")
    bench.submit(request("a", 5, max_tokens=20), request("b", 5, max_tokens=4, grammar=FORM))
    bench.core.inbox.put(ev.GrammarReady("b"))
    bench.run()
    how = bench.core.stats().overlap
    assert how["drafts"] >= 2 and how["ahead"] > 10 and bench.core.stats().drafts


def test_drafts_after_a_step_with_a_dispatched_next_step_are_refused():
    """The engine refuses the drafts when it collects the step's result."""

    class Pushes(SimulatedExecutor):
        def collect(self):
            result = super().collect()
            if result.token_ids.size and len(bench.state.flights) > 1:
                result.drafts, result.num_drafts = np.array([7], np.int32), np.array([1], np.int32)
            return result

    config = settings_of(max_in_flight=2, num_draft_tokens=2, drafts_for="forms", max_retries=0)
    bench = Bench(executor=Pushes(config), max_in_flight=2, num_draft_tokens=2, drafts_for="forms")
    bench.submit(request("a", 5, max_tokens=8))
    failed = [event.error for event in bench.run() if isinstance(event, ev.Failed)]
    assert failed and "but the step after it was already dispatched" in failed[0]


def test_a_failed_step_voids_the_step_after_it():
    bench = Overlapping(fault=lambda step: "planted" if step == 2 else None, max_retries=1)
    requests = [request("a", 5, max_tokens=8), request("b", 9, max_tokens=8)]
    bench.submit(*requests)
    events = []
    while bench.core.has_work:
        if bench.state.step == 3 and "late" not in bench.state.requests and "late" not in bench.ends:
            requests.append(request("late", 7, max_tokens=3))
            bench.submit(requests[-1])  # only step 3, after the failing step, has this request
        before = {name: req_state.failures for name, req_state in bench.state.requests.items()}
        new = bench.step()
        events += new
        if any(isinstance(event, ev.Failed) for event in new):
            after = {name: req_state.failures for name, req_state in bench.state.requests.items()}
            blamed = {name for name in before if after[name] > before[name]}
            assert blamed == {"a", "b"}, "a request that is only in the next step is not blamed"
    assert sum(isinstance(event, ev.Failed) for event in events) == 1
    assert {event.request_id for event in events if isinstance(event, ev.Preempted)} == {"a", "b", "late"}
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]


def test_no_request_is_preempted_while_a_step_runs():
    """A row's blocks are not freed while a step in flight uses the row, so preemption waits for all steps."""
    bench = Overlapping(
        num_blocks=10, max_model_len=36, admission_reserve="none", enable_prefix_caching=False
    )
    requests = [request(name, 9, max_tokens=12) for name in "abc"]
    bench.submit(*requests)
    preempted = 0
    while bench.core.has_work:
        in_flight = len(bench.state.flights)
        events = bench.step()
        kinds = [type(event) for event in events]
        if ev.Preempted in kinds:
            preempted += 1
            assert in_flight - kinds.count(ev.Executed) == 0
    assert preempted
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]


def test_a_dispatch_that_raises_loses_its_step_and_not_the_one_before():
    class Raises(SimulatedExecutor):
        def dispatch(self, plan):
            if plan.step == 2:
                raise ZeroDivisionError("in dispatch")
            super().dispatch(plan)

    bench = Bench(executor=Raises(settings_of(max_in_flight=2)), max_in_flight=2)
    one = request("a", 5, max_tokens=6)
    bench.submit(one)
    events = bench.run()
    kinds = [type(event) for event in events if isinstance(event, (ev.Executed, ev.Failed))]
    assert kinds[:3] == [ev.Executed, ev.Executed, ev.Failed]
    assert bench.tokens["a"] == reference_tokens(one, bench.config)[0]


def test_a_wait_that_is_interrupted_is_taken_up_before_anything_else(tmp_path):
    # Ctrl-C interrupts the wait for a step's result, and then a delivery is reported. The next call of `step`
    # logs the interrupted step as failed before it logs the delivery.
    class Interrupted(SimulatedExecutor):
        def collect(self):
            if not interrupts:
                interrupts.append(True)
                raise KeyboardInterrupt
            return super().collect()

    interrupts = []
    config = settings_of(max_in_flight=2)
    bench = Bench(executor=Interrupted(config), max_in_flight=2, sink=LogWriter(tmp_path / "log"))
    bench.submit(request("a", 5, max_tokens=1))
    bench.core.step()
    with pytest.raises(KeyboardInterrupt):
        bench.core.step()  # waits for the step in flight
    bench.core.delivered("somebody before")
    while bench.core.has_work:
        bench.core.step()
    bench.core.close()
    kinds = [type(record.event) for record in LogReader(tmp_path / "log")]
    assert kinds.index(ev.Failed) < kinds.index(ev.Delivered)
    report = verify(tmp_path / "log")
    assert report.ok and not report.unfinished, report.divergence


def test_its_log_verifies(tmp_path):
    bench = Overlapping(eos_in=9, sink=None, num_blocks=14, max_model_len=40)
    log = LogWriter(tmp_path / "log")
    bench.core.sink, kept = log, bench.core.sink
    for record in kept.records:
        log.append(record.event, record.step, record.mono_ns)
    for number in range(12):
        bench.core.submit(request(f"r{number}", 4 + number % 9, max_tokens=12))
        for _ in range(2):
            bench.core.step()
    while bench.core.has_work:
        bench.core.step()
    bench.core.close()
    report = verify(tmp_path / "log")
    assert report.ok and not report.unfinished and report.requests == 12


def test_settings_that_cannot_overlap_are_refused():
    with pytest.raises(ConfigError, match="max_in_flight"):
        settings_of(max_in_flight=2, compat="vllm").check_resolved()

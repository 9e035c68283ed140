"""Tests the engine's loop: all ends of requests, failed steps, cancellations, deadlines and interruptions."""

import numpy as np
import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.executor import StepResult
from mmengine.core.inbox import Inbox
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.errors import ExecutorFailed
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.request import SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import Bench, image, ints, request, settings_of


class Clock:
    def __init__(self):
        self.now = 1000

    def __call__(self):
        return self.now


def failing(*steps):
    return lambda step: f"planted at {step}" if step in steps else None


def names(events, kind):
    return [event.request_id for event in events if isinstance(event, kind)]


def test_stop_and_length():
    bench = Bench(eos_in=5)
    requests = [request(f"r{number}", 3 + number, max_tokens=12) for number in range(8)]
    for one in requests:
        bench.submit(one)
    bench.run()
    ends = {reference_tokens(one, bench.config, eos_in=5)[1] for one in requests}
    assert ends == {"stop", "length"}
    for one in requests:
        tokens, reason = reference_tokens(one, bench.config, eos_in=5)
        assert bench.tokens[one.request_id] == tokens
        assert bench.ends[one.request_id] == (reason, "eos" if reason == "stop" else "")


def test_the_model_length_ends_a_request():
    bench = Bench(max_model_len=10)
    bench.submit(request("a", 7, max_tokens=99))
    bench.run()
    assert bench.ends["a"] == ("length", "") and len(bench.tokens["a"]) == 3


def test_a_failed_step_is_tried_again():
    bench = Bench(fault=failing(2))
    requests = [request("a", 5, max_tokens=6), request("b", 9, max_tokens=6, media=[image(1, 1, 4)])]
    bench.submit(*requests)
    events = bench.run()
    assert [event.error for event in events if isinstance(event, ev.Failed)] == ["planted at 2"]
    assert names(events, ev.Preempted) == ["a", "b"]
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]


@pytest.mark.parametrize("max_retries, failures", [(0, 1), (1, 2), (2, 3)])
def test_after_so_many_failures_a_request_ends_with_the_error(max_retries, failures):
    bench = Bench(max_retries=max_retries, fault=lambda step: "planted")
    bench.submit(request("a", 5))
    events = bench.run()
    assert len([event for event in events if isinstance(event, ev.Failed)]) == failures
    assert bench.ends == {"a": ("error", "planted")} and bench.tokens["a"] == []


def test_requests_that_were_not_in_the_failed_step_are_unharmed():
    """Request a uses up the failing step's token budget, so request b is not in the step. Only a fails."""
    bench = Bench(token_budget=8, encoder_budget=6, max_retries=0, fault=failing(1))
    a = request("a", 24, media=[image(1, 0, 5), image(2, 6, 5)])
    b = request("b", 20)
    bench.submit(a, b)
    bench.step()
    (alone,) = bench.decisions()
    assert ints(alone.rows) == [0]
    bench.run()
    assert bench.ends["a"] == ("error", "planted at 1")
    assert (bench.tokens["b"], bench.ends["b"]) == (reference_tokens(b, bench.config)[0], ("length", ""))


def test_blocks_and_features_of_a_failed_step_are_no_hits():
    bench = Bench(max_retries=0, fault=failing(0))
    prompt, media = list(range(100, 112)), [image(1, 2, 4)]
    bench.submit(request("a", prompt, media=media))
    bench.run()
    assert bench.ends["a"][0] == "error"
    again = request("b", prompt, media=media)
    bench.submit(again)
    (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
    assert not admitted.cached_blocks and len(admitted.encode) == 1
    assert bench.tokens["b"] == reference_tokens(again, bench.config)[0]


class FailsAfterEncoding(SimulatedExecutor):
    """Fails in steps 0 and 1, after the step has encoded its features."""

    def _write(self, plan):
        if plan.step in (0, 1):
            raise ExecutorFailed("out of memory")
        super()._write(plan)


@pytest.mark.parametrize("max_retries", [0, 2])
def test_features_of_failed_steps_do_not_stay_on_the_device(max_retries):
    config = settings_of(max_retries=max_retries)
    executor = FailsAfterEncoding(config)
    bench = Bench(executor=executor, max_retries=max_retries)
    bench.submit(request("a", 8, media=[image(1, 2, 4)]))
    bench.run()
    bench.submit(request("b", 8))
    bench.run()
    assert set(executor._features) == set(bench.state.encoder.entries)


def test_blocks_of_a_row_that_broke_are_no_hits():
    class Breaks(SimulatedExecutor):
        def _sample(self, plan, device_ns):
            result = super()._sample(plan, device_ns)
            errors = ((0, "NaN"),) if plan.step == 0 else ()
            return StepResult(result.token_ids, errors=errors, device_ns=device_ns)

    bench = Bench(executor=Breaks(settings_of()))
    prompt = list(range(100, 112))
    bench.submit(request("a", prompt), request("other", 5))
    events = bench.run()
    assert bench.ends == {"a": ("error", "NaN"), "other": ("length", "")}
    assert bench.tokens["a"] == [] and not names(events, ev.Preempted)
    bench.submit(request("b", prompt))
    (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
    assert not admitted.cached_blocks


class Odd(SimulatedExecutor):
    """Returns results that do not fit the step. `change`: turns a correct result into a wrong one."""

    def __init__(self, config, change):
        super().__init__(config)
        self.change = change

    def collect(self):
        return self.change(super().collect())


ODD_RESULTS = {
    "too few tokens": lambda r: StepResult(r.token_ids[:-1]),
    "too many tokens": lambda r: StepResult(np.append(r.token_ids, r.token_ids).astype(np.int32)),
    "another type": lambda r: StepResult(r.token_ids.astype(np.int64)),
    "a stop beyond": lambda r: StepResult(r.token_ids, stops=((2, "eos"),)),
    "a stop before": lambda r: StepResult(r.token_ids, stops=((-1, "eos"),)),
    "an error beyond": lambda r: StepResult(r.token_ids, errors=((9, "x"),)),
    "logprobs beyond": lambda r: StepResult(r.token_ids, logprobs=((5, []),)),
}


@pytest.mark.parametrize("name", ODD_RESULTS)
def test_a_result_that_does_not_fit_is_a_failed_step(tmp_path, name):
    executor = Odd(settings_of(), ODD_RESULTS[name])
    bench = Bench(executor=executor, sink=None, max_retries=0)
    bench.submit(request("a", 3), request("b", 3))
    bench.run()
    assert {reason for reason, _ in bench.ends.values()} == {"error"}
    assert all("the executor" in detail for _, detail in bench.ends.values())


def test_error_texts_can_always_be_written(tmp_path):
    config = settings_of(max_retries=0)
    text = "\ud800 no such file " + "x" * 1000
    executor = SimulatedExecutor(config, fault=lambda step: text)
    core = EngineCore(config, executor, sink=LogWriter(tmp_path / "log"))
    core.submit(request("a", 3))
    while core.has_work:
        core.step()
    core.close()
    (failed,) = [r.event for r in LogReader(tmp_path / "log") if isinstance(r.event, ev.Failed)]
    assert failed.error.startswith("\\ud800 no such") and len(failed.error) == 500
    assert verify(tmp_path / "log").ok


def test_whatever_an_executor_raises_is_a_failed_step():
    class Raises(SimulatedExecutor):
        def dispatch(self, plan):
            if plan.step == 0:
                raise ZeroDivisionError("in dispatch")
            super().dispatch(plan)

        def collect(self):
            if self._plans[0].step == 1:
                raise KeyError("in collect")
            return super().collect()

    bench = Bench(executor=Raises(settings_of()), max_retries=2)
    one = request("a", 5)
    bench.submit(one)
    events = bench.run()
    errors = [event.error for event in events if isinstance(event, ev.Failed)]
    assert errors == ["ZeroDivisionError: in dispatch", "KeyError: 'in collect'"]
    assert bench.tokens["a"] == reference_tokens(one, bench.config)[0]


@pytest.mark.parametrize("where", ["dispatch", "collect"])
def test_ctrl_c_in_the_device_loses_only_a_step(where):
    """A user in a notebook interrupts a step with Ctrl-C and continues later."""

    class Interrupted(SimulatedExecutor):
        pressed = False

        def _press(self, at, plan):
            if where == at and plan.step == 2 and not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt

        def dispatch(self, plan):
            self._press("dispatch", plan)
            super().dispatch(plan)

        def collect(self):
            self._press("collect", self._plans[0])
            return super().collect()

    bench = Bench(executor=Interrupted(settings_of()))
    requests = [request("a", 5, max_tokens=6), request("b", 9, max_tokens=6)]
    bench.submit(*requests)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    events = bench.run()
    assert [event.error for event in events if isinstance(event, ev.Failed)] == ["the step was interrupted"]
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]


def cancelling(bench, name, steps):
    for _ in range(steps):
        bench.step()
    bench.core.cancel(name)
    return bench.run()


@pytest.mark.parametrize("steps", range(6))
def test_cancel_at_every_moment(steps):
    bench = Bench(max_num_seqs=1, token_budget=6)
    first, second = request("a", 4, max_tokens=2), request("b", 15, max_tokens=9, media=[image(1, 2, 4)])
    bench.submit(first, second)
    events = cancelling(bench, "b", steps)
    assert bench.ends == {"a": ("length", ""), "b": ("abort", "cancelled")}
    assert bench.tokens["a"] == reference_tokens(first, bench.config)[0]
    got = bench.tokens.get("b", [])
    assert got == reference_tokens(second, bench.config)[0][: len(got)]
    assert names(events, ev.Cancelled) == ["b"]
    assert bench.state.blocks.num_free == 64 and not bench.state.requests
    assert not any(entry.references for entry in bench.state.encoder.entries.values())


def test_cancel_of_a_preempted_one():
    bench = Bench(num_blocks=9, max_model_len=32)
    bench.submit(request("a", 14, max_tokens=16), request("b", 14, max_tokens=16))
    while not any(isinstance(event, ev.Preempted) for event in bench.step()):
        pass
    bench.core.cancel("b")
    bench.run()
    assert bench.ends == {"a": ("length", ""), "b": ("abort", "cancelled")} and bench.tokens["b"]


def test_cancel_in_a_step_that_fails_and_of_one_that_has_just_ended():
    bench = Bench(fault=failing(1))
    bench.submit(request("a", 4), request("b", 4, max_tokens=1))
    bench.step()
    bench.step()
    bench.core.cancel("a")  # its failing step is in flight
    bench.core.cancel("b")  # has ended
    bench.core.cancel("nobody")
    events = bench.run()
    assert bench.ends["a"][0] == "abort" and bench.ends["b"] == ("length", "")
    assert names(events, ev.Cancelled) == ["a"] and len(names(events, ev.Finished)) == 1


def test_cancelling_twice_is_one_cancel():
    bench = Bench()
    bench.submit(request("a", 4))
    bench.core.cancel("a")
    bench.core.cancel("a", "again")
    events = bench.run()
    assert names(events, ev.Cancelled) == names(events, ev.Finished) == ["a"]
    assert bench.ends == {"a": ("abort", "cancelled")}


def test_a_deadline():
    clock = Clock()
    bench = Bench(clock=clock, max_num_seqs=1)
    bench.submit(
        request("a", 4, max_tokens=30, deadline_ns=50),
        request("b", 4, deadline_ns=50),
        request("c", 4, deadline_ns=500),
    )
    for _ in range(3):
        bench.step()
    clock.now += 49
    bench.step()
    assert not bench.ends
    clock.now += 1
    bench.run()
    assert bench.ends == {"a": ("abort", "deadline"), "b": ("abort", "deadline"), "c": ("length", "")}


def test_a_deadline_ends_with_its_request():
    """A new request may have the id of an ended request. The old deadline must not cancel the new request."""
    clock = Clock()
    bench = Bench(clock=clock)
    bench.submit(request("a", 4, max_tokens=2, deadline_ns=50))
    bench.run()
    assert bench.ends.pop("a") == ("length", "")
    bench.submit(request("a", 4, max_tokens=9))
    bench.step()
    clock.now += 60
    bench.run()
    assert bench.ends == {"a": ("length", "")}


def test_deadlines_of_ended_requests_are_forgotten():
    inbox = Inbox(lambda: 0)
    for number in range(10_000):
        inbox.put(ev.Queued(str(number), b"", SamplingParams(), deadline_ns=10**18))
        inbox.after(ev.Finished(str(number), "stop"))
        inbox.drain()
    assert len(inbox._deadlines._all) < 100 and not inbox._deadlines._of


def test_a_reset_forgets_earlier_blocks():
    bench = Bench()
    prompt = list(range(100, 112))
    bench.submit(request("a", prompt, max_tokens=1))
    bench.run()
    bench.submit(request("running", prompt, max_tokens=9))
    bench.step()
    bench.core.reset_prefix_cache()
    for _ in range(4):
        bench.step()
    assert bench.state.running.tolist() and set(bench.state.blocks.index.content.tolist()) == {NO_CONTENT}, (
        "blocks that a running row fills after the reset continue a forgotten prefix"
    )
    bench.submit(request("b", prompt))
    events = bench.run()
    (admitted,) = [event for event in events if isinstance(event, ev.Admitted)]
    assert not admitted.cached_blocks
    bench.submit(request("c", prompt))
    (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
    assert len(ints(admitted.cached_blocks)) == 2, "blocks that were filled after the reset are hits"


def test_outputs_come_after_the_commit():
    class Slow:
        """A log that accepts every third commit."""

        def __init__(self):
            self.records, self.tries, self.stalled, self.committed = [], 0, "", 0

        def append(self, event, step, mono_ns):
            self.records.append(Record(len(self.records), step, mono_ns, event))

        def commit(self):
            self.tries += 1
            self.stalled = "" if self.tries % 3 == 0 else "planted"
            if not self.stalled:
                self.committed = len(self.records)
            return not self.stalled

        def close(self):
            pass

    sink = Slow()
    bench = Bench(sink=sink)
    dispatched, dispatch = [], bench.executor.dispatch

    def watched(plan):
        dispatched.append(sink.committed == len(sink.records))
        dispatch(plan)

    bench.executor.dispatch = watched
    one = request("a", 4)
    sink.stalled = ""
    bench.submit(one)
    while bench.core.has_work:
        before = len(bench.tokens.get("a", []))
        bench.step()
        assert not sink.stalled or len(bench.tokens.get("a", [])) == before
    assert bench.tokens["a"] == reference_tokens(one, bench.config)[0] and all(dispatched)


def test_figures():
    bench = Bench(num_blocks=17)  # The test checks `stats` after the first step and after the run.
    prompt = list(range(100, 112))
    bench.submit(request("a", prompt, media=[image(1, 2, 4)]), request("b", prompt, media=[image(1, 2, 4)]))
    bench.step()
    stats = bench.core.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (4, 16)
    bench.run()
    stats = bench.core.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (24, 8, 8)
    assert (stats.num_encoded_items, stats.num_encoder_hits, stats.num_finished) == (1, 0, 2)
    assert (stats.num_running, stats.kv_blocks_used, stats.steps) == (0, 0, 4)

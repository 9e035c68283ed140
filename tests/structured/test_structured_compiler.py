"""Tests the compiler threads. Each grammar is compiled once, within a deadline; a hanging compilation affects
no other grammar.
"""

import threading

import pytest

from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.request import GrammarRequest
from mmengine.structured_output.rows.compiler import Compiler
from mmengine.structured_output.rows.grammars import Grammars

PATIENCE_S = 60


class Bench:
    """A compiler with a fake clock. Slow compilations end when the test releases them."""

    def __init__(self, **options):
        self.now = 0.0
        self.begun = []
        self.goes_on = {}
        self.began = threading.Condition()
        self.compiler = Compiler(self.compile, deadline_s=10, clock=lambda: self.now, **options)

    def compile(self, asked):
        grammar = asked.source
        with self.began:
            self.begun.append(grammar)
            event = self.goes_on.setdefault(grammar, threading.Event())
            self.began.notify_all()
        if grammar.startswith("slow"):
            event.wait(PATIENCE_S)
        if grammar.startswith("bad"):
            raise InvalidRequest("no grammar")
        if grammar.startswith("odd"):
            raise ZeroDivisionError("odd")
        return grammar.upper()

    def get(self, *grammars):
        return [self.compiler.get(GrammarRequest("regex", grammar)) for grammar in grammars]

    def until_begun(self, count):
        with self.began:
            assert self.began.wait_for(lambda: len(self.begun) >= count, PATIENCE_S)

    def release(self, grammar):
        with self.began:
            self.goes_on.setdefault(grammar, threading.Event()).set()

    def done(self, *compilations):
        for _ in range(PATIENCE_S * 50):
            if all(each.is_done for each in compilations):
                return [each.compiled or each.error for each in compilations]
            self.compiler.wait(0.02)
        raise AssertionError("a compilation does not end")

    def late(self):
        self.now += 11
        self.compiler.check()


def test_each_grammar_is_compiled_once():
    bench = Bench()
    first, second = bench.get("slow", "slow")
    assert first is second and not first.is_done
    bench.release("slow")
    assert bench.done(first) == ["SLOW"]
    assert bench.get("slow") == [first] and bench.begun == ["slow"]


WHY = "the grammar engine failed (ZeroDivisionError: odd); write the grammar differently"
FAILED = f"the grammar was not compiled: {WHY}"


def test_refusals_and_crashes_fail_only_their_grammar():
    bench = Bench()
    answers = bench.done(*bench.get("bad", "odd", "good"))
    assert answers == ["no grammar", FAILED, "GOOD"]
    assert bench.compiler.reasons == []


def test_unused_grammars_are_evicted():
    bench = Bench(cache_size=2, workers=1)
    bench.done(*bench.get("a", "b"))
    bench.get("a")
    bench.done(*bench.get("c"))  # Evicts b.
    bench.done(*bench.get("a", "c", "b"))
    assert bench.begun == ["a", "b", "c", "b"]


def test_a_hanging_compilation_fails_alone_and_its_worker_is_replaced():
    bench = Bench(workers=1)
    slow, good = bench.get("slow", "good")
    bench.until_begun(1)
    bench.compiler.check()
    assert not slow.is_done and not good.is_done
    bench.late()
    assert "within 10 seconds (grammar_timeout_s)" in slow.error
    assert bench.done(good) == ["GOOD"]
    bench.release("slow")  # The late compilation returns, and its grammar becomes usable.
    for _ in range(PATIENCE_S * 50):
        if slow.compiled:
            break
        bench.compiler.wait(0.02)
    assert slow.compiled == "SLOW" and slow.error == ""
    assert bench.get("slow") == [slow]


def test_no_grammars_are_accepted_after_several_hang():
    bench = Bench(workers=2, max_abandoned=2)
    slow = bench.get("slow 1", "slow 2", "waiting")
    bench.until_begun(2)
    bench.late()
    assert all("within" in each.error for each in slow[:2])
    assert "2 grammars have been compiling for more than 10 seconds" in slow[2].error
    assert len(bench.compiler.reasons) == 1
    assert bench.get("slow 1")[0].error  # An earlier grammar's error is still returned.
    with pytest.raises(MMEngineError, match="no new grammars: 2 grammars have been compiling"):
        bench.get("good")
    bench.release("slow 1")
    for _ in range(PATIENCE_S * 50):
        if not bench.compiler.reasons:
            break
        bench.compiler.wait(0.02)
    assert bench.done(*bench.get("good", "waiting")) == ["GOOD", "WAITING"]


def test_released_grammars_are_not_compiled():
    bench = Bench(workers=1)
    slow, gone, shared, _ = bench.get("slow", "gone", "shared", "shared")
    bench.until_begun(1)
    for each in (slow, gone, shared):
        bench.compiler.release(each)
    bench.release("slow")
    assert bench.done(slow, shared) == ["SLOW", "SHARED"] and bench.begun == ["slow", "shared"]
    assert bench.get("slow") == [slow] and slow.grammar.source == ""
    assert bench.done(*bench.get("gone")) == ["GONE"]


def test_closing_ends_the_threads():
    before = set(threading.enumerate())
    bench = Bench()
    bench.done(*bench.get("a", "b"))
    threads = set(threading.enumerate()) - before
    bench.compiler.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Compiled(str):
    """A compiled grammar. If the text begins with a bracket, the shortest completion has len(text) tokens."""

    @property
    def shortest(self):
        return len(self) if self[0] == "[" else 0


class Backend:
    def compile(self, grammar):
        if grammar.source == "bad":
            raise InvalidRequest("no grammar")
        return Compiled(grammar.source.upper())


def settled(grammars, count):
    found = []
    for _ in range(PATIENCE_S * 50):
        found += grammars.settled()
        if len(found) >= count:
            return dict(found)
        grammars.wait(0.02)
    raise AssertionError("the results are not reported")


def test_each_grammars_result_is_reported_once():
    grammars = Grammars(Backend(), deadline_s=10)
    for name, grammar in {"a": "one", "b": "one", "c": "bad", "gone": "one"}.items():
        grammars.hold(name, GrammarRequest("regex", grammar), budget=2)
    grammars.release("gone")
    assert settled(grammars, 3) == {"a": "", "b": "", "c": "no grammar"}
    assert grammars.settled() == []
    assert grammars.compiled("a") == "ONE" and grammars.compiled("c") is None
    assert grammars.compiled("gone") is None and grammars.error_of("c") == "no grammar"
    grammars.release("a")
    assert grammars.compiled("a") is None
    grammars.hold("room", GrammarRequest("regex", "[four"), budget=5)
    grammars.hold("no room", GrammarRequest("regex", "[four"), budget=4)
    told = settled(grammars, 2)
    assert told["room"] == "" and "needs 5 tokens; the limit is 4" in told["no room"]
    assert grammars.error_of("no room") == told["no room"]
    grammars.close()

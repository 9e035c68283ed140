"""Tests drafts from a grammar. A draft grammar is a row's JSON Schema with fixed white space. A row follows a
draft grammar until the text no longer fits, and then the next draft grammar. Without a compiled draft grammar
that fits, drafts come from the row's own grammar.
"""

import threading
import time

import numpy as np
import pytest

from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.spec_decode.grammar import GrammarDrafter
from mmengine.spec_decode.texts import Texts
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.request.spec import draft_grammars_of, grammar_of
from mmengine.structured_output.rows.grammars import Grammars
from mmengine.structured_output.rows.rows import RowMatchers

EOS, VOCAB = 256, 257
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "more": {"type": "integer"}},
    "required": ["name", "more"],
    "additionalProperties": False,
}
TEXT = grammar_of({"type": "json_schema", "json_schema": {"schema": SCHEMA}})
PROMPT = np.zeros(2, np.int32)
ROW = np.array([0])


@pytest.fixture
def backend():
    tokens = [bytes([n]) for n in range(256)] + [b"<end>"]
    return LLGuidance(lambda: tokens, lambda text: list(text.encode()), frozenset({EOS}), (EOS,), VOCAB)


class Bench:
    """A row with a grammar, its drafter, and its text."""

    def __init__(self, backend, text=TEXT, compile=None, deadline_s=10):
        self.grammars = Grammars(backend, deadline_s=deadline_s, compile=compile)
        draft_grammars = self.grammars.draft_grammars
        self.matchers = RowMatchers(backend, self.grammars.compiled, VOCAB, draft_grammars_of=draft_grammars)
        self.drafter = GrammarDrafter(self.matchers.forced)
        self.texts = Texts(1, 200)
        self.request = Request("r", PROMPT, SamplingParams(), grammar=text)
        self.grammars.hold("r", text, 100)
        assert not self.grammars.error_of("r")
        self.admit(b"")

    def admit(self, said):
        tokens = np.append(PROMPT, np.array(list(said), np.int32)).astype(np.int32)
        self.drafter.leave(0, self.texts)
        self.matchers.admit(0, self.request, tokens)
        self.texts.admit(0, tokens, len(PROMPT))
        assert self.drafter.admit(0, self.request, self.texts)

    def say(self, text):
        _, broken = self.matchers.advance([0], [list(text)])
        assert not broken
        self.texts.append(ROW, np.array(list(text), np.int32), np.array([len(text)]))

    def proposes(self, most=50):
        proposed = self.drafter.propose(ROW, self.texts, np.array([most]))
        return b"" if proposed is None else bytes(proposed.token_ids.tolist())

    def settled(self, most=50):
        """Return the proposal once the draft grammars are compiled, or have failed."""
        end = time.monotonic() + 20
        while self.grammars.draft_grammars(self.request) is None and time.monotonic() < end:
            self.grammars.wait(0.02)
        return self.proposes(most)


def test_forced_tokens_are_proposed_except_the_last(backend):
    """The last forced token may be missing, because later text could merge with this token."""
    bench = Bench(backend)
    assert b'{"name":"'.startswith(bench.settled()) and len(bench.proposes()) >= 8
    assert bench.proposes(3) == b'{"n' and bench.proposes(0) == b""
    bench.say(b'{"na')
    assert bench.proposes(3) == b'me"'
    bench.say(b'me":"a')
    assert b'b","more":'.startswith(bench.proposes()) and bench.proposes()


def test_a_row_that_departs_from_a_draft_grammar_gets_the_next(backend):
    bench = Bench(backend)
    bench.settled()
    bench.say(b'{"name": ')
    assert bench.proposes(1) == b'"', "the draft grammar with a space after a colon"
    bench.say(b'"cd", ')
    assert b'"more": '.startswith(bench.proposes()) and len(bench.proposes()) > 5


def test_a_row_that_departs_from_all_draft_grammars_gets_its_grammar(backend):
    bench = Bench(backend)
    bench.settled()
    bench.say(b'{  "na')
    assert bench.proposes() in (b'me"', b"me"), "any white space may follow"
    bench.say(b'me"  :  "c')
    assert bench.proposes() in (b'd"', b"d", b"")


def test_a_preempted_row_follows_its_output(backend):
    bench = Bench(backend)
    bench.settled()
    bench.admit(b'{"name": "ab", "m')
    assert b'ore": '.startswith(bench.proposes()) and bench.proposes()
    bench.admit(b'{"name":"cd"')
    assert b',"more":'.startswith(bench.proposes()) and bench.proposes()


def test_failed_draft_grammars_leave_the_grammar_itself(backend):
    def compile(text):
        if text != TEXT:
            raise InvalidRequest("not today")
        return backend.compile(text)

    bench = Bench(backend, compile=compile)
    assert bench.settled() == b"{", "white space may follow"
    assert bench.grammars.draft_grammars(bench.request) == []
    bench.say(b'{"na')
    assert bench.proposes(2) == b"me"


def test_hanging_draft_grammars_are_not_awaited(backend):
    gate = threading.Event()

    def compile(text):
        if text != TEXT:
            gate.wait(40)
        return backend.compile(text)

    try:
        bench = Bench(backend, compile=compile, deadline_s=60)
        assert bench.proposes() == b"{"
        bench.say(b'{"na')
        assert bench.proposes(2) == b"me", "the row has its own grammar"
        assert bench.grammars.draft_grammars(bench.request) is None, (
            "they still hang and are not abandoned yet"
        )
        bench = Bench(backend, compile=compile, deadline_s=0.2)
        bench.say(b'{"na')
        assert bench.settled(2) == b"me"
    finally:
        gate.set()


def test_a_stuck_compiler_costs_only_the_draft_grammars(backend):
    bench = Bench(backend)
    known = set(draft_grammars_of(TEXT))
    get = bench.grammars._compiler.get

    def refuse(text):
        if text in known:
            raise InvalidRequest("no new grammars")
        return get(text)

    bench.grammars._compiler.get = refuse
    bench.say(b'{"na')
    assert bench.proposes(2) == b"me"


def test_other_grammars_are_their_own_draft_grammar(backend):
    """A regex has no draft grammars, so its drafts come from the regex."""
    bench = Bench(backend, grammar_of(grammar={"regex": "abc(def|xyz)"}))
    assert b"abc".startswith(bench.settled()) and bench.proposes()
    bench.say(b"abcx")
    assert bench.proposes() in (b"y", b"yz")


def test_nothing_is_proposed_before_the_grammar_begins(backend):
    bench = Bench(backend, GrammarRequest("regex", "abcdef", (7, 9)))
    assert bench.settled() == b""
    bench.say(b"\x07\x07")
    assert bench.proposes() == b""
    bench.say(b"\x09ab")
    assert b"cdef".startswith(bench.proposes()) and bench.proposes()


def test_rows_without_a_grammar_are_ignored(backend):
    drafter = GrammarDrafter(lambda row, most: ())
    texts = Texts(1, 9)
    assert not drafter.admit(0, Request("r", PROMPT, SamplingParams()), texts)
    drafter.leave(0, texts)

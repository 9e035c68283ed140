"""Test failures of the grammar engine. A failure during an answer ends only this answer. After a failure at
compile time, the grammar is refused with our own message.
"""

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from mmengine.errors import InvalidRequest
from mmengine.request import Request, SamplingParams
from mmengine.structured_output.engines.engine_errors import describe_error
from mmengine.structured_output.engines.llguidance import backend as llguidance_backend
from mmengine.structured_output.request.spec import grammar_of
from mmengine.structured_output.rows.rows import RowMatchers
from tests.structured.accepting import byte_backend

END = 256


def compiled(schema, by=None):
    return (by or byte_backend()).compile(
        grammar_of({"type": "json_schema", "json_schema": {"schema": schema}})
    )


class PanicException(BaseException):
    """Has the same name as pyo3's exception."""


def test_compiled_schemas_allow_long_keys():
    matcher = compiled({"patternProperties": {"[a-z]{1,255}": {"type": "string"}}}).matcher()
    for byte in b'{"' + b"a" * 60 + b'":"x"}':
        mask = matcher.compute_bitmask()
        assert mask[byte >> 3] >> (byte & 7) & 1, matcher.get_error()
        assert matcher.consume_token(byte)
    assert matcher.is_accepting()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_broken_answer_affects_no_other(monkeypatch, num_threads):
    monkeypatch.setattr(llguidance_backend, "STEP_FUEL", 1_000)  # Low, so that the answer soon fails.
    engine = byte_backend(num_threads)
    grammars = {
        "breaks": compiled({"type": "string", "pattern": "^(.*a.{14})$"}, engine),
        "goes on": compiled({"type": "string"}, engine),
    }
    rows = RowMatchers(engine, grammars.__getitem__, 257)
    for row, name in enumerate(grammars):
        rows.admit(row, Request(name, np.empty(0, np.int32), SamplingParams()), np.empty(0, np.int32))
    errors: dict[int, str] = {}
    for byte in b'"' + b"ab" * 20:
        _, errors = rows.masks([0, 1])
        if errors:
            break
        rows.advance([0, 1], [[byte], [byte]])
    assert list(errors) == [0]
    assert "needs more states than the grammar engine supports" in errors[0] and "\n" not in errors[0]
    bits, errors = rows.masks([1])
    assert not errors and bits[0, ord("z") // 32] >> (ord("z") % 32) & 1


def test_a_panic_in_masks_breaks_only_its_text(monkeypatch):
    engine = byte_backend(2)
    good, bad = compiled({"type": "string"}, engine).matcher(), compiled({"type": "null"}, engine).matcher()

    class Panicking:
        def unsafe_compute_mask_ptr(self, *args):
            raise PanicException("index out of bounds")

    class Bad:
        """A matcher whose masks panic."""

        def unsafe_compute_mask_ptr(self, *args):
            raise PanicException("index out of bounds")

        def consume_token(self, token):
            return bad.consume_token(token)

    monkeypatch.setattr(engine, "_executor", Panicking())
    bits = np.zeros((2, 9), np.uint32)
    engine.fill([Bad(), good], bits)
    assert bad.is_error() and not good.is_error()
    assert not bits[0].any() and bits[1, 1] == 1 << ord('"') % 32


def test_a_panic_while_a_grammar_is_compiled_is_a_refusal(monkeypatch):
    def panic(text):
        raise PanicException("assertion failed")

    monkeypatch.setattr(LLMatcher, "grammar_from_json_schema", staticmethod(panic), raising=True)
    with pytest.raises(InvalidRequest, match="the grammar engine itself failed"):
        compiled({"type": "string"})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>\n 0:",
            "more rules",
        ),
        ("panic: index out of bounds\n<backtrace>\n   0: <unknown>", "itself failed"),
        (
            "Unable to determine if regex is empty: (And (SearchRegex /^(?:a+)$/) (Regex /b/))",
            "pattern is 'a+'",
        ),
        ("initial lexer configuration (grammar) too big (limit for this grammar: 1)", "more states"),
        ("Schema intersection stack level exceeded", "patternProperties"),
        ("circular references with sibling keys are not supported: #/$defs/a", "refer to themselves"),
        ("lexer error: too many expressions constructed <non-verbose/>", "more states"),
        ("too many states: 250000 >= 250000", "more states"),
    ],
)
def test_grammar_engine_errors_are_rewritten(error, said):
    text = describe_error(error)
    assert said in text and "backtrace" not in text and "\n" not in text and "/^" not in text


@pytest.mark.parametrize("beside", [[], [3]], ids=["alone", "beside a row whose grammar is not here"])
def test_texts_continue_after_shared_lexer_states_are_used_up(monkeypatch, beside):
    """Rows with the same grammar share its lexer states. When none is left, a row gets a new matcher."""
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 3_000)
    engine = byte_backend()
    grammars = {"a": compiled({"type": "string", "pattern": "^(.*a.{12})$"}, engine)}
    rows = RowMatchers(engine, lambda _: grammars["a"], 257)
    for row in range(3):
        rows.admit(row, Request(str(row), np.empty(0, np.int32), SamplingParams()), np.empty(0, np.int32))
    source, worn = random.Random(0), False
    for step in range(400):
        said = [source.choice(b"ab") if step else ord('"') for _ in range(3)]
        before = [rows._rows[row].own.matcher for row in range(3)]
        bits, errors = rows.masks([0, 1, 2, *beside])
        assert errors.keys() == set(beside), (step, errors)
        assert all(each[token // 32] >> (token % 32) & 1 for each, token in zip(bits, said))
        _, errors = rows.advance([0, 1, 2], [[token] for token in said])
        assert not errors, (step, errors)
        worn = worn or any(rows._rows[row].own.matcher is not before[row] for row in range(3))
    assert worn

"""Test grammars that begin after certain tokens, such as an end-of-reasoning marker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mmengine.errors import InvalidRequest
from mmengine.structured_output.grammar_start import GrammarStart, find_end
from mmengine.structured_output.request.spec import draft_grammars_of, grammar_of, read_grammar, reasoning_of

IDS = st.integers(0, 2)  # Few ids, so that they repeat.
FORMS = [
    ({"type": "json_schema", "json_schema": {"schema": {"const": {"after": [1]}}}}, None),
    (None, {"regex": "a|é"}),
    (None, {"choice": ["a", '","after":[1]']}),
    (None, {"lark": 'start: "a"'}),
    (
        {
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
            "triggers": ["<a"],
            "at_least_one": True,
        },
        None,
    ),
]


@given(st.lists(st.lists(IDS, max_size=6), max_size=6), st.lists(IDS, min_size=1, max_size=4))
def test_a_grammar_opens_after_the_first_occurrence_of_its_marker(runs, after):
    whole = [token for run in runs for token in run]
    ends = (n for n in range(len(after), len(whole) + 1) if whole[n - len(after) : n] == after)
    wanted = next(ends, None)
    assert find_end(whole, after) == wanted
    opening, said = GrammarStart(after), 0
    for run in runs:
        seen = opening.end_in(run)
        assert opening.take(run) == seen
        if seen is not None:
            assert said + seen == wanted
            return
        said += len(run)
    assert wanted is None


@pytest.mark.parametrize("form", FORMS)
def test_draft_grammars_wait_for_nothing(form):
    # The tokens after which a grammar begins (`after`) change neither its draft grammars nor its rules.
    at_once = grammar_of(*form)
    assert draft_grammars_of(replace(at_once, after=(7, 7))) == draft_grammars_of(at_once)
    assert read_grammar(replace(at_once, after=(7, 7))) == read_grammar(at_once)


@pytest.mark.parametrize("form", FORMS)
def test_reasoning_is_a_field_beside_the_form(form):
    response_format, grammar = form
    assert reasoning_of(*form) is None
    for wish in (True, False, None):
        asked = tuple(None if each is None else {**each, "reasoning": wish} for each in form)
        assert reasoning_of(*asked) is wish
        assert grammar_of(*asked) == grammar_of(*form)
    for wrong in (1, "true", {}):
        asked = tuple(None if each is None else {**each, "reasoning": wrong} for each in form)
        with pytest.raises(InvalidRequest, match=r"(response_format|grammar)\.reasoning must be true"):
            reasoning_of(*asked)


def test_free_text_waits_for_nothing():
    """Without a grammar, a `reasoning` field is refused."""
    assert reasoning_of() is None
    with pytest.raises(InvalidRequest, match="unknown field 'reasoning'"):
        grammar_of({"type": "text", "reasoning": True})
    with pytest.raises(InvalidRequest, match="grammar must contain exactly one of"):
        grammar_of(None, {"reasoning": True})

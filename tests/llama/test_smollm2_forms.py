"""Tests that SmolLM2 extracts values from texts as JSON with a schema, and that drafts change no answer."""

import json

import jsonschema
import pytest

from tests.llama.forms import CASES
from tests.llama.smollm2 import chat, open_engine, prompts

SPECS = ("none", "ngram", "suffix", "grammar")
MAX_TOKENS = 256  # The schemas limit strings, so no form needs more tokens.
# With few rows, most requests begin after other answers have ended. The suffix drafter copies drafts from
# these answers.
ROWS = 8
LEAST_RIGHT = 12  # Minimum number of right answers among the 40 forms.


def filled(engine):
    """Return an answer for each case."""
    ids = {}
    for number, (text, schema, _) in enumerate(CASES):
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
        ids[engine.submit(chat(text), max_tokens=MAX_TOKENS, temperature=0, response_format=form)] = number
    answers = {}
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                answers[ids[output.request_id]] = output.completion
    return [answers[number] for number in range(len(CASES))]


def same(said, stated):
    """Return whether the answer has the stated values. Ignores upper and lower case, and properties without a
    stated value.
    """
    return all(str(said.get(name)).lower() == str(value).lower() for name, value in stated.items())


def test_there_are_forty():
    assert len(CASES) == 40 and len({text for text, _, _ in CASES}) == 40
    for _, schema, stated in CASES:
        jsonschema.validate(stated, schema)


@pytest.mark.soak
def test_forms_validate_and_drafts_change_no_answer(capsys):
    said, lines = {}, []
    for spec in SPECS:
        policy = "auto" if spec == "none" else "all"
        with open_engine(spec=spec, draft_policy=policy, max_num_seqs=ROWS) as engine:
            forms = filled(engine)
            texts = engine.generate(map(chat, prompts(200)[::10]), max_tokens=48, temperature=0)
        said[spec] = [answer.token_ids for answer in (*forms, *texts)]
        for kind, answers in (("forms", forms), ("texts", texts)):
            drafted, accepted = sum(a.num_drafts for a in answers), sum(a.num_accepted for a in answers)
            if spec != "none":
                share = accepted / max(1, drafted)
                lines.append(f"  {spec:8} {kind}: {accepted} of {drafted} drafts accepted, {share:.0%}")
    values = [json.loads(answer.text) for answer in forms]
    for value, (_, schema, _) in zip(values, CASES, strict=True):
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    right = sum(same(value, stated) for value, (_, _, stated) in zip(values, CASES, strict=True))
    with capsys.disabled():
        print(f"\n{right} of {len(CASES)} forms have the values that were stated", *lines, sep="\n")
    assert right >= LEAST_RIGHT
    assert all(tokens == said["none"] for tokens in said.values())

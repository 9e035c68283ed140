"""Tests drafters without weights (ngram, suffix, grammar) on models that run through transformers."""

import json

import jsonschema
import pytest
from tokenizers import Tokenizer

from mmengine import Engine
from tests.any_model.catalogue import write
from tests.pictures import asked, noise

FORM = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "has_text": {"type": "boolean"},
    },
    "required": ["colour", "number", "has_text"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM, "strict": True}}
PICTURE, OTHER = noise(0, (60, 90)), noise(1, (90, 58))
CHATS = {  # Mistral has a sliding window in all layers; Gemma 3 has bidirectional attention in images.
    "mistral": (asked("one two three one two three one two three"), asked("What is the time?")),
    "gemma3": (asked(PICTURE, "What is in it?"), asked("Between ", OTHER, "and ", PICTURE, ", which one?")),
}
# Random models rarely repeat themselves, so the bias allows only two tokens.
REPEATING = {"temperature": 0, "ignore_eos": True, "logit_bias": {100: 100, 101: 100}}
SETTINGS = {
    "model_impl": "transformers",
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 4,
    "token_budget": 96,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {kind: tmp_path_factory.mktemp("hosted_drafts") / kind for kind in CHATS}
    for kind, folder in made.items():
        write(kind, folder)
    return made


def without_spaces(folder):
    """Return a logit bias against white space, because random models would fill structured answers with
    spaces.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return dict.fromkeys(map(tokenizer.token_to_id, "\u0120\u010a\u010d\u0109"), -100)


def run(folder, kind, spec):
    """Return the text answers and the structured answers to each chat."""
    drafts = {"num_draft_tokens": 6, "draft_policy": "all"} if spec != "none" else {}
    with Engine(str(folder), spec=spec, **SETTINGS, **drafts) as engine:
        texts = [engine.generate(CHATS[kind], max_tokens=40, **REPEATING) for _ in range(2)]
        form = {"response_format": JSON, "logit_bias": without_spaces(folder)}
        forms = engine.generate(CHATS[kind], max_tokens=120, temperature=0, **form)
    return [*texts[0], *texts[1]], forms


@pytest.mark.parametrize("kind", CHATS)
def test_drafts_are_accepted_and_change_no_token(kind, folders):
    texts, forms = run(folders[kind], kind, "none")
    for answer in forms:
        jsonschema.validate(json.loads(answer.text), FORM)
    for spec in ("ngram", "suffix", "grammar"):
        drafted_texts, drafted_forms = run(folders[kind], kind, spec)
        assert [each.token_ids for each in drafted_texts] == [each.token_ids for each in texts], spec
        assert [each.token_ids for each in drafted_forms] == [each.token_ids for each in forms], spec
        of_spec = drafted_forms if spec == "grammar" else drafted_texts
        assert sum(each.num_accepted for each in of_spec) > 0, spec

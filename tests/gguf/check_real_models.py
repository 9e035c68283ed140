"""Checks real GGUF models against transformers' greedy tokens (`make models-real`; not part of `make test`).

real_answers.json has transformers' tokens, computed in float32 with weights that the package `gguf`
dequantised. The checks need no transformers.
"""

import json

import jsonschema
import pytest

from mmengine.checkpoint.gguf.container import open_container
from tests.gguf.real_calls import CALLS, TOOLS
from tests.gguf.real_models import ANSWERS, MODELS, answers, open_engine
from tests.llama.forms import FORMS
from tests.llama.test_smollm2_forms import same

NEAR = 0.01  # Another summation order in float32 changes a logit by at most NEAR.
# Maximum numbers of answers that may differ because two logits nearly tie.
MOST_NEAR = {"coder": 3, "gemma": 3}
FIRST = "Extract the values from the text as JSON with the keys {keys}.\n\nText: {text}"
SECOND = "{text}\n\nFill in the keys {keys} from this text, as JSON."
CASES = [
    (form.format(keys=", ".join(schema["properties"]), text=text), schema, stated)
    for form, count in ((FIRST, 5), (SECOND, 3))
    for schema, texts in FORMS
    for text, stated in texts[:count]
][:60]
RIGHT_FORMS, RIGHT_CALLS = 40, 30  # Minimum numbers of correct answers.


def shown(capsys, *lines):
    with capsys.disabled():
        print("", *lines, sep="\n")


def file_of(name):
    path = MODELS[name].path
    if not path.is_file():
        pytest.skip(f"no {path.name} here; `make models-real` gets it")
    return path


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_transformers(name, capsys):
    licence = open_container(file_of(name)).metadata.get("general.license", "none stated")
    expected = json.loads(ANSWERS.read_text())[name]
    with open_engine(name) as engine:
        found = answers(engine, name)
        held = engine.built.spec.weights_held
    assert len(found) == len(expected) == MODELS[name].prompts
    margins = []  # For each answer that differs: the smallest gap between the two best logits.
    for answer, wanted in zip(found, expected, strict=True):
        assert answer.prompt_token_ids.tolist() == wanted["prompt"]
        if list(answer.token_ids) != wanted["tokens"]:
            margins.append(wanted["margin"])
    shown(
        capsys,
        f"{MODELS[name].name} (licence {licence}; {held}):",
        f"{len(found) - len(margins)} of {len(found)} answers have transformers' tokens",
        *(f"  an answer differs; the smallest margin of transformers' tokens is {each}" for each in margins),
    )
    assert len(margins) <= MOST_NEAR[name] and all(each < NEAR for each in margins)


@pytest.mark.timeout(1800)
def test_forms_validate(capsys):
    file_of("coder")
    assert len(CASES) == 60
    right = 0
    with open_engine("coder", max_num_seqs=16) as engine:
        ids = {}
        for number, (text, schema, _) in enumerate(CASES):
            form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
            asked = [{"role": "user", "content": text}]
            ids[engine.submit(asked, max_tokens=256, temperature=0, response_format=form)] = number
        found = {}
        while engine.has_work:
            for output in engine.step():
                if output.completion is not None:
                    found[ids[output.request_id]] = json.loads(output.completion.text)
    for number, (_, schema, stated) in enumerate(CASES):
        jsonschema.validate(found[number], schema, format_checker=jsonschema.FormatChecker())
        right += same(found[number], stated)
    shown(capsys, f"{len(CASES)} forms validate; {right} have the values that were stated")
    assert right >= RIGHT_FORMS


@pytest.mark.timeout(1800)
def test_calls_validate(capsys):
    """The file's own chat template describes the tools to the model."""
    file_of("coder")
    assert len(CALLS) == 40
    named = right = 0
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    options = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 128, "temperature": 0.0}
    with open_engine("coder") as engine:
        for text, name, arguments in CALLS:
            answer = engine.chat([{"role": "user", "content": text}], tools=TOOLS, **options)
            (call,) = answer.message.tool_calls
            said = json.loads(call.function.arguments)
            jsonschema.validate(said, schemas[call.function.name])
            named += call.function.name == name
            right += call.function.name == name and said == arguments
    shown(
        capsys, f"{len(CALLS)} calls validate; {named} name the right tool, {right} have the right arguments"
    )
    assert right >= RIGHT_CALLS

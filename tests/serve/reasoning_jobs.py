"""Makes requests with a response format and reasoning, and checks the answers."""

import json
import re

import jsonschema

from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.request_output import CUT
from mmengine.structured_output.grammar_start import find_end
from mmengine.structured_output.request.spec import grammar_of
from tests.serve.queued_batch import answers_at_once

RECORD = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "größe"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["count", "shape"],
    "additionalProperties": False,
}
CALL = {
    "structures": [{"begin": "<call>", "schema": RECORD, "end": "</call>"}],
    "triggers": ["<call>"],
    "at_least_one": True,
    "stop_after_first": True,
}
FORMS = [
    {"schema": RECORD},
    {"regex": "[a-c]{3}(x|yes)[0-9]{2}"},
    {"schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
    {"choice": ["circle", "a square", "größe"]},
    {"schema": {"const": {"a": "</think> é\n"}}},
]
VALIDATOR = jsonschema.Draft202012Validator
FORMATS = VALIDATOR.FORMAT_CHECKER
QUESTIONS = ["What is a triangle?", "How many shapes are there?", "Describe a square, at length."]


def asked_form(form, **others):
    if "schema" in form:
        return {"type": "json_schema", "json_schema": form, **others}, None
    return None, {**form, **others}


def check_content(form, content):
    if "schema" in form:
        jsonschema.validate(json.loads(content), form["schema"], VALIDATOR, format_checker=FORMATS)
    elif "choice" in form:
        assert content in form["choice"]
    else:
        assert re.fullmatch(form["regex"], content)


def jobs(count, temperature, marker, bias, forms=(*FORMS, {"structural_tag": CALL})):
    """Yield `count` pairs of a response format and request options. A logit bias on the `marker` tokens makes
    the end of reasoning likely.
    """
    for number in range(count):
        form = forms[number % len(forms)]
        sampling = make_sampling(
            {
                "max_tokens": 120,
                "temperature": temperature,
                "seed": number,
                "top_k": number % 4 // 3 * 60,
                "logit_bias": dict.fromkeys(marker, bias + number % 5),
            }
        )
        yield form, Options(sampling, grammar=grammar_of(*asked_form(form)), reasoning=True)


def answers(engine, asked):
    prompts = [Prompt.of(QUESTIONS[number % 3]) for number in range(len(asked))]
    return answers_at_once(engine, zip(prompts, (options for _, options in asked), strict=True))


def check(engine, asked, answered, marker):
    """Check that the content of stopped answers matches the response format. Returns the number of answers
    that stopped after reasoning, and the number of reasoning tokens, with the end marker, in each answer
    whose reasoning ended.
    """
    tokenizer, lengths, stopped = engine.processor.tokenizer, [], 0
    for number, (form, _) in enumerate(asked):
        choice = answered[number].choices[0]
        assert choice.finish_reason in ("stop", "length"), choice.detail
        assert choice.after == tuple(marker)
        end = find_end(choice.token_ids, marker)
        reasoned = choice.token_ids[: len(choice.token_ids) if end is None else end]
        assert not set(engine.config.eos_token_ids) & set(reasoned)
        if end is None:
            assert choice.content is None and choice.reasoning == choice.text
            assert (choice.finish_reason, choice.detail) == ("length", CUT)
            continue
        lengths.append(end)
        assert choice.reasoning == tokenizer.decode(reasoned[: -len(marker)])
        assert choice.content == tokenizer.decode(choice.token_ids[end:])
        if choice.finish_reason == "stop":
            stopped += 1
            if "structural_tag" in form:
                assert choice.content.endswith("</call>")
                inner = choice.content.partition("<call>")[2].removesuffix("</call>")
                jsonschema.validate(json.loads(inner), RECORD)
            else:
                check_content(form, choice.content)
    return stopped, lengths

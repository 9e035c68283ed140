"""Forms that begin behind a model's reasoning: where that ends is known by its tokens, whatever the weights,
the temperature, the batch, the drafts and what interrupts it."""

import itertools
import json
import shutil

import jsonschema
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError, InvalidRequest
from mmengine.serve.answers import CUT
from mmengine.serve.batching import run_batch
from mmengine.serve.engine import Engine
from mmengine.serve.prompts import Options, Prompt, make_sampling
from mmengine.serve.reasoning import Reasoning
from mmengine.structured_output.opening import after_of, end_of
from mmengine.structured_output.spec import grammar_of

shapes = pytest.importorskip("mmengine_shapes")

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
    {"schema": {"const": {"a": ["</think>", "é\n"]}}},
]
QUESTIONS = ["What is a triangle?", "How many shapes are there?", "Describe a square, at length."]
SMALL = {"max_num_seqs": 8, "token_budget": 24, "max_model_len": 256, "num_blocks": 19}


def asked_form(form, **others):
    if "schema" in form:
        return {"type": "json_schema", "json_schema": form, **others}, None
    return None, {**form, **others}


def check_content(form, content):
    if "schema" in form:
        jsonschema.validate(json.loads(content), form["schema"])
    elif "choice" in form:
        assert content in form["choice"]
    else:
        import re

        assert re.fullmatch(form["regex"], content)


def copied(folder, template_end="", special=False):
    """The embedded model, whose prompts end so, and whose </think> is a special token perhaps."""
    shutil.copytree(shapes.checkpoint_path(), folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\\n'", f"assistant\\n{template_end}'"))
    if special:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text())
        for token in found["added_tokens"]:
            token["special"] |= token["content"] == "</think>"
        path.write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("thinker") / "model", "<think>\\n", special=True)


@pytest.fixture(scope="module")
def engine():
    with Engine() as engine:
        yield engine


def settled(tokenizer, prompt, wish=None, start="<think>", end="</think>", eos=(1512,)):
    ids = np.array(tokenizer.encode(prompt, allow_special=True), np.int32)
    options = Options(grammar=grammar_of(grammar={"regex": "a"}), reasoning=wish)
    reasoning = Reasoning(tokenizer, eos, start, end)
    found = reasoning.settle(options, ids)
    assert reasoning.settle(found, ids) == found
    return after_of(found.grammar)


ASK = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (ASK, False),
        (f"{ASK}<think>\n", True),
        (f"{ASK}<think>", True),
        (f"{ASK}<think>\n\n</think>\n\n", False),
        (f"{ASK}<think>\nSo be it, I thou", True),
        (f"{ASK}<think></think><think>", True),
        (f"{ASK}</think>", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("no messages", False),
        ("<think>", True),
        ("<think></think>", False),
    ],
)
def test_whether_a_prompt_leaves_reasoning_open(engine, prompt, is_open):
    tokenizer = engine.processor.tokenizer
    assert settled(tokenizer, prompt) == ((1535,) if is_open else ())
    assert settled(tokenizer, prompt, wish=True) == (1535,)
    assert settled(tokenizer, prompt, wish=False) == ()
    assert settled(tokenizer, prompt, end="") == settled(tokenizer, prompt, start="") == ()
    assert settled(tokenizer, prompt, start="", wish=True) == (1535,)
    many = prompt.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")  # of many tokens
    found = settled(tokenizer, many, start="[THINK]", end="[/THINK]")
    assert found == (tuple(tokenizer.encode("[/THINK]")) if is_open else ())


def test_markers_that_cannot_be_said(engine):
    tokenizer = engine.processor.tokenizer
    with pytest.raises(InvalidRequest, match="reasoning true needs a marker .* reasoning_end is empty"):
        settled(tokenizer, ASK, wish=True, end="")
    for marker in ("<|im_end|>", "e\u0301nd", "a" * 300):  # ends answers; is normalized; is too long
        with pytest.raises(InvalidRequest, match=r"reasoning true needs reasoning_end, .* no tokens for it"):
            settled(tokenizer, ASK, wish=True, end=marker)
        assert settled(tokenizer, f"{ASK}<think>", end=marker) == ()
    for name, wrong in itertools.product(("reasoning_start", "reasoning_end"), ("a" * 65, "\ud800", 5, None)):
        with pytest.raises(ConfigError):
            EngineConfig(**{name: wrong}).check()
    EngineConfig(reasoning_start="", reasoning_end="é" * 64).check()


def jobs(count, temperature, marker, bias, tags=True):
    """Prompts with a form each; a bias makes the marker likely enough to come, at some time."""
    forms = [*FORMS, {"structural_tag": CALL}] if tags else FORMS
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
    return dict(run_batch(engine, ((prompt, job[1]) for prompt, job in zip(prompts, asked, strict=True))))


def check(engine, asked, answered, marker):
    """How many end their reasoning and stop, and the lengths of the reasoning; what stops is in its form."""
    tokenizer, lengths, stopped = engine.processor.tokenizer, [], 0
    for number, (form, _) in enumerate(asked):
        choice = answered[number].choices[0]
        assert choice.finish_reason in ("stop", "length"), choice.detail
        assert choice.after == tuple(marker)
        end = end_of(choice.token_ids, marker)
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


@pytest.mark.parametrize(
    ("weights", "temperature", "end", "bias"),
    [
        ("trained", 0.0, "</think>", 14.0),
        ("trained", 1.5, "</think>", 14.0),
        ("random", 0.0, "</think>", 1.0),
        ("random", 1.5, "</think>", 3.5),
        ("random", 1.5, "So", 6.0),
        ("random", 1.5, "...", 4.0),
    ],
)
def test_what_stops_is_valid_wherever_reasoning_ends(weights, temperature, end, bias, random_weights):
    """A pool too small for what runs preempts and prompts are computed in pieces; with drafts or without, one
    step at a time or decided ahead, the tokens are the same."""
    model = random_weights if weights == "random" else None
    with Engine(model, dtype="float32", config=EngineConfig(reasoning_end=end)) as engine:
        marker = engine.processor.tokenizer.encode(end, allow_special=True)
        asked = list(jobs(30, temperature, marker, bias))
        wide = answers(engine, asked)
        stopped, lengths = check(engine, asked, wide, marker)
    ends = f"{len(lengths)} of 30 end reasoning, after {lengths}"
    print(f"{weights}, {temperature}, {end}: {ends}; {stopped} stop")
    assert len(lengths) >= 15 and stopped >= 8 and len(set(lengths)) >= 3
    others = [
        {"spec": "none"},
        {**SMALL, "max_in_flight": 2},
        {**SMALL, "spec": "none"},
        {**SMALL, "swap_blocks": 40, "preempt_mode": "swap"},
    ]
    for options in others:
        config = EngineConfig(reasoning_end=end, **options)
        with Engine(model, dtype="float32", config=config) as engine:
            narrow = answers(engine, asked)
            assert "num_blocks" not in options or engine.stats().num_preemptions > 0
        for number in range(len(asked)):
            assert narrow[number].token_ids == wide[number].token_ids
            assert narrow[number].choices == wide[number].choices

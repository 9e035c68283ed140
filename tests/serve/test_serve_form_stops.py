"""Tests stop strings in answers with a response format.

An answer has the finish reason `stop` only if the text before the stop string matches the format. Otherwise
the finish reason is `length`, or the engine completes the answer if on_truncation is "close". Batches, drafts
and interruptions change no answer.
"""

import itertools
import json
import random

import jsonschema
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.replay.convert.redact import redact
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.text.request_output import CUT_AT_STOP
from mmengine.structured_output.request.spec import grammar_of
from tests.log_copies import copied
from tests.serve.test_serve_closing import LONG, closing
from tests.serve.test_serve_structured import FORMATS, QUESTIONS, RECORD, SMALL, TREE, answers, form

pytest.importorskip("mmengine_shapes")

SCHEMAS = [RECORD, LONG, TREE, {"type": "integer"}, {"type": "string", "maxLength": 40}]


def is_valid(text, schema):
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def jobs(make, stops=None, count=20, max_tokens=60):
    """Yield `count` pairs (schema, options). stops[i]: the stop strings for pair i."""
    for number in range(count):
        schema = SCHEMAS[number % len(SCHEMAS)]
        asked = {"max_tokens": max_tokens, "temperature": 1.3 * (number % 3 > 0), "seed": number}
        asked["stop"] = stops[number] if stops else ()
        yield schema, Options(make_sampling(asked), grammar=grammar_of(make(schema)))


def strings_in(texts, seed):
    """Return one or two random substrings for each text, as stop strings."""
    rng = random.Random(seed)
    found = []
    for text in texts:
        places = [rng.randrange(len(text)) for _ in range(rng.choice((1, 1, 2)))]
        found.append(tuple(text[at : at + rng.choice((1, 1, 2, 5))] for at in places))
    return found


def before(text, stops):
    return min((text[: text.index(each)] for each in stops if each in text), key=len, default=text)


def test_cut_and_closed_answers_with_stop_strings(tmp_path):
    with Engine() as engine:
        plain = answers(engine, list(jobs(form)))
        texts = [plain[number].text for number in range(len(plain))]
        stops = strings_in(texts, 1)
        cut = answers(engine, list(jobs(form, stops)))
    config = EngineConfig(num_blocks=19, **SMALL)
    with Engine(config=config, log=tmp_path / "log") as engine:
        again = answers(engine, [*jobs(form, stops), *jobs(closing, stops)])
        assert engine.stats().num_preemptions > 0
    assert verify(tmp_path / "log").ok
    redact(tmp_path / "log", tmp_path / "redacted", bytes(16))
    assert verify(tmp_path / "redacted").ok
    complete = closed = 0
    for number, (schema, _) in enumerate(jobs(form)):
        one = cut[number].choices[0]
        assert one == again[number].choices[0]
        assert one.text == before(texts[number], stops[number]), (number, stops[number])
        whole = is_valid(one.text, schema)
        assert (one.finish_reason, one.detail) == (("stop", "string") if whole else ("length", CUT_AT_STOP))
        complete += whole
        other = again[len(plain) + number].choices[0]
        assert other.finish_reason == "stop" and is_valid(other.text, schema), (other, stops[number])
        assert len(other.token_ids) <= 60
        if other.token_ids[: len(one.token_ids)] == one.token_ids:
            assert other.text.startswith(one.text) and other.detail == ("string" if whole else "closed")
            closed += not whole
    assert complete and closed > 5


@pytest.mark.parametrize("max_tokens", [24, 33])
def test_closed_answers_fit_their_budget(max_tokens):
    """With few tokens left, the engine completes the text before the stop string. If no such completion fits,
    the engine completes the uncut text.
    """
    schemas = [RECORD, {"type": "string", "maxLength": 40}]
    with Engine() as engine:
        for schema, stop, seed in itertools.product(schemas, ('"', "e", "ir", 'e"', "}"), range(4)):
            options = {"max_tokens": max_tokens, "temperature": 1.5, "seed": seed, "stop": stop}
            form_of = closing(schema)
            choice = engine.generate([QUESTIONS[seed % 3]], response_format=form_of, **options)[0].choices[0]
            assert choice.finish_reason == "stop" and is_valid(choice.text, schema), (choice, stop)
            assert len(choice.token_ids) <= max_tokens


def test_other_forms_and_reasoning():
    with Engine(config=EngineConfig(reasoning_end="So")) as engine:
        for asked, stop, text, reason in (
            ({"regex": "ab{3}c"}, "c", "abbb", "length"),
            ({"regex": "a(bc){4,5}"}, "c", "ab", "length"),
            ({"regex": "x(,yy)+"}, ",y", "x", "length"),
            ({"regex": "one(, two){2}|one"}, "e", "on", "length"),
            ({"regex": "aa|aa[b]{2}|aaaa"}, "aa", "", "length"),
            ({"regex": "(aab)?aab"}, "b", "aa", "length"),
            ({"regex": "a{2,3}b{2}|a{3}"}, "ab", None, "length"),
            ({"regex": "é+!{2}"}, "!", None, "length"),
        ):
            choice = engine.generate(["?"], grammar=asked, stop=[stop], max_tokens=40)[0].choices[0]
            if text is not None:
                assert (choice.text, choice.finish_reason, choice.detail) == (text, reason, CUT_AT_STOP)
            assert stop not in choice.text
        # Stop strings apply only after the reasoning. The end marker "So" contains the stop string "o".
        form_of = form({"type": "object", "properties": {"So": {"type": "integer"}}, "required": ["So"]})
        options = {"stop": ["o"], "max_tokens": 200, "logit_bias": {}}
        marker = engine.processor.tokenizer.encode("So")
        options["logit_bias"] = dict.fromkeys(marker, 50.0)
        one = engine.generate(["?"], response_format=form_of | {"reasoning": True}, **options)[0].choices[0]
        assert (one.content, one.finish_reason) == ('{"S', "length")
        assert one.text == one.reasoning + "So" + one.content


def test_the_first_tokens_hold_no_stop_string():
    """A stop string within the first `min_tokens` tokens is ignored. The stop string in the next token ends
    the answer.
    """
    says = {"max_tokens": 12, "temperature": 0.0}
    with Engine() as engine:
        whole = engine.generate(["Say a word."], **says)[0]
        decode = engine.processor.tokenizer.decode
        pieces = [decode([token]) for token in whole.token_ids]
        for place in range(4):
            asked = {**says, "stop": [pieces[place], pieces[place + 1]]}
            least = place + 1
            one = engine.generate(["Say a word."], min_tokens=least, **asked)[0]
            chat = engine.chat("Say a word.", min_tokens=least, **asked)
            assert one.token_ids == whole.token_ids[: least + 1] and one.finish_reason == "stop"
            assert one.text == chat.message.content == decode(whole.token_ids[:least])
            assert chat.choices[0].stop_reason == pieces[place + 1]


def test_another_process_goes_on_closing(tmp_path):
    """Engines that resume copies of the log complete the answers with the same texts."""
    options = {"max_tokens": 60, "temperature": 1.3}
    folders, wanted, news = {}, {}, {}
    with Engine(config=EngineConfig(**SMALL), log=tmp_path / "log") as engine:
        for number, name in enumerate("abcdef"):
            form_of = closing([LONG, RECORD][number % 2])
            stop = ['"', "a", ":"][number % 3]
            engine.submit("?", request_id=name, response_format=form_of, seed=number, stop=stop, **options)
        for step in itertools.count():
            for output in engine.step(received=False):
                news[output.request_id] = news.get(output.request_id, "") + output.text
                wanted[output.request_id] = output.completion or wanted.get(output.request_id)
            if engine.is_idle:
                break
            if step % 5 == 0:
                folders[step] = copied(tmp_path / "log", tmp_path / f"log{step}")
    assert {name: answer.text for name, answer in wanted.items()} == news
    assert {answer.choices[0].detail for answer in wanted.values()} == {"closed"}
    for folder in folders.values():
        with Engine(log=folder, resume=Resume()) as engine:
            found = {name: engine.requests.resume(name) for name in "abcdef"}
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
        assert {name: answer.text for name, answer in found.items()} == news
        assert verify(folder).ok

"""Tests that field confidences come from a softmax over the tokens that the mask allows."""

import asyncio
import json
import math
import os
import signal
from itertools import accumulate

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.replay.verify import verify
from mmengine.runtime.sampling.sampler import Sampler
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.extraction.columns import leaves
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.choice_deltas import ChoiceDeltas
from mmengine.serve.text.reasoning import NO_REASONING
from mmengine.structured_output.request.spec import grammar_of
from tests.forked import exit_code_of

pytest.importorskip("mmengine_shapes")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "cross", "square"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 5000},
        "paid": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 1, "maxItems": 2},
        "name": {"type": "string", "maxLength": 4},
    },
    "required": ["kind", "count", "paid", "tags", "name"],
    "additionalProperties": False,
}
FORM = {
    "type": "json_schema",
    "json_schema": {"schema": SCHEMA},
    "bounds": {"whitespace": 1},
    "field_confidence": True,
}
ASKS = "Describe the picture."
FEW_BLOCKS = {"max_num_seqs": 6, "token_budget": 24, "max_model_len": 112, "num_blocks": 11}


def jobs(count=8, **more):
    for number in range(count):
        asked = {"max_tokens": 90, "temperature": number % 3 * 0.7, "seed": number, **more}
        if number % 4 == 3:
            asked["logprobs"] = 2
        yield Prompt.of(ASKS), Options(make_sampling(asked), grammar=grammar_of(FORM))


def answers(engine, asked):
    found = dict(engine.run_batch(asked))
    return [found[index].choices[0] for index in sorted(found)]


@pytest.fixture(scope="module")
def plain(random_weights):
    with Engine(random_weights, dtype="float32", config=EngineConfig(spec="none")) as engine:
        return [answers(engine, [job])[0] for job in jobs()]


def assert_same(found, expected):
    assert found.content == expected.content and found.finish_reason == expected.finish_reason
    assert found.field_confidence.keys() == expected.field_confidence.keys()
    for pointer, field in expected.field_confidence.items():
        same = found.field_confidence[pointer]
        for name in ("p", "min", "entropy"):
            assert getattr(same, name) == pytest.approx(getattr(field, name), rel=1e-4, abs=1e-5), pointer
        assert len(same.others) == len(field.others)
        assert [each.p for each in same.others] == pytest.approx([each.p for each in field.others], abs=1e-3)


class Spy:
    """Records the unmasked logits and the mask in each step. The engine must run a single request."""

    def __init__(self, monkeypatch):
        self.steps, choose = [], Sampler.choose

        def spied(sampler, logits, batch, masks=None):
            words = masks.bits[0].view(np.uint8)
            allowed = np.unpackbits(words, count=logits.shape[1], bitorder="little").astype(bool)
            self.steps.append((logits[0].numpy().astype(np.float64), allowed))
            return choose(sampler, logits, batch, masks)

        monkeypatch.setattr(Sampler, "choose", spied)


def expected_fields(engine, choice, steps):
    """Return {pointer: (p, min)}, computed from full distributions, as the documentation defines them."""
    tokenizer = engine.processor.tokenizer
    pieces = [
        b"" if token in tokenizer.special_ids else tokenizer.token_bytes()[token]
        for token in choice.token_ids
    ]
    ends = list(accumulate(map(len, pieces)))
    text = b"".join(pieces).decode()
    likelihoods = []
    for logits, allowed in steps:
        weights = np.where(allowed, np.exp(logits - logits[allowed].max()), 0)
        likelihoods.append(weights / weights.sum())
    fields, at = {}, 0
    for pointer, value in leaves(json.loads(text)):
        if not isinstance(value, str):
            at = text.index(":", at) if pointer in ("/count", "/paid") else at
        start = text.index(json.dumps(value), at)
        at = end = start + len(json.dumps(value))
        factors = []
        for place, (piece, last) in enumerate(zip(pieces, ends, strict=True)):
            if last > start and last - len(piece) < end and steps[place][1].sum() > 1:
                factors.append(likelihoods[place][choice.token_ids[place]])
        if isinstance(value, int) and not isinstance(value, bool) and end in ends:
            after = likelihoods[ends.index(end) + 1]
            likeliest = [token for token in np.argsort(-after, kind="stable")[:8] if after[token] > 8.4e-7]
            further = [
                token for token in likeliest if tokenizer.token_bytes()[token][:1] in b"0123456789.eE+-"
            ]
            factors.append(1 - sum(after[token] for token in further))
        fields[pointer] = math.prod(factors), min(factors, default=1.0)
    return fields


def test_confidences_equal_a_softmax_over_the_whole_masked_vocabulary(random_weights, monkeypatch):
    spy, sure = Spy(monkeypatch), 0
    with Engine(random_weights, dtype="float32", config=EngineConfig(spec="none")) as engine:
        for job in jobs():
            spy.steps.clear()
            choice = answers(engine, [job])[0]
            assert (choice.logprobs is None) == (job[1].sampling.logprobs is None)
            assert len(choice.confidences) == len(choice.token_ids)
            for token, found, (logits, allowed) in zip(choice.token_ids, choice.confidences, spy.steps):
                masked = logits[allowed] - logits[allowed].max()
                logprobs = masked - np.log(np.exp(masked).sum())
                assert found.is_forced == (allowed.sum() == 1)
                place = np.flatnonzero(allowed).tolist().index(token)
                assert found.logprob == pytest.approx(logprobs[place], abs=1e-4)
                assert found.entropy == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=1e-4)
            if choice.finish_reason != "stop":
                continue
            expected = expected_fields(engine, choice, spy.steps)
            assert choice.field_confidence.keys() == expected.keys()
            for pointer, (p, least) in expected.items():
                field = choice.field_confidence[pointer]
                assert (field.p, field.min) == pytest.approx((p, least), rel=1e-3), pointer
                sure += field.p < 0.9
    assert sure > 20  # enough fields are uncertain for a meaningful comparison


@pytest.mark.parametrize(
    "settings",
    [
        {"spec": "none", "max_in_flight": 2},
        FEW_BLOCKS,
        {**FEW_BLOCKS, "num_draft_tokens": 6, "draft_policy": "all"},
    ],
)
def test_batches_preemption_and_drafts_change_nothing(random_weights, plain, settings, tmp_path):
    config = EngineConfig(**settings)
    with Engine(random_weights, dtype="float32", config=config, log=tmp_path / "log") as engine:
        found = answers(engine, list(jobs()))
        stats = engine.stats()
    assert config.spec == "none" or stats.num_preemptions > 0
    assert (config.spec == "none") == (sum(each.accepted for each in stats.drafts.values()) < 20)
    for one, expected in zip(found, plain, strict=True):
        assert_same(one, expected)
    assert verify(tmp_path / "log").ok


@pytest.mark.parametrize("settings", [{"spec": "none"}, {"draft_policy": "all"}, {"snapshot_bytes": 4000}])
def test_a_killed_process_leaves_its_confidences_in_the_log(random_weights, plain, settings, tmp_path):
    config = EngineConfig(max_num_seqs=8, **settings)

    def die():
        engine = Engine(random_weights, dtype="float32", config=config, log=tmp_path / "log")
        for number, (prompt, options) in enumerate(jobs()):
            engine.submit(prompt, options.sampling, request_id=f"r{number}", response_format=FORM)
        for _ in range(14):
            engine.step()
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of(die) == -signal.SIGKILL
    with Engine(
        random_weights, dtype="float32", config=config, log=tmp_path / "log", resume=Resume()
    ) as engine:
        given = [engine.requests.resumed[f"r{number}"] for number in range(8)]
        assert sum(len(each.token_ids) for each in given) > 40
        found = {f"r{number}": engine.requests.resume(f"r{number}") for number in range(8)}
        while any(each is None for each in found.values()):
            for output in engine.step():
                found[output.request_id] = output.completion or found[output.request_id]
    for number, expected in enumerate(plain):
        assert_same(found[f"r{number}"].choices[0], expected)


def test_values_chats_and_streams_have_the_same_confidences(random_weights):
    schema = {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 1, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"schema": schema}, "field_confidence": True}
    asked = {"max_tokens": 160, "temperature": 0.7, "seed": 1}
    with Engine(random_weights, dtype="float32") as engine:
        value, confidence = engine.generate_json(ASKS, schema, confidence=True, **asked)
        whole = engine.generate(ASKS, response_format=form, **asked)[0].choices[0]
        assert value == json.loads(whole.content) and confidence == whole.field_confidence
        assert confidence.keys() == {f"/{index}" for index in range(len(value))}
        *partial, last = engine.stream_json(ASKS, schema, confidence=True, **asked)
        assert last == (value, confidence) and partial and all(each.confidence is None for each in partial)
        assert engine.generate_json(ASKS, schema, **asked) == value
        messages = [{"role": "user", "content": ASKS}]
        several = engine.chat(messages, response_format=form, n=2, **asked)
        stream = engine.stream_chat(messages, response_format=form, n=2, **asked)
        ends = {each.choices[0].index: each.choices[0].delta.field_confidence for each in stream}
        for choice in several.choices:
            fields = choice.message.field_confidence
            assert "/0" in fields and fields == ends[choice.index]
        assert "field_confidence" not in several.message.as_json()
        assert several.choices[0].message.field_confidence != several.choices[1].message.field_confidence


def test_first_tokens_of_another_engine_have_no_confidence(random_weights, plain):
    whole = plain[0]
    with Engine(random_weights, dtype="float32") as engine:
        for given in (1, len(whole.token_ids) // 2):
            name = engine.submit(
                ASKS, max_tokens=90, seed=0, response_format=FORM, outputs=whole.token_ids[:given]
            )
            with engine.outputs_of(name) as outputs:
                found = list(outputs)[-1].completion.choices[0]
            assert found.token_ids == whole.token_ids
            rest = found.field_confidence
            assert rest.items() and rest.keys() <= whole.field_confidence.keys()
            for pointer, field in rest.items():
                assert field.p == pytest.approx(whole.field_confidence[pointer].p, rel=1e-4)
        assert len(rest) < len(whole.field_confidence)


def test_deltas_know_the_text_of_tokens_without_confidences(random_weights, plain):
    """A snapshot may omit the confidences of an answer's first tokens."""
    whole, half = plain[0], len(plain[0].token_ids) // 2
    with Engine(random_weights, dtype="float32") as engine:
        deltas = ChoiceDeltas(engine.processor.tokenizer, make_sampling({}), NO_REASONING, grammar_of(FORM))
    deltas.push(whole.token_ids[:half])
    deltas.push(whole.token_ids[half:], confidences=whole.confidences[half:])
    rest = deltas.finish().field_confidence
    assert 0 < len(rest) < len(whole.field_confidence)
    assert all(field == whole.field_confidence[pointer] for pointer, field in rest.items())


def test_formats_without_fields_are_refused():
    with Engine() as engine:
        for form, name in (
            ({"type": "text", "field_confidence": True}, "json_schema or json_object, not text"),
            ({"type": "structural_tag", "field_confidence": True}, "not structural_tag"),
            ({**FORM, "field_confidence": "yes"}, "must be true or false"),
        ):
            with pytest.raises(InvalidRequest, match=name) as refused:
                engine.generate(ASKS, response_format=form)
            assert refused.value.path == ("response_format", "field_confidence")
        with pytest.raises(InvalidRequest, match="unknown field 'field_confidence'"):
            engine.generate(ASKS, grammar={"regex": "a", "field_confidence": True})
        with pytest.raises(InvalidRequest, match="stop cannot go with field_confidence"):
            engine.generate(ASKS, response_format={**FORM, "on_truncation": "close"}, stop=["x"])
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        with pytest.raises(InvalidRequest, match="cannot go with tools|have no tools|does not"):
            engine.chat([{"role": "user", "content": ASKS}], tools=[tool], response_format=FORM)


@pytest.mark.parametrize("settings", [{"spec": "none"}, {"draft_policy": "all"}])
def test_fields_are_those_after_the_reasoning(random_weights, settings):
    """JSON in the reasoning gets no field confidences."""
    form = {**FORM, "reasoning": True}
    config = EngineConfig(reasoning_end="</think>", **settings)
    with Engine(random_weights, dtype="float32", config=config) as engine:
        marker = engine.processor.tokenizer.encode("</think>", allow_special=True)
        asked = {"max_tokens": 150, "temperature": 1.0, "logit_bias": dict.fromkeys(marker, 4.0), "n": 4}
        completion = engine.generate(ASKS, response_format=form, seed=3, **asked)[0]
        stream = engine.stream_chat(
            [{"role": "user", "content": ASKS}], response_format=form, seed=3, **asked
        )
        ends = {each.choices[0].index: each.choices[0].delta.field_confidence for each in stream}

    async def ask():
        async with AsyncEngine(random_weights, dtype="float32", config=config) as engine:
            return await engine.generate(ASKS, response_format=form, seed=3, **asked)

    reasoned, same = 0, asyncio.run(ask()).choices
    for choice, other in zip(completion.choices, same, strict=True):
        assert choice.content == other.content
        assert choice.field_confidence.keys() == other.field_confidence.keys()
        fields = choice.field_confidence
        if choice.content is None:
            assert fields == {} == ends[choice.index]
            continue
        reasoned += len(choice.token_ids) > 60
        if choice.finish_reason == "stop":
            assert fields.keys() == dict(leaves(json.loads(choice.content))).keys()
        assert fields.keys() == ends[choice.index].keys()
    assert reasoned > 0

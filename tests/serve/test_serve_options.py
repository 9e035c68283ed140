"""Tests that options have the same names and checks in all of the engine's calls."""

import asyncio
import re
from types import NoneType
from typing import get_args, get_type_hints

import msgspec
import pytest

from mmengine.cli.batch import run_batch_file
from mmengine.errors import InvalidRequest
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt import options as opts
from mmengine.serve.prompt.option_names import FOREIGN
from tests.serve.serve_fakes import builder


def test_the_sampling_options_are_the_fields_of_sampling_params():
    hints = get_type_hints(opts.SamplingOptions)
    fields = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    assert list(hints) == list(fields)
    for name, hint in hints.items():
        taken = set(get_args(hint))
        assert NoneType in taken, f"{name}: None means the default"
        assert set(get_args(fields[name]) if NoneType in get_args(fields[name]) else {fields[name]}) <= taken


def test_every_option_of_a_request_has_its_default_in_options():
    fields = set(opts.Options.__dataclass_fields__)
    lengths = {"max_length", "min_length"}  # only in transformers' pipeline
    measured = {"prepared_s", "thinking", "place", "pooling"}  # set by the engine
    assert (
        fields - {"sampling", "grammar", "reasoning", "notes"} - lengths - measured == opts.SUBMIT - opts.FORM
    )
    assert {"request_id", "envelope", "calls", "outputs", "sample_index"} == opts.SUBMIT - opts.LINE and {
        "deadline_s"
    } == opts.LINE - opts.GENERATE
    assert opts.make_options(None, {}) == opts.Options()
    given = {"request_id": "a", "priority": 3, "cache_salt": "b", "deadline_s": 2.0, "top_k": 5}
    expected = opts.Options(SamplingParams(top_k=5), "a", 3, "b", deadline_s=2.0)
    assert opts.make_options(None, given) == expected


@pytest.mark.parametrize("taken", [opts.GENERATE, opts.LINE, opts.SUBMIT])
def test_what_is_not_an_option_is_refused_by_name(taken):
    for name in ("zzz", *sorted(opts.SUBMIT - taken)):
        with pytest.raises(
            InvalidRequest, match=f"unknown sampling option '{name}'; known are bad_words_ids, freq"
        ):
            opts.make_options(None, {name: 1}, taken)
    with pytest.raises(InvalidRequest, match=r"give sampling or keywords, not both \(n, top_k\)"):
        opts.make_options(SamplingParams(), {"top_k": 1, "n": 2, "priority": 1}, taken)


def test_other_libraries_names_and_misspelt_names_get_advice():
    for name, advice in (
        ("max_new_tokens", "use max_tokens"),
        ("do_sample", "use temperature; 0 is greedy"),
        ("sampling_params", "give its fields as keyword arguments, such as max_tokens=64"),
        ("images", "put the media into a message: {'type': 'image', 'image': path}"),
        ("temprature", "did you mean temperature?"),
        ("maxtokens", "did you mean max_tokens?"),
    ):
        with pytest.raises(InvalidRequest) as found:
            opts.make_options(None, {name: 1})
        assert str(found.value) == f"unknown sampling option '{name}'; {advice}"
    known = set(SamplingParams.__struct_fields__) | opts.SUBMIT
    assert not known & FOREIGN.keys()
    used = {word for text in FOREIGN.values() for word in re.findall(r"use ([a-z_]+)\b", text)}
    assert used <= known | {"AsyncEngine", "adapter", "stream_chat"}


def test_both_engines_take_the_same_options_and_refuse_the_same():
    given = {"request_id": "a", "priority": 1, "cache_salt": "s", "deadline_s": 9.0, "max_tokens": 9}
    with Engine(builder=builder()) as engine:
        assert engine.submit("hello", **given) == "a"
        while engine.has_work:
            engine.step()
        for unknown in ({"max_length": 1}, {"deadline_s": 1.0}, {"request_id": "b"}):
            with pytest.raises(InvalidRequest, match=f"unknown sampling option '{next(iter(unknown))}'"):
                engine.generate(["hello"], **unknown)
        with pytest.raises(InvalidRequest, match="unknown sampling option 'max_length'"):
            engine.submit("hello", max_length=1)
        with pytest.raises(InvalidRequest, match="generate_json takes a schema; leave out grammar"):
            engine.generate_json("hello", {}, grammar={"choice": ["a"]})
        with pytest.raises(InvalidRequest, match="gives one value"):
            engine.generate_json("hello", {}, sampling=SamplingParams(n=2))

    async def streams():
        async with AsyncEngine(builder=builder()) as engine:
            assert (await engine.generate("hello", **given)).request_id == "a"
            with pytest.raises(InvalidRequest, match="unknown sampling option 'max_length'"):
                engine.stream("hello", max_length=1)
            with pytest.raises(InvalidRequest, match="unknown sampling option 'stream'"):
                engine.stream("hello", stream=False)
            with pytest.raises(InvalidRequest, match="gives one value"):
                await engine.generate_json("hello", {}, n=2)
            with pytest.raises(InvalidRequest, match="response_format"):  # {} is invalid, unlike None
                await engine.generate("hello", response_format={})

    asyncio.run(asyncio.wait_for(streams(), 30))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logit_bias": {257: 1.0}}, "logit_bias names the token 257, but this model's ids end at 256; take"),
        ({"logit_bias": {"300": 1.0, "2": 1.0}}, "logit_bias names the token 300"),
        ({"stop_token_ids": [3, 2**31 - 1]}, "stop_token_ids names the token 2147483647"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused_on_every_path(options, says, tmp_path):
    with Engine(builder=builder()) as engine:
        for ask in (engine.submit, lambda prompt, **given: engine.generate([prompt], **given)):
            with pytest.raises(InvalidRequest, match=says):
                ask("hello", **options)
        sampling = opts.make_sampling(options)
        with pytest.raises(InvalidRequest, match=says):
            engine.submit("hello", sampling)
        assert not engine.has_work
        assert engine.generate(["hello"], logit_bias={256: 1.0}, stop_token_ids=(256,))[0].text == "HELLO"

    async def streams():
        async with AsyncEngine(builder=builder()) as engine:
            with pytest.raises(InvalidRequest, match=says):
                engine.stream("hello", **options)
            with pytest.raises(InvalidRequest, match=says):
                await engine.generate("hello", **options)

    asyncio.run(asyncio.wait_for(streams(), 30))
    asked = {"custom_id": "a", "messages": [{"role": "user", "content": "hello"}], **options}
    (tmp_path / "requests").write_bytes(msgspec.json.encode(asked))
    make_engine = lambda resume: Engine(builder=builder())  # noqa: E731
    run_batch_file(tmp_path / "requests", tmp_path / "answers", None, make_engine)
    refused = msgspec.json.decode((tmp_path / "answers").read_bytes())
    assert refused["custom_id"] == "a" and says in refused["error"]

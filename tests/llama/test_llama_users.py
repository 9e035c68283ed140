"""Tests a text model through all user interfaces: the engine, the server's three APIs, the pipeline, and a
GGUF file.
"""

import asyncio
import json

import pytest
import torch
from PIL import Image

from mmengine import AsyncEngine, Engine, Prompt, pipeline
from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest
from mmengine.events.log import LogReader
from mmengine.events.vocabulary import Started
from mmengine.models.held_weights import holds_blocks
from mmengine.native import library
from mmengine.replay import verify
from mmengine.server.lifecycle.warm_up import warm_up
from tests.gguf.test_gguf_values import decoded
from tests.gguf.writing import STRING, UINT32, Tensor, model, vocabulary, weights, write
from tests.llama.tiny import make_tiny
from tests.pictures import data_url
from tests.serve.test_serve_chat import JSON_TEMPLATE, ONE, SHAPES, TOOLS
from tests.server.running import served

CHAT = [{"role": "user", "content": "what is the time"}]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}<|start|>"
NO_IMAGES = "this model accepts text, no images; leave it out, or use another model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    engine = AsyncEngine(folder, dtype="float32", log=tmp_path_factory.mktemp("served") / "log")
    with served(engine, names=("tiny",), reattach_s=0) as one:
        yield one


def test_the_three_apis_answer(server):
    status, _, answer = server.chat("what is the time", max_tokens=8, ignore_eos=True, temperature=0)
    assert status == 200 and answer["usage"]["completion_tokens"] == 8
    said = answer["choices"][0]["message"]["content"]
    streamed = server.events("what is the time", max_tokens=8, ignore_eos=True, temperature=0)
    deltas = [choice["delta"] for event in streamed[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == said
    asked = {"prompt": "the cat sat", "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    status, _, answer = server.call("/v1/completions", asked)
    assert status == 200 and len(answer["choices"][0]["logprobs"]["tokens"]) == 8
    status, _, answer = server.respond("the cat", max_output_tokens=16)
    assert status == 200 and answer["output"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_image_is_refused_by_a_sentence(server, api):
    url = data_url(size=(32, 32))
    if api == "chat":
        part = {"type": "image_url", "image_url": {"url": url}}
        status, _, answer = server.chat([part, {"type": "text", "text": "What is it?"}])
    else:
        content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
        status, _, answer = server.respond([{"role": "user", "content": content}])
    assert status == 400 and NO_IMAGES in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_forms_and_tools_of_the_server(server):
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPES}}
    status, _, answer = server.chat("the cat", response_format=form, max_tokens=400)
    assert status == 200
    said = json.loads(answer["choices"][0]["message"]["content"])
    assert said["shape"] in ("square", "circle") and 1 <= said["side"] <= 9
    status, _, answer = server.chat("the cat", tools=TOOLS, tool_choice="required")
    assert status == 400 and "tools" in answer["error"]["message"]


def test_the_first_steps_of_a_server_are_without_an_image(folder):
    """Both warm-up requests finish, although the model accepts no images."""

    async def warmed_up():
        engine = AsyncEngine(folder, dtype="float32")
        await warm_up(engine, "")
        finished = engine.stats().num_finished
        await engine.close()
        return finished

    assert asyncio.run(warmed_up()) == 2


@pytest.mark.parametrize("spec", ["none", "ngram", "suffix", "grammar"])
def test_forms_tools_and_drafts_of_the_engine(folder, tmp_path, spec):
    config = EngineConfig(spec=spec, draft_policy="all" if spec != "none" else "auto")
    with Engine(folder, dtype="float32", config=config, log=tmp_path / "log") as engine:
        greedy = engine.generate([CHAT, CHAT, "the cat"], max_tokens=12, ignore_eos=True)
        form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPES}}
        (shape,) = engine.generate([CHAT], max_tokens=400, response_format=form, temperature=0)
        asked = Prompt(messages=CHAT, template_options={"chat_template": JSON_TEMPLATE})
        answer = engine.chat(asked, tools=TOOLS, **{**ONE, "max_tokens": 400})
        with pytest.raises(InvalidRequest, match=NO_IMAGES):
            engine.generate([Prompt(messages=CHAT, images=[Image.new("RGB", (8, 8))])])
        drafted = sum(counts.proposed for counts in engine.stats().drafts.values())
    assert greedy[0].token_ids == greedy[1].token_ids != greedy[2].token_ids
    assert json.loads(shape.text)["shape"] in ("square", "circle")
    assert answer.message.tool_calls[0].function.name in ("area", "now")
    assert (drafted > 0) is (spec != "none")
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived and not report.unfinished


def test_the_pipeline_answers_chats_of_text(folder):
    pipe = pipeline("image-text-to-text", model=folder, dtype="float32")
    (record,) = pipe(text=CHAT, max_new_tokens=4)
    assert record["generated_text"][-1]["role"] == "assistant"
    with pytest.raises(InvalidRequest, match=NO_IMAGES):
        pipe(images=Image.new("RGB", (8, 8)), text="what is it")
    pipe.close()


def test_a_gguf_file_is_a_model(tmp_path):
    """An engine answers from a GGUF file, and the log stores the file's fingerprint."""
    path = tmp_path / "tiny.gguf"
    keys = model() + [("tokenizer.chat_template", STRING, TEMPLATE)] + vocabulary()
    path.write_bytes(write(keys, weights()).data)
    with Engine(str(path), dtype="float32", log=tmp_path / "log") as engine:
        (answer,) = engine.generate([[{"role": "user", "content": "hell"}]], max_tokens=6, ignore_eos=True)
        assert answer.prompt_token_ids.tolist() == [0, 260, 1, 0] and len(answer.token_ids) == 6
        fingerprint = engine.built.plugin.fingerprint(path)
    (started,) = [record.event for record in LogReader(tmp_path / "log") if isinstance(record.event, Started)]
    assert started.fingerprints["weights"] == fingerprint
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived


@pytest.mark.parametrize("head", (False, True))
@pytest.mark.parametrize("kind", ("Q4_0", "Q4_1"))
def test_a_gguf_file_whose_ends_have_six_bits_answers_as_its_values(tmp_path, kind, head):
    """Most 4-bit files store the embedding and the head as Q6_K. Packed and dequantized weights give the same
    answers.
    """
    keys = model(embedding_length=(UINT32, 256)) + vocabulary()
    keys += [("tokenizer.chat_template", STRING, TEMPLATE)]
    packed = weights(kind, head=head, hidden=256, ends="Q6_K")
    plain = [Tensor(each.name, "F32", each.shape, decoded(each.type, each.data).tobytes()) for each in packed]
    said = []
    for name, tensors in (("packed", packed), ("plain", plain)):
        (tmp_path / f"{name}.gguf").write_bytes(write(keys, tensors).data)
        with Engine(tmp_path / f"{name}.gguf", dtype="float32") as engine:
            answers = engine.generate(["hell", "he"], max_tokens=8, ignore_eos=True)
            said.append([each.token_ids for each in answers])
    assert said[0] == said[1] and all(said[0])
    with Engine(tmp_path / "packed.gguf", dtype="bfloat16") as engine:
        assert engine.built.spec.weights_held.startswith(
            "Q6_K held as bfloat16, int4 held as bfloat16"
            if library.load() is None
            else "Q6_K held as codes and other matrices as int4 in "
            if holds_blocks(torch.device("cpu"), torch.bfloat16)
            else "int4; Q6_K dequantised to bfloat16"
        )
        assert engine.generate(["hell"], max_tokens=4, ignore_eos=True)[0].token_ids

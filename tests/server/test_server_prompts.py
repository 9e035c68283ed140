"""Tests of the conversion of bodies to prompts, with the included model's processor and without an engine."""

import json

import pytest

from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.serve.prompt.tools import ToolLimits
from mmengine.server.chat.chat_reader import ChatReader, ToolSupport
from mmengine.server.chat.completion_reader import CompletionReader
from mmengine.server.chat.message_media import PixelLimits
from mmengine.server.chat.parsed_request import SamplingDefaults
from mmengine.server.http.errors import ApiError
from tests.pictures import data_url, scene
from tests.serve.serve_fakes import EchoProcessor

DEFAULTS = SamplingDefaults({}, "none")
TOOLS = ToolSupport(EchoProcessor(), ToolLimits(), ("<think>", "</think>"))


@pytest.fixture(scope="module")
def processor():
    found = plugin_for(resolve_folder(None)).load_processor(resolve_folder(None))
    found.max_prompt_tokens = 4000
    return found


@pytest.fixture(scope="module")
def picture():
    return data_url(size=(1024, 1024))


def read(template="", max_pixels=10**6, **fields):
    fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
    reader = ChatReader(DEFAULTS, 4096, template, PixelLimits.of(max_pixels, 2**16), TOOLS, False)
    return reader.read(json.dumps(fields).encode(), "r")


def embeds(processor, part, max_pixels=10**6, **fields):
    message = {"role": "user", "content": [part, {"type": "text", "text": "?"}]}
    (prompt,) = read(max_pixels=max_pixels, messages=[message], **fields).prompts
    return prompt.prepare(processor).media[0].item.num_embeds


def test_pixel_options_are_clamped(processor, picture):
    def part(where, **more):
        return {"type": "image_url", "image_url": {"url": picture, **where}, **more}

    large = embeds(processor, part({}))
    low = embeds(processor, part({"detail": "low"}))
    assert (
        low
        < large
        == embeds(processor, part({"detail": "high"}))
        == embeds(processor, part({"detail": "auto"}))
    )
    few = embeds(processor, part({}, max_pixels=9216))
    assert few < low and few == embeds(processor, part({"max_pixels": 9216}))
    assert few == embeds(processor, part({}), mm_processor_kwargs={"max_pixels": 9216})
    assert few == embeds(processor, part({}, min_pixels=1, max_pixels=2**40), max_pixels=9216)


def test_no_option_asks_for_more_pixels_than_the_server_allows(processor, picture):
    def part(**more):
        return {"type": "image_url", "image_url": {"url": picture}, **more}

    few = embeds(processor, part(max_pixels=9216))
    asked = {"max_pixels": 1e9, "min_pixels": 1e8}
    assert few == embeds(processor, part(**asked), max_pixels=9216)
    assert few == embeds(processor, part(), max_pixels=9216, mm_processor_kwargs=asked)
    assert embeds(processor, part(resized_height=96, resized_width=96), max_pixels=9216) == few
    for asked, said in (
        ({"resized_height": 96, "resized_width": 97}, "exceeds the limit of 9216 pixels"),
        ({"resized_height": 30000.0, "resized_width": 30000}, "exceeds the limit of 9216 pixels"),
        ({"resized_height": 30000}, "set both resized_height"),
        ({"do_resize": False}, "do_resize=false is not supported"),
    ):
        with pytest.raises(ApiError, match=f"^messages.0..content.0..*{said}"):
            embeds(processor, part(**asked), max_pixels=9216)
        with pytest.raises(ApiError, match=f"^mm_processor_kwargs.*{said}"):
            embeds(processor, part(), max_pixels=9216, mm_processor_kwargs=asked)
    kwargs = {"total_pixels": 10**9, "total_min_pixels": 1e9}
    (prompt,) = read(mm_processor_kwargs=kwargs).prompts
    assert prompt.media_options == {"total_pixels": 10**6, "total_min_pixels": 10**6, "local_files": False}


def test_paths_are_refused(processor, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(scene())
    for part in (
        {"type": "image_url", "image_url": {"url": str(file)}},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": str(file.relative_to("/"))},
        {"type": "video", "video": [str(file)] * 4},
    ):
        (prompt,) = read(messages=[{"role": "user", "content": [part]}]).prompts
        with pytest.raises(Exception, match="not allowed here"):
            prompt.prepare(processor)
    with pytest.raises(ApiError, match="mm_processor_kwargs.local_files is not supported"):
        read(mm_processor_kwargs={"local_files": True})


def test_chat_templates_come_from_the_server(processor):
    template = "{% for m in messages %}[{{ m.content }}{{ mood }}]{% endfor %}"
    (prompt,) = read(template, chat_template_kwargs={"mood": "!"}).prompts
    assert prompt.prepare(processor).text == "[hi!]"
    compiled = processor._last_given
    prompt.prepare(processor)
    assert processor._last_given is compiled
    with pytest.raises(ApiError) as found:
        read(chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert found.value.body.param == "chat_template_kwargs.chat_template"


def test_developer_role_and_continued_messages(processor):
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi", "name": None}]
    (prompt,) = read(messages=said).prompts
    assert prompt.messages[0]["role"] == "system" and "name" not in prompt.messages[1]
    said.append({"role": "assistant", "content": "The"})
    (prompt,) = read(messages=said, continue_final_message=True).prompts
    assert prompt.prepare(processor).text.endswith("The")
    with pytest.raises(ApiError, match="exclude each other"):
        read(continue_final_message=True, add_generation_prompt=True)


def test_sampling_is_the_checkpoints_or_openais():
    # Defaults come from the checkpoint's generation_config.json, or are OpenAI's with the setting "none".
    made = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "max_new_tokens": 9}
    assert SamplingDefaults(made, "auto").values == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert SamplingDefaults({**made, "do_sample": False}, "auto").values == {"temperature": 0.0}
    assert SamplingDefaults(made, "none").values == {"temperature": 1.0}
    asked = read()
    assert asked.sampling.temperature == 1.0 and asked.sampling.max_tokens == 4096
    asked = read(max_tokens=5, max_completion_tokens=7, seed=-1, top_k=-1, stop="", logit_bias={"3": 1})
    assert asked.sampling.max_tokens == 7 and asked.sampling.seed == 2**63 - 1
    assert asked.sampling.top_k == 0 and asked.sampling.stop == () and asked.sampling.logit_bias == {3: 1.0}


def test_completion_prompts_have_several_forms():
    reader = CompletionReader(DEFAULTS, EchoProcessor.tokenizer, 4, 10**6, False)

    def prompts(given):
        found = reader.read(json.dumps({"prompt": given}).encode(), "r").prompts
        return [prompt.token_ids if prompt.text is None else prompt.text for prompt in found]

    assert prompts("a") == ["a"] and prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]] and prompts([[1], [2]]) == [[1], [2]]
    for wrong in ([1, "a"], [], ["a"] * 5, {"a": 1}):
        with pytest.raises(ApiError) as found:
            prompts(wrong)
        assert found.value.body.param == "prompt"

"""Tests that a pipeline's results have the same structure as in transformers 5.23
(pipelines/image_text_to_text.py).
"""

from types import SimpleNamespace

import pytest

from mmengine.errors import ConfigError, InvalidMedia, InvalidRequest
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.construction import Construction
from mmengine.serve.pipeline.generation_options import options_from_generation
from mmengine.serve.pipeline.pipeline import Pipeline, pipeline
from tests.serve.serve_fakes import builder


@pytest.fixture
def pipe():
    engine = Engine(builder=builder())
    yield pipeline("image-text-to-text", model=engine, max_new_tokens=40)
    engine.close()


def sampling_of(given, defaults):
    return options_from_generation(given, defaults).sampling


def chat(text):
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


PREFILL = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "well "}]},
]


def test_one_chat_gives_one_list_of_records(pipe):
    expected = [*chat("hi"), {"role": "assistant", "content": "HI"}]
    for result in (pipe(text=chat("hi")), pipe(chat("hi"))):
        assert result == [{"input_text": chat("hi"), "generated_text": expected}]


def test_many_chats_give_a_list_of_such_lists_in_order(pipe):
    chats = [chat(f"hi {k}") for k in range(9)]
    results = pipe(text=chats, return_full_text=False, batch_size=4)
    assert results == [[{"input_text": chats[k], "generated_text": f"HI {k}"}] for k in range(9)]


def test_a_last_assistant_message_is_continued(pipe):
    result = pipe(text=PREFILL)[0]["generated_text"]
    assert result[0] == PREFILL[0] and len(result) == 2
    assert [part["text"] for part in result[1]["content"]] == ["a b", "well A BWELL "]
    assert PREFILL[1]["content"][1]["text"] == "well "
    assert pipe(text=PREFILL, return_full_text=False)[0]["generated_text"] == "A BWELL "
    fresh = pipe(text=PREFILL, continue_final_message=False)[0]["generated_text"]
    assert fresh[2] == {"role": "assistant", "content": "A BWELL "}


def test_images_with_text(pipe):
    assert pipe(images="a.png", text="see ") == [{"input_text": "see ", "generated_text": "see SEE "}]
    assert pipe({"images": "a.png", "text": "see"}) == [{"input_text": "see", "generated_text": "seeSEE"}]
    flat = pipe(images=["a.png", ["b.png", "c.png"]], text=["x", "y"], return_full_text=False)
    assert flat == [{"input_text": "x", "generated_text": "X"}, {"input_text": "y", "generated_text": "Y"}]
    pairs = pipe([{"images": "a.png", "text": "x"}, {"image": "b.png", "text": "y"}], return_full_text=False)
    assert [len(records) for records in pairs] == [1, 1] and pairs[1][0]["generated_text"] == "Y"


def test_text_alone(pipe):
    assert pipe(text="x")[0]["generated_text"] == "xX"
    assert pipe(text=["x", "y"], return_full_text=False) == [
        [{"input_text": "x", "generated_text": "X"}],
        [{"input_text": "y", "generated_text": "Y"}],
    ]


def test_generators_stream(pipe):
    taken = []

    def source():
        for k in range(200):
            taken.append(k)
            yield chat(f"hi {k}")

    results = pipe(source(), return_full_text=False)
    first = next(results)
    assert first[0]["generated_text"] == "HI 0" and len(taken) < 100
    assert [result[0]["generated_text"] for result in results] == [f"HI {k}" for k in range(1, 200)]
    assert [r[0]["generated_text"] for r in pipe(text=iter(["x", "y"]))] == ["xX", "yY"]


def test_tensors_hold_prompt_and_answer(pipe):
    torch = pytest.importorskip("torch")
    record = pipe(text="ab", return_tensors=True)[0]
    assert set(record) == {"input_text", "generated_token_ids"}
    assert torch.equal(record["generated_token_ids"], torch.tensor([*b"abAB", 256]))


def test_several_sequences_and_stop_strings(pipe):
    many = {"num_return_sequences": 3, "do_sample": True}
    records = pipe(text="one two", generate_kwargs=many, return_full_text=False)
    assert [record["generated_text"] for record in records] == ["ONE TWO"] * 3
    stopped = pipe(text="one two", stop_sequence=" T", return_full_text=False)
    assert stopped[0]["generated_text"] == "ONE T"  # transformers keeps the stop string


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"generate_kwargs": {"typo": 1}}, "unknown generation option 'typo'"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"generate_kwargs": {"num_return_sequences": 2}}, "needs do_sample"),
        ({"max_new_tokens": 3, "generate_kwargs": {"max_new_tokens": 3}}, "given twice"),
        ({"return_full_text": True, "return_tensors": True}, "exclude each other"),
        ({"max_new_tokens": 0}, "max_tokens"),
    ],
)
def test_options_that_are_not_supported_are_named(pipe, options, says):
    with pytest.raises(InvalidRequest, match=says):
        pipe(text="x", **options)


def test_prompts_that_are_not_supported_are_refused(pipe):
    for given in ({}, {"images": "a.png"}, {"images": "a", "text": chat("x")}, {"text": 3}):
        with pytest.raises(InvalidRequest):
            pipe(**given)
    with pytest.raises(InvalidRequest, match="2 texts need as many images"):
        pipe(images=["a"], text=["x", "y"])
    with pytest.raises(InvalidMedia):
        pipe(text=[chat("fine"), chat("bad")])


def test_defaults_come_from_the_checkpoint_and_calls_override_them():
    defaults = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [1]}
    sampling = sampling_of({}, defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 0.8, 20, 256)
    greedy = sampling_of({"do_sample": False, "temperature": 0.7}, defaults)
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0.0, 0, 1.0)
    plain = sampling_of({"do_sample": True}, {})
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, 50, 1.0)
    config = {"max_new_tokens": 7, "repetition_penalty": 1.1}
    given = sampling_of({"generation_config": config, "max_new_tokens": 8}, defaults)
    assert (given.max_tokens, given.repetition_penalty) == (8, 1.1)
    ended = sampling_of({"eos_token_id": 5, "stop_strings": "x"}, {})
    assert (ended.ignore_eos, ended.stop_token_ids, ended.stop) == (True, (5,), ("x",))


def test_transformers_makes_one_from_an_engine():
    # `transformers.pipeline` accepts an engine as model, and returns our Pipeline.
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    with Engine(builder=builder()) as engine:
        pipe = transformers.pipeline("image-text-to-text", model=engine, pipeline_class=Pipeline)
        assert isinstance(pipe, Pipeline)
        assert pipe(text=chat("hi"), max_new_tokens=9, return_full_text=False)[0]["generated_text"] == "HI"


def test_other_tasks_and_models_without_a_folder_are_refused():
    with pytest.raises(ConfigError, match="text-generation"):
        pipeline("text-generation")
    with pytest.raises(ConfigError, match="from where it was loaded"):
        pipeline(model=object())


def test_arguments_that_cannot_be_honoured_are_refused_by_name_before_a_model_is_loaded():
    refused = {
        "revision": "v1", "token": "hf_x", "device_map": "balanced", "quantization_config": object(),
        "load_in_4bit": True, "tensor_parallel_size": 2, "attn_implementation": "eager",
        "model_kwargs": {"load_in_8bit": True}, "max_modl_len": 5, "config": {"hidden_size": 2},
    }  # fmt: skip
    for name, value in refused.items():
        wanted = "load_in_8bit" if name == "model_kwargs" else name
        with pytest.raises(ConfigError, match=wanted), Engine(builder=builder()) as engine:
            pipeline(model=engine, **{name: value})
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        pipeline(model_kwargs={"max_modl_len": 5})


@pytest.mark.parametrize(
    ("model", "given", "made"),
    [
        ("a/b", {"revision": "v1"}, ("a/b@v1", {})),
        (
            "a/b",
            {"model_kwargs": {"revision": "v1", "torch_dtype": "float32"}},
            ("a/b@v1", {"dtype": "float32"}),
        ),
        ("a/b@v1", {"revision": "v1"}, ("a/b@v1", {})),
        ("modelscope:a/b", {"revision": "v1"}, ("modelscope:a/b@v1", {})),
        ("a/b", {"device_map": {"": 0}, "trust_remote_code": True}, ("a/b", {"device": "cuda:0"})),
        ("a/b", {"max_model_len": 64, "device": -1}, ("a/b", {"device": "cpu", "max_model_len": 64})),
        (
            SimpleNamespace(name_or_path="a/b", config=SimpleNamespace(_commit_hash="c0ffee")),
            {},
            ("a/b@c0ffee", {}),
        ),
    ],
)
def test_the_model_is_the_one_that_was_named(model, given, made):
    found = Construction.of(model, given)
    assert (found.model, found.engine) == (made[0], {"device": "auto", "dtype": "auto", **made[1]})
    assert not found.defaults


@pytest.mark.parametrize("model", [None, ".", "a/b@v2"])
def test_a_revision_that_cannot_be_loaded_is_refused(model):
    with pytest.raises(ConfigError, match="revision"):
        Construction.of(model, {"revision": "v1"})


def test_what_code_reads_of_a_pipeline_is_there():
    # Code written for transformers reads these attributes of a pipeline.
    shapes = pytest.importorskip("mmengine_shapes")
    with Engine(shapes.checkpoint_path(), builder=builder()) as engine:
        engine.built.folder = shapes.checkpoint_path()
        pipe = pipeline(model=engine)
        assert (
            str(pipe.device) == str(pipe.model.device) == "cpu" and str(pipe.model.dtype) == "torch.float32"
        )
        assert pipe.model.config.model_type and pipe.model.config.text_config.hidden_size
        assert pipe.processor and pipe.tokenizer and pipe.model.name_or_path == str(engine.built.folder)

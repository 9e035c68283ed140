"""Compares the pipeline's results with transformers' postprocessing of the same tokens."""

from types import SimpleNamespace

import pytest

from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.pipeline import Pipeline
from tests.serve.serve_fakes import ByteTokenizer, builder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def part(text):
    return {"type": "text", "text": text}


CHAT = [{"role": "user", "content": [{"type": "image"}, part("see it")]}]
PREFILL = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": [part("see ")]},
]


def theirs(shown, rows, **options):
    """Return transformers' records for the input `shown`. `rows`: for each answer, the prompt's tokens and
    the answer's tokens.
    """
    from transformers.pipelines.image_text_to_text import ImageTextToTextPipeline, ReturnType
    from transformers.utils.chat_template_utils import Chat

    pipe = object.__new__(ImageTextToTextPipeline)

    def decode(ids, skip_special_tokens=True):
        return [ByteTokenizer().decode(row, skip_special_tokens=skip_special_tokens) for row in ids.tolist()]

    pipe.processor = SimpleNamespace(post_process_image_text_to_text=decode)
    pipe.tokenizer = SimpleNamespace()
    kind = {True: ReturnType.FULL_TEXT, False: ReturnType.NEW_TEXT, None: ReturnType.TENSORS}
    prompt = "see it" if shown is not PREFILL else "see "
    if isinstance(shown, str):
        prompt = shown
    return pipe.postprocess(
        {
            "prompt_text": shown if isinstance(shown, str) else Chat(shown),
            "generated_sequence": torch.tensor(rows),
            "input_ids": torch.tensor([list(prompt.encode())]),
        },
        return_type=kind[options["full_text"]],
    )


@pytest.mark.parametrize("full_text", [True, False, None])
@pytest.mark.parametrize("shown", [CHAT, PREFILL, "see this "])
@pytest.mark.parametrize("count", [1, 3])
def test_records_equal_transformers(shown, full_text, count):
    how = {"return_tensors": True} if full_text is None else {"return_full_text": full_text}
    many = {"generate_kwargs": {"num_return_sequences": count, "do_sample": True}} if count > 1 else {}
    with Engine(builder=builder()) as engine:
        pipe = Pipeline(model=engine)
        ours = pipe(text=shown, **how, **many)
        rows = [r["generated_token_ids"].tolist() for r in pipe(text=shown, return_tensors=True, **many)]
    expected = theirs(shown, rows, full_text=full_text)
    assert len(ours) == count and len(expected) in (count, 1)  # older versions return only the first
    for mine, other in zip(ours, expected, strict=len(expected) == count):
        # With return_tensors, transformers returns an internal Chat object that wraps the messages.
        given = getattr(other["input_text"], "messages", other["input_text"])
        assert list(mine) == list(other) and mine["input_text"] == given
        if full_text is None:
            assert torch.equal(mine["generated_token_ids"], other["generated_token_ids"])
        else:
            assert mine["generated_text"] == other["generated_text"]


def test_transformers_makes_one_from_a_folder():
    shapes = pytest.importorskip("mmengine_shapes")
    folder = str(shapes.checkpoint_path())
    pipe = transformers.pipeline("image-text-to-text", model=folder, pipeline_class=Pipeline, device="cpu")
    chat = [{"role": "user", "content": [part("Hello")]}]
    records = pipe(text=chat, max_new_tokens=4)
    assert records[0]["generated_text"][0] == chat[0] and records[0]["generated_text"][1]["content"]
    assert str(pipe.engine.built.folder) == folder
    pipe.close()

"""Tests that the thread that reads a stream decodes the output texts, and that the texts equal Engine's."""

import asyncio
import threading

import numpy as np

from mmengine.request import SamplingParams
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.request_output import Choice, Completion, RequestOutput
from tests.serve.serve_fakes import ByteTokenizer, EchoProcessor, builder


def test_streams_give_the_texts_of_an_engine_that_makes_its_own():
    # AsyncEngine's streams have the same texts as Engine's outputs.
    asks = [
        ("größe und mehr", {"n": 2}),
        ("eins zwei drei", {"stop": " DR"}),
        ("a\u20acb" * 9, {"min_tokens": 4}),
    ]

    def alone(prompt, options):
        with Engine(builder=builder()) as engine:
            engine.submit(prompt, max_tokens=40, **options)
            outputs = [output for _ in range(100) if engine.has_work for output in engine.step()]
        return _read(outputs)

    async def streamed(prompt, options):
        async with AsyncEngine(builder=builder()) as engine:
            return _read([output async for output in engine.stream(prompt, max_tokens=40, **options)])

    for prompt, options in asks:
        assert asyncio.run(streamed(prompt, options)) == alone(prompt, options)


def _read(outputs):
    texts = {}
    for output in outputs:
        texts[output.index] = texts.get(output.index, "") + output.text
    whole = [output.completion for output in outputs if output.completion is not None]
    return texts, [[choice.text for choice in completion.choices] for completion in whole]


def test_the_engine_thread_decodes_nothing():
    threads = set()

    class Watched(ByteTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=True):
            threads.add(threading.current_thread().name)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    processor = EchoProcessor()
    processor.tokenizer = Watched()

    async def main():
        async with AsyncEngine(builder=builder(processor=processor)) as engine:
            async with engine.stream("some text", max_tokens=20) as stream:
                async for _ in stream:
                    pass
            return stream.completion.text, (await engine.generate("more", max_tokens=20)).text

    assert asyncio.run(main()) == ("SOME TEXT", "MORE")
    # The mmengine-text threads prepare prompts. They may decode a prompt to check for open reasoning.
    others = {name for name in threads if not name.startswith("mmengine-text")}
    assert others == {threading.main_thread().name}


def test_without_pieces_only_the_whole_answer_has_a_text():
    texts = OutputText(ByteTokenizer(), SamplingParams())
    texts.pieces = False
    tokens = ByteTokenizer().encode("abc")
    assert texts.fill(RequestOutput("r", 0, "", list(tokens))).text == ""
    completion = Completion("r", np.zeros(1, np.int32), [Choice(0, "", list(tokens), "length")])
    last = texts.fill(RequestOutput("r", 0, "", [], "length", completion))
    assert (last.text, last.completion.text) == ("", "abc")

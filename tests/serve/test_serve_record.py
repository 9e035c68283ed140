"""Tests AnswerRecord: a single reader takes outputs from the stream. When a second reader joins, both read
the record.
"""

import asyncio
from functools import partial

import numpy as np
import pytest

from mmengine.errors import RequestFailed
from mmengine.request import SamplingParams
from mmengine.serve.prompt.options import Options
from mmengine.serve.stream.answer_record import AnswerRecord, DirectReader, RecordReader
from mmengine.serve.stream.channel import Channel
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import Choice, Completion, RequestOutput

NUM_TOKENS = 6


class Bench:
    """A stream that the test fills, and its record. `only` is the first reader."""

    def __init__(self):
        self.channel = Channel(Options(SamplingParams(max_tokens=NUM_TOKENS), "a"), None)
        self.stream = Stream(self.channel, lambda channel: None, lambda answers: None)
        self.ends, self.has_left = 0, False
        self.record = AnswerRecord(self.stream, self._ended)
        self.only = DirectReader(self.record, self.stream, self._left)
        self.heard = []
        self.only.listen(lambda: self.heard.append(self.only))

    def _ended(self):
        self.ends += 1

    def _left(self):
        self.has_left = True

    def say(self, token):
        is_last = token == NUM_TOKENS - 1
        choice = Choice(0, "", list(range(NUM_TOKENS)), "length")
        completion = Completion("a", np.zeros(1, np.int32), [choice]) if is_last else None
        self.channel.put(RequestOutput("a", 0, "", [token], "length" if is_last else None, completion))
        self.channel.wake()

    def fail(self):
        self.channel.end(RequestFailed("over"))


def tokens_of(reader, found):
    found += [token for output in reader.take() for token in output.token_ids]
    return found


async def case(joins_at, takes, leaves_at):
    """Let a second reader join before the token `joins_at`. The first reader takes outputs after each token
    in `takes`, and leaves before the token `leaves_at`.
    """
    bench, first, second, other = Bench(), [], None, []
    for token in range(NUM_TOKENS):
        if token == leaves_at:
            bench.only.leave()
        if token == joins_at:
            bench.record.follow()
            second = RecordReader(bench.record)
            second.listen(partial(bench.heard.append, second))
        bench.say(token)
        if token in takes and (leaves_at is None or token < leaves_at):
            tokens_of(bench.only, first)
    assert bench.has_left == (leaves_at is not None)
    if leaves_at is None:
        tokens_of(bench.only, first)
        assert first == list(range(NUM_TOKENS)) and bench.only.is_over
        assert bench.only.completion is not None and bench.only in bench.heard
    if second is not None:
        assert tokens_of(second, other) == list(range(NUM_TOKENS)) and second.is_over
        assert second in bench.heard
    assert bench.record.is_over and bench.ends == 1 and bench.record.is_good
    assert bench.channel.listener is None and bench.record.first is None, "a cycle would keep it in memory"
    late = RecordReader(bench.record)
    assert tokens_of(late, []) == list(range(NUM_TOKENS)) and late.is_over


@pytest.mark.parametrize("joins_at", [None, *range(NUM_TOKENS)])
@pytest.mark.parametrize("takes", [(), (0, 1), (2, 5), range(NUM_TOKENS)])
@pytest.mark.parametrize("leaves_at", [None, 0, 3])
def test_each_reader_has_all_of_it_once(joins_at, takes, leaves_at):
    asyncio.run(case(joins_at, takes, leaves_at))


@pytest.mark.parametrize("is_followed", [False, True])
def test_an_error_ends_it_for_all(is_followed):
    async def run():
        bench = Bench()
        bench.say(0)
        if is_followed:
            bench.record.follow()
        bench.fail()
        assert bench.only.backlog
        found = tokens_of(bench.only, [])
        with pytest.raises(RequestFailed):
            while True:
                tokens_of(bench.only, found)
        assert found == [0] and bench.only.is_over and bench.ends == 1
        late = RecordReader(bench.record)
        assert tokens_of(late, []) == [0]
        with pytest.raises(RequestFailed):
            late.take()

    asyncio.run(run())

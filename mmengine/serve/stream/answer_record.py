"""Records a request's outputs so that several readers can each read the answer from its first token."""

from collections.abc import Callable
from typing import Protocol

from mmengine.errors import MMEngineError
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.stream.one_shot_event import OneShotEvent
from mmengine.serve.stream.request_stream import TAKEN_AT_ONCE, ChannelReader, Stream
from mmengine.serve.stream.stored_answer import StoredAnswer, StoredChoice, outputs_of_stored
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Completion, RequestOutput


class AnswerSource(Protocol):
    """An object from which a request's outputs are read: a Stream, or an AnswerRecord's reader.

    The class Stream documents the members.
    """

    is_over: bool
    completion: Completion | None

    def listen(self, listener: Callable[[], None] | None) -> None: ...

    def take(self) -> list[RequestOutput]: ...

    @property
    def backlog(self) -> int: ...

    @property
    def reasoning(self) -> ReasoningTokens: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def grammar(self) -> GrammarRequest | None: ...

    @property
    def num_embeds(self) -> dict[str, int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def is_accepted(self) -> bool: ...

    def leave(self) -> None: ...

    def cancel(self) -> None: ...

    async def accepted(self) -> None: ...


class AnswerRecord:
    """Records all outputs from a stream, or has a stored answer's outputs.

    `ended` is called after the stream's last output. Only the stream's event loop may use a record. Usually a
    stream has a single reader. This reader takes the outputs from the stream and adds them to the record.
    With more readers, or after this reader has left, the record itself reads the stream.
    """

    def __init__(self, source: "Stream | StoredAnswer", ended: Callable[[], None] | None = None):
        self.items: list[RequestOutput] = []
        self.error: MMEngineError | None = None
        self.is_over = False
        self.first: DirectReader | None = None  # the single reader that reads the stream directly
        self._ended, self._over = ended, OneShotEvent()
        self._listeners: dict[RecordReader, Callable[[], None]] = {}
        self.source = source
        if not isinstance(source, Stream):
            self.items, self.is_over = outputs_of_stored(source), True

    async def wait_over(self) -> None:
        """Wait for the answer's end."""
        if not self.is_over:
            await self._over.wait()

    def follow(self) -> None:
        """Make the record itself read the stream from now on. All readers then read from the record."""
        stream, first = self.source, self.first
        if self.is_over or not isinstance(stream, Stream):
            return
        if first is not None:
            self.first = None
            first.follow()
        stream.listen(self._take)
        if stream.backlog:
            self._take()

    def _take(self) -> None:
        stream = self.source
        assert isinstance(stream, Stream)
        if self.is_over:
            return
        error: MMEngineError | None = None
        try:
            self.items += stream.take()
            while not stream.is_over and stream.backlog:
                self.items += stream.take()
        except MMEngineError as found:
            error = found
        if stream.is_over:
            self.error, self.is_over = error, True
        for listener in list(self._listeners.values()):
            listener()
        if self.is_over:
            self.end(error)

    def end(self, error: MMEngineError | None) -> None:
        """Mark the record as ended, with `error` if the request failed."""
        self.error, self.is_over, self.first = error, True, None
        assert isinstance(self.source, Stream)
        self.source.listen(None)  # breaks a reference cycle that would keep the stream in memory
        ended, self._ended = self._ended, None
        self._over.set()
        if ended is not None:
            ended()

    def listen(self, reader: "RecordReader", listener: Callable[[], None] | None) -> None:
        if listener is None:
            self._listeners.pop(reader, None)
        else:
            self._listeners[reader] = listener

    @property
    def is_accepted(self) -> bool:
        """Whether the log has the request."""
        return not isinstance(self.source, Stream) or self.source.is_accepted

    @property
    def is_good(self) -> bool:
        """Whether the log has the request and the request has not failed."""
        return self.error is None and self.is_accepted

    @property
    def num_tokens(self) -> int:
        """The answer's token count. While the request runs, the number of outputs serves as an estimate."""
        completion = self.completion
        return len(self.items) if completion is None else sum(len(c.token_ids) for c in completion.choices)

    @property
    def completion(self) -> Completion | None:
        """The completion if the answer has ended without an error, else None."""
        return self.items[-1].completion if self.items else None

    def stored_answer(self) -> StoredAnswer:
        """Return the stream's complete answer in the store's format."""
        stream, completion = self.source, self.completion
        assert isinstance(stream, Stream) and completion is not None
        choices = [
            StoredChoice(
                choice.index,
                choice.token_ids,
                choice.finish_reason,
                logprobs=choice.logprobs,
                confidences=choice.confidences,
            )
            for choice in completion.choices
        ]
        for item in self.items:
            if item.detail and item.finish_reason is not None:
                choices[item.index].detail, choices[item.index].code = item.detail, item.code
        order = b""
        if len(choices) > 1:
            places = {choice.index: place for place, choice in enumerate(choices)}
            order = b"".join(bytes([places[item.index]]) * len(item.token_ids) for item in self.items)
        return StoredAnswer(
            *stream.accepted_request,
            choices,
            completion.num_cached_tokens,
            completion.num_drafts,
            completion.num_accepted,
            order,
        )


class DirectReader(ChannelReader):
    """A stream's single reader, which adds the stream's outputs to the record.

    `on_leave` is called when the reader leaves or cancels. The request continues in any case.
    """

    def __init__(self, record: AnswerRecord, stream: Stream, on_leave: Callable[[], None]):
        super().__init__(stream._channel)
        self._record, self._on_leave = record, on_leave
        self._follower: RecordReader | None = None  # reads from the record once the record has other readers
        record.first = self

    def follow(self) -> None:
        """From now on, read from the record and not from the stream."""
        if not self.is_over:
            self._follower = RecordReader(self._record, at=len(self._record.items))
            self._follower.listen(self._channel.listener)

    def listen(self, listener: Callable[[], None] | None) -> None:
        if self._follower is None:
            self._channel.listener = listener
        else:
            self._follower.listen(listener)

    def take(self) -> list[RequestOutput]:
        if self._follower is not None:
            return self._take_of_record(self._follower)
        try:
            found = super().take()
        except MMEngineError as error:
            self._record.end(error)
            raise
        self._record.items += found
        if self.is_over:
            self._record.end(None)
        return found

    def _take_of_record(self, follower: "RecordReader") -> list[RequestOutput]:
        try:
            return follower.take()
        finally:
            self.is_over, self.completion = follower.is_over, follower.completion

    @property
    def backlog(self) -> int:
        return len(self._channel.items) if self._follower is None else self._follower.backlog

    def leave(self) -> None:
        """Stop reading. A second call is no error."""
        self.listen(None)
        self._record.follow()
        if self._follower is not None:
            self._follower.listen(None)
        on_leave, self._on_leave = self._on_leave, _nothing
        on_leave()

    def cancel(self) -> None:
        self.leave()


class RecordReader:
    """Reads a record's outputs, beginning after the first `at` outputs.

    `on_leave` is called when the reader leaves or cancels.
    """

    def __init__(self, record: AnswerRecord, on_leave: Callable[[], None] | None = None, at: int = 0):
        self._record, self._on_leave, self._at = record, on_leave or _nothing, at
        self._source = record.source
        self.is_over = False
        self.completion: Completion | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        self._record.listen(self, listener)

    def take(self) -> list[RequestOutput]:
        record = self._record
        found: list[RequestOutput] = []
        num_tokens = 0
        for item in record.items[self._at : self._at + TAKEN_AT_ONCE]:
            found.append(item)
            num_tokens += len(item.token_ids)
            if num_tokens >= TAKEN_AT_ONCE:
                break
        self._at += len(found)
        if self.is_over or self._at < len(record.items) or not record.is_over:
            return found
        self.completion = record.completion
        if record.error is None:
            self.is_over = True
        elif not found:
            self.is_over = True
            raise record.error
        return found

    @property
    def backlog(self) -> int:
        """The unread output count, plus one for a final error.

        The error counts because otherwise no reader would call `take`, which raises the error.
        """
        ends = self._record.error is not None and not self.is_over
        return len(self._record.items) - self._at + ends

    @property
    def reasoning(self) -> ReasoningTokens:
        return self._source.reasoning

    @property
    def sampling(self) -> SamplingParams:
        return self._source.sampling

    @property
    def grammar(self) -> GrammarRequest | None:
        return self._source.grammar

    @property
    def num_embeds(self) -> dict[str, int]:
        return self._source.num_embeds

    @property
    def num_prompt_tokens(self) -> int:
        return self._source.num_prompt_tokens

    @property
    def is_accepted(self) -> bool:
        return self._record.is_accepted

    async def accepted(self) -> None:
        if isinstance(self._source, Stream):
            await self._source.accepted()

    def leave(self) -> None:
        """Stop reading. A second call is no error."""
        self._record.listen(self, None)
        on_leave, self._on_leave = self._on_leave, _nothing
        on_leave()

    def cancel(self) -> None:
        self.leave()


def _nothing() -> None:
    pass

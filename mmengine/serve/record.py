"""The answer to one request, kept for readers that come and go: each has it from the first token on."""

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from mmengine.errors import MMEngineError
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.answers import Choice, Completion, Logprobs, RequestOutput, in_pieces
from mmengine.serve.once import Once
from mmengine.serve.reasoning import ReasoningTokens
from mmengine.serve.stream import TAKEN_AT_ONCE, Stream


class News(Protocol):
    """What comes of one request: a Stream, or a Reader of its record. What its parts say, Stream tells."""

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


class Said(msgspec.Struct, array_like=True):
    """Outputs of one choice, without their texts."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    detail: str = ""
    logprobs: Logprobs | None = None


class Whole(msgspec.Struct, array_like=True, frozen=True):
    """An answer that ended, as a store keeps it. Fields are only ever added, with a default."""

    request_id: str
    sampling: SamplingParams
    reasoning: ReasoningTokens
    grammar: GrammarRequest | None
    num_embeds: dict[str, int]
    num_prompt_tokens: int
    said: list[Said]
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


class Record:
    """Of a stream, which it reads to its end once it is begun, or of an answer that is whole. It belongs to
    an event loop, as the stream does."""

    def __init__(self, source: "Stream | Whole"):
        self.items: list[RequestOutput] = []
        self.error: MMEngineError | None = None
        self.is_over = False
        self._ended: Callable[[], None] | None = None
        self._over = Once()
        self._listeners: dict[Reader, Callable[[], None]] = {}
        self.source = source
        if not isinstance(source, Stream):
            self.items, self.is_over = _outputs(source), True

    async def over(self) -> None:
        """Wait for its end."""
        if not self.is_over:
            await self._over.wait()

    def begin(self, ended: Callable[[], None]) -> None:
        """Read the stream. `ended`: called when the last of it has come."""
        assert isinstance(self.source, Stream)
        self._ended = ended
        self.source.listen(self._take)
        if self.source.backlog:
            self._take()

    def _take(self) -> None:
        stream = self.source
        assert isinstance(stream, Stream)
        if self.is_over:
            return
        try:
            self.items += stream.take()
            while not stream.is_over and stream.backlog:
                self.items += stream.take()
        except MMEngineError as error:
            self.error = error
        self.is_over = stream.is_over
        for listener in list(self._listeners.values()):
            listener()
        if self.is_over:
            stream.listen(None)  # so that no cycle of references keeps it in memory
            ended, self._ended = self._ended, None
            self._over.set()
            if ended is not None:
                ended()

    def listen(self, reader: "Reader", listener: Callable[[], None] | None) -> None:
        if listener is None:
            self._listeners.pop(reader, None)
        else:
            self._listeners[reader] = listener

    @property
    def is_accepted(self) -> bool:
        """Whether it is in the log."""
        return not isinstance(self.source, Stream) or self.source.is_accepted

    @property
    def is_good(self) -> bool:
        """Whether it is in the log, and did not fail."""
        return self.error is None and self.is_accepted

    @property
    def num_tokens(self) -> int:
        """Of what has come; of one that runs about so many."""
        completion = self.completion
        return len(self.items) if completion is None else sum(len(c.token_ids) for c in completion.choices)

    @property
    def completion(self) -> Completion | None:
        """Of an answer that ended without an error."""
        return self.items[-1].completion if self.items else None

    def whole(self) -> Whole:
        """Of a stream that is over, with an answer."""
        stream, completion = self.source, self.completion
        assert isinstance(stream, Stream) and completion is not None
        details = {item.index: item.detail for item in self.items if item.finish_reason is not None}
        return Whole(
            stream.request_id,
            stream.sampling,
            stream.reasoning,
            stream.grammar,
            stream.num_embeds,
            stream.num_prompt_tokens,
            [
                Said(
                    choice.index,
                    choice.token_ids,
                    choice.finish_reason,
                    details.get(choice.index, ""),
                    choice.logprobs,
                )
                for choice in completion.choices
            ],
            completion.num_cached_tokens,
            completion.num_drafts,
            completion.num_accepted,
        )


class Reader:
    """Reads a record from its first output on. `left`: called when it leaves or gives the request up."""

    def __init__(self, record: Record, left: Callable[[], None] | None = None):
        self._record, self._left = record, left or _nothing
        self._source = record.source
        self._at = 0
        self.is_over = False
        self.completion: Completion | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        self._record.listen(self, listener)

    def take(self) -> list[RequestOutput]:
        found: list[RequestOutput] = []
        num_tokens = 0
        for item in self._record.items[self._at : self._at + TAKEN_AT_ONCE]:
            found.append(item)
            num_tokens += len(item.token_ids)
            if num_tokens >= TAKEN_AT_ONCE:
                break
        self._at += len(found)
        if self.is_over or self._at < len(self._record.items) or not self._record.is_over:
            return found
        self.completion = self._record.completion
        if self._record.error is None:
            self.is_over = True
        elif not found:
            self.is_over = True
            raise self._record.error
        return found

    @property
    def backlog(self) -> int:
        """An error at the end counts, as a stream counts it: else nobody would take it."""
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
        """Twice is no error."""
        self._record.listen(self, None)
        left, self._left = self._left, _nothing
        left()

    def cancel(self) -> None:
        self.leave()


def _nothing() -> None:
    pass


def _outputs(whole: Whole) -> list[RequestOutput]:
    """The last of them with a completion."""
    choices = [
        Choice(said.index, "", said.token_ids, said.finish_reason or "", said.detail, said.logprobs)
        for said in whole.said
    ]
    completion = Completion(
        whole.request_id,
        np.zeros(whole.num_prompt_tokens, np.int32),
        choices,
        whole.num_cached_tokens,
        whole.num_drafts,
        whole.num_accepted,
    )
    outputs = [
        RequestOutput(
            whole.request_id,
            said.index,
            "",
            said.token_ids,
            said.finish_reason,
            logprobs=said.logprobs,
            detail=said.detail,
        )
        for said in whole.said
    ]
    outputs[-1] = msgspec.structs.replace(outputs[-1], completion=completion)
    return [piece for output in outputs for piece in in_pieces(output)]

"""Answers of a conversation while they are written."""

from collections import deque
from collections.abc import Generator

from mmengine.errors import RequestFailed
from mmengine.serve.chat.chunks import ChatChunk
from mmengine.serve.chat.completion import ChatAnswer, ChatAsked, ChatCompletion
from mmengine.serve.stream.request_stream import Stream

_CLOSED = "the stream was closed before its answer was whole"


class ChatStream:
    """An iterator of ChatChunk, for which the engine steps. Leaving `with`, `close`, or dropping it cancels
    what is not finished. Its first chunk is where it raises what `chat` raises."""

    def __init__(self, chunks: Generator[ChatChunk, None, ChatCompletion]):
        self._chunks = chunks
        self._completion: ChatCompletion | None = None

    def __iter__(self) -> "ChatStream":
        return self

    def __next__(self) -> ChatChunk:
        try:
            return next(self._chunks)
        except StopIteration as end:
            self._completion = self._completion or end.value
            raise

    def get_final_completion(self) -> ChatCompletion:
        """What `chat` gives; waits for what has not come. Raises RequestFailed when it was closed before."""
        for _ in self:
            pass
        return _whole(self._completion)

    def close(self) -> None:
        """Cancel the request if it still runs; nothing more comes."""
        self._chunks.close()

    def __enter__(self) -> "ChatStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncChatStream:
    """As ChatStream, beside whatever else runs."""

    def __init__(self, chat: ChatAsked, stream: Stream):
        self._chat, self._stream = chat, stream
        self._answer: ChatAnswer | None = None  # once the request is accepted
        self._come: deque[ChatChunk] = deque()
        self._completion: ChatCompletion | None = None

    def __aiter__(self) -> "AsyncChatStream":
        return self

    async def __anext__(self) -> ChatChunk:
        while not self._come:
            await self._fetch()
        return self._come.popleft()

    async def _fetch(self) -> None:
        """Wait for news."""
        stream, answer = self._stream, self._answer
        if answer is None:
            if stream.is_over:  # closed before its first chunk
                raise StopAsyncIteration
            await stream.accepted()
            self._answer = self._chat.begin(
                stream.request_id, stream.sampling, stream.reasoning, stream.grammar
            )
            self._come += self._answer.first()
            return
        outputs = await stream.news()
        for output in outputs:
            self._come += answer.take(output)
        if outputs:
            return
        if stream.completion is not None:
            self._completion = answer.completion(stream.completion)
        raise StopAsyncIteration

    async def get_final_completion(self) -> ChatCompletion:
        """What `chat` gives; waits for what has not come. Raises RequestFailed when it was closed before."""
        async for _ in self:
            pass
        return _whole(self._completion)

    async def aclose(self) -> None:
        """Cancel the request if it still runs; nothing more comes."""
        self._come.clear()
        await self._stream.aclose()

    async def __aenter__(self) -> "AsyncChatStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _whole(completion: ChatCompletion | None) -> ChatCompletion:
    if completion is None:
        raise RequestFailed(_CLOSED)
    return completion

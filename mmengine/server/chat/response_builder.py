"""One call on its way: from the engine's news to frames of a stream, or to the whole answer."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from mmengine.core.executor import PromptLogprobs
from mmengine.models.plugin import Tokenizer
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.stream.answer_record import AnswerSource
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import Completion, RequestOutput
from mmengine.server.chat.chat_frames import Frames, Usage
from mmengine.server.chat.parsed_request import Asked
from mmengine.server.chat.prompt_stream import Said, Turn, given_up
from mmengine.server.http.errors import ApiError
from mmengine.structured_output.request.tool_calls import calls_of

NEWS_AT_ONCE = 128  # that are told before the event loop looks at its sockets again


class Answering:
    """A call. `open` it first; then `take` gives frames, or `whole` the answer. `close` it in any case.
    `sources`: where its answers come from, one for each prompt."""

    def __init__(self, asked: Asked, frames: Frames, sources: Sequence[AnswerSource], tokenizer: Tokenizer):
        self.asked, self._frames = asked, frames
        num_choices = asked.sampling.n
        self._turns = [
            Turn(source, asked, tokenizer, number * num_choices) for number, source in enumerate(sources)
        ]
        self._news: deque[tuple[Turn, RequestOutput]] = deque()  # that came, and that no frame told of
        self._arrived = asyncio.Event()
        self._listener: Callable[[], None] | None = None
        self._aside: asyncio.Future[Sequence[Said | bytes]] | None = None  # by a thread; news wait

    async def open(self) -> None:
        """Wait until all prompts are in the log. Raises what the engine does."""
        for turn in self._turns:
            await turn.stream.accepted()
            turn.begin()
            self._frames.tails.set_prompt(turn.indices, turn.stream.num_prompt_tokens)
        self.listen(self._arrived.set)

    async def first_news(self, patience_s: float) -> None:
        """Wait so long for them, so that what fails before them has a status of its own. Raises what the
        engine does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not self._news and not self._is_over:
                    await self._wait()
                    for turn in self._turns:
                        self._fetch(turn)
        for _, output in self._news:
            if output.finish_reason not in (None, "stop", "length"):
                raise given_up(self.asked, output)

    def listen(self, listener: Callable[[], None] | None) -> None:
        self._listener = listener
        for turn in self._turns:
            turn.stream.listen(listener)

    async def _wait(self) -> None:
        """Until something has come. The listener must be the event."""
        if self.has_more:
            await asyncio.sleep(0)
        elif not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()

    def _fetch(self, turn: Turn) -> None:
        """What has come for it, into `_news`. Raises what a prompt ends with that came to nothing."""
        for output in turn.stream.take():
            self._news.append((turn, output))

    def _outputs(self) -> Iterator[tuple[Turn, RequestOutput]]:
        """What has come, or so much of it as takes no time. Raises as `_fetch`, behind what was said."""
        while self._news:
            yield self._news.popleft()
        count = 0
        for turn in self._turns:
            if turn.stream.backlog and count < NEWS_AT_ONCE:
                self._fetch(turn)
                count += len(self._news)
                while self._news:
                    yield self._news.popleft()

    def _tell(self) -> Iterator[Said | bytes]:
        """What it says that has come, and of a stream the frames of prompts with logprobs: up to what takes
        long, which a thread makes. Whoever listens is called when that is done."""
        if self._aside is not None:
            if not self._aside.done():
                return
            made, self._aside = self._aside.result(), None
            yield from made
        for turn, output in self._outputs():
            if output.prompt_scores is not None and self.asked.stream:
                self._news.appendleft((turn, msgspec.structs.replace(output, prompt_scores=None)))
                self._make_aside(partial(self._echoed, turn, output.prompt_scores))
                return
            for delta in turn.push(output):
                yield Said(turn.first + output.index, delta)
            if output.finish_reason is None:
                continue
            if (look := turn.look(output)) is not None:
                self._make_aside(look)
                return
            yield turn.end(output)

    def _make_aside(self, make: Callable[[], Sequence[Said | bytes]]) -> None:
        self._aside = asyncio.get_running_loop().run_in_executor(None, make)
        self._aside.add_done_callback(self._made)

    def _made(self, done: asyncio.Future[Sequence[Said | bytes]]) -> None:
        if self._listener is not None:
            self._listener()

    def _echoed(self, turn: Turn, scores: PromptLogprobs) -> list[bytes]:
        return [self._frames.first(index, scores) for index in turn.indices]

    @property
    def _is_over(self) -> bool:
        """Whether nothing comes any more, and all was told."""
        first = self._turns[0]  # a step asks this of each stream, and most calls have one prompt
        if not first.stream.is_over or self._aside is not None:
            return False
        return all(turn.stream.is_over for turn in self._turns)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of the tools whose calls are held to less than their schemas say. Known when it is open."""
        calls = calls_of(self._turns[0].stream.grammar)
        return () if calls is None else calls.unenforced

    def first(self) -> bytes:
        """The frames before all news."""
        if self.asked.sampling.prompt_logprobs is not None:
            return b""  # they echo prompts with logprobs, which have to come
        return b"".join(self._frames.first(index) for index in range(self._num_choices))

    @property
    def _num_choices(self) -> int:
        return len(self._turns) * self.asked.sampling.n

    def take(self, told: Callable[[Exception], ApiError]) -> tuple[bytes, str]:
        """Frames of what has come; at the end "whole", or "error": the last one tells of it, as `told`
        says."""
        made: list[bytes] = []
        try:
            waits = self._aside is not None or len(self._turns) > 1
            if not waits and not self._news:
                self._take_plain(self._turns[0], made)
            for said in self._tell() if waits or self._news else ():
                if isinstance(said, bytes):
                    made.append(said)
                elif said.reason is None:
                    made.append(self._frames.delta(said.number, said.delta))
                else:
                    made.append(self._frames.finish(said.number, said.delta, said.reason, said.stop_reason))
            if not self._is_over:
                return b"".join(made), ""
            if self.asked.usage_frames != "none":
                made.append(self._frames.usage(self._usage()))
        except Exception as error:
            made.append(self.broken_off(told(error)))
            return b"".join(made), "error"
        made.append(self._frames.done)
        return b"".join(made), "whole"

    def broken_off(self, error: ApiError) -> bytes:
        """The last frames of a stream that ends before its answer."""
        return self._frames.error(error) + self._frames.done

    def _take_plain(self, turn: Turn, made: list[bytes]) -> None:
        """What most steps bring, by fewer steps than `_tell` takes: frames of news without an end. What is
        behind them goes to `_news`."""
        outputs = turn.stream.take()
        for place, output in enumerate(outputs):
            if output.finish_reason is not None or output.prompt_scores is not None:
                self._news.extend([(turn, each) for each in outputs[place:]])
                break
            for delta in turn.push(output):
                made.append(self._frames.delta(turn.first + output.index, delta))

    async def whole(self) -> bytes:
        """The body of an answer that is no stream."""
        choices = [AccumulatedChoice(index) for index in range(self._num_choices)]
        while True:
            for said in self._tell():
                if isinstance(said, Said):  # the others are of streams
                    choices[said.number].add(said.delta, said.reason, said.stop_reason)
            if self._is_over:
                for turn in self._turns:
                    for index in turn.indices:
                        choices[index].scores = turn.prompt_scores
                if self.asked.logprobs:  # of many tokens they take their time
                    return await asyncio.to_thread(self._frames.whole, choices, self._usage())
                return self._frames.whole(choices, self._usage())
            await self._wait()

    def _usage(self) -> Usage:
        found = [turn.usage() for turn in self._turns]
        answers = self.completions
        prompt = sum(len(answer.prompt_token_ids) for answer in answers)
        completion, reasoning, cached = (sum(each) for each in zip(*found, strict=True))
        drafts = sum(answer.num_drafts for answer in answers)
        accepted = sum(answer.num_accepted for answer in answers)
        details: dict[str, int] = {"cached_tokens": cached}
        for turn in self._turns:
            for kind, count in turn.stream.num_embeds.items():
                details[f"{kind}_tokens"] = details.get(f"{kind}_tokens", 0) + count
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": {
                "reasoning_tokens": reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafts - accepted,
            },
        }

    @property
    def completions(self) -> list[Completion]:
        """Of the prompts that are answered."""
        return [found for turn in self._turns if (found := turn.stream.completion) is not None]

    @property
    def is_held(self) -> bool:
        """Whether its answer is kept for others, or for later."""
        return not any(isinstance(turn.stream, Stream) for turn in self._turns)

    @property
    def is_accepted(self) -> bool:
        """Whether the log, if there is one, has all of it."""
        return bool(self._turns) and all(turn.stream.is_accepted for turn in self._turns)

    @property
    def backlog(self) -> int:
        return sum(turn.stream.backlog for turn in self._turns)

    @property
    def has_more(self) -> bool:
        """Whether `take` would tell more now."""
        if self._aside is not None:
            return False
        return bool(self._turns[0].stream.backlog) or (len(self._turns) > 1 and bool(self.backlog))

    def close(self) -> None:
        """Cancel what still runs. Closing twice is no error."""
        for turn in self._turns:
            turn.stream.cancel()

    def leave(self) -> None:
        """Nobody listens any more, and what still runs goes on."""
        for turn in self._turns:
            turn.stream.leave()

"""One call on its way: from the engine's news to frames of a stream, or to the whole answer."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from mmengine.errors import InvalidRequest, QueueFull, RequestFailed
from mmengine.models.plugin import Tokenizer
from mmengine.serve.answers import RequestOutput
from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.chat import WholeChoice
from mmengine.serve.deltas import ChoiceDeltas, Delta
from mmengine.serve.options import SubmitOptions
from mmengine.serve.stream import Stream
from mmengine.server.asked import Asked
from mmengine.server.errors import ApiError, failed, late
from mmengine.server.frames import DONE, Frames, Usage, error_frame
from mmengine.structured_output.request.tool_calls import calls_of


class Turn:
    """One prompt of a call, and its n answers; `first` is the index of the first of them."""

    def __init__(self, stream: Stream, asked: Asked, tokenizer: Tokenizer, first: int):
        self.stream, self._asked, self._tokenizer, self.first = stream, asked, tokenizer, first
        self._choices: list[ChoiceDeltas] = []
        self.indices = range(first, first + asked.sampling.n)

    def begin(self) -> None:
        """The request was accepted: how its reasoning ends is known."""
        asked = self._asked
        self._choices = [
            ChoiceDeltas(
                self._tokenizer,
                asked.sampling,
                self.stream.reasoning,
                self.stream.grammar,
                show_reasoning=asked.show_reasoning,
            )
            for _ in range(asked.sampling.n)
        ]

    def take(self, output: RequestOutput) -> Iterator[tuple[int, Delta, str | None, str | int | None]]:
        """The index of a choice, what it says, and with its last news why it ended. Raises ApiError,
        QueueFull and RequestFailed for an answer that was given up."""
        choice, index = self._choices[output.index], self.first + output.index
        if self._asked.silent:
            if output.finish_reason in ("stop", "length"):
                yield index, Delta(), "length", None
            elif output.finish_reason is not None:
                raise _given_up(self._asked, output.finish_reason, output.detail)
            return
        for delta in choice.push(output.token_ids, output.logprobs):
            yield index, delta, None, None
        reason = output.finish_reason
        if reason is None:
            return
        if reason not in ("stop", "length"):
            raise _given_up(self._asked, reason, output.detail)
        yield index, choice.finish(), choice.end_reason(reason), choice.stop_reason(output.detail)

    def usage(self) -> tuple[int, int, int]:
        """Tokens of the answers, of their reasoning, and those of the prompt that were cached."""
        return (
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.num_reasoning_tokens for choice in self._choices),
            self.stream.completion.num_cached_tokens if self.stream.completion else 0,
        )


def _given_up(asked: Asked, reason: str, detail: str) -> Exception:
    if reason == "rejected":
        return QueueFull(detail)
    if detail == "deadline":
        return late()
    if detail.startswith(("the grammar", "on_truncation")):
        return InvalidRequest(detail)
    return (
        RequestFailed("the request was cancelled") if reason == "abort" else failed(asked.request_id, detail)
    )


class Answering:
    """A call. `open` it first; then `take` gives frames, or `whole` the answer. `close` it in any case."""

    def __init__(self, engine: AsyncEngine, asked: Asked, frames: Frames, tokenizer: Tokenizer):
        self._engine, self._asked, self._frames, self._tokenizer = engine, asked, frames, tokenizer
        self._turns: list[Turn] = []
        self._news: list[tuple[Turn, list[RequestOutput]]] = []  # that came, and that no frame told of
        self._arrived = asyncio.Event()

    def begin(self) -> None:
        """Ask the engine. Raises InvalidRequest, QueueFull; nothing runs then."""
        asked, several = self._asked, len(self._asked.prompts) > 1
        try:
            for number, prompt in enumerate(asked.prompts):
                name = f"{asked.request_id}-{number}" if several else asked.request_id
                if owner := asked.envelope.owner:
                    name = f"{owner}:{name}"
                stream = self._engine.stream(prompt, asked.sampling, **self._options(name))
                self._turns.append(Turn(stream, asked, self._tokenizer, number * asked.sampling.n))
            asked.prompts.clear()  # images in it are large, and the engine has them
        except BaseException:
            self.close()
            raise

    def _options(self, request_id: str) -> SubmitOptions:
        asked = self._asked
        options = SubmitOptions(
            request_id=request_id,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            deadline_s=asked.deadline_s,
            envelope=msgspec.json.encode(asked.envelope),
        )
        if asked.form.response_format is not None:
            options["response_format"] = asked.form.response_format
        if asked.form.grammar is not None:
            options["grammar"] = asked.form.grammar
        if asked.form.calls is not None:
            options["calls"] = asked.form.calls
        return options

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
                    self._news = list(self._fetch())
        for _, outputs in self._news:
            for output in outputs:
                if output.finish_reason not in (None, "stop", "length"):
                    raise _given_up(self._asked, output.finish_reason, output.detail)

    def listen(self, listener: Callable[[], None] | None) -> None:
        for turn in self._turns:
            turn.stream.listen(listener)

    async def _wait(self) -> None:
        """Until something has come. The listener must be the event."""
        if not self.backlog and not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()

    def _fetch(self) -> Iterator[tuple[Turn, list[RequestOutput]]]:
        """What has come, behind what `first_news` waited for. Raises what a prompt ends with that came to
        nothing, behind what it said before."""
        if self._news:
            news, self._news = self._news, []
            yield from news
        for turn in self._turns:
            while turn.stream.backlog and (outputs := turn.stream.take()):
                yield turn, outputs

    @property
    def _is_over(self) -> bool:
        first = self._turns[0]  # a step asks this of each stream, and most calls have one prompt
        return first.stream.is_over and all(turn.stream.is_over for turn in self._turns)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of the tools whose calls are held to less than their schemas say. Known when it is open."""
        calls = calls_of(self._turns[0].stream.grammar)
        return () if calls is None else calls.unenforced

    def first(self) -> bytes:
        """The frames before all news."""
        if self._asked.sampling.prompt_logprobs is not None:
            return b""  # they echo prompts with logprobs, which have to come
        return b"".join(self._frames.first(index) for index in range(self._num_choices))

    @property
    def _num_choices(self) -> int:
        return len(self._turns) * self._asked.sampling.n

    def take(self, told: Callable[[Exception], ApiError]) -> tuple[bytes, str]:
        """Frames of all that has come; at the end "whole", or "error": the last one tells of it, as `told`
        says."""
        made: list[bytes] = []
        try:
            for turn, outputs in self._fetch():
                for output in outputs:
                    if output.prompt_scores is not None:
                        made += [self._frames.first(index, output.prompt_scores) for index in turn.indices]
                    for index, delta, reason, stop_reason in turn.take(output):
                        if reason is None:
                            made.append(self._frames.delta(index, delta))
                        else:
                            made.append(self._frames.finish(index, delta, reason, stop_reason))
            if not self._is_over:
                return b"".join(made), ""
            if self._asked.usage_frames != "none":
                made.append(self._frames.usage(self._usage()))
        except Exception as error:
            made += (error_frame(told(error)), DONE)
            return b"".join(made), "error"
        made.append(DONE)
        return b"".join(made), "whole"

    async def whole(self) -> bytes:
        """The body of an answer that is no stream."""
        choices = [WholeChoice(index) for index in range(self._num_choices)]
        while True:
            for turn, outputs in self._fetch():
                for output in outputs:
                    if output.prompt_scores is not None:
                        for index in turn.indices:
                            choices[index].scores = output.prompt_scores
                    for index, delta, reason, stop_reason in turn.take(output):
                        choices[index].add(delta)
                        if reason is not None:
                            choices[index].finish_reason, choices[index].stop_reason = reason, stop_reason
            if self._is_over:
                if self._asked.sampling.prompt_logprobs is not None:  # of many tokens they take their time
                    return await asyncio.to_thread(self._frames.whole, choices, self._usage())
                return self._frames.whole(choices, self._usage())
            await self._wait()

    def _usage(self) -> Usage:
        found = [turn.usage() for turn in self._turns]
        answers = [turn.stream.completion for turn in self._turns]
        prompt = sum(len(answer.prompt_token_ids) for answer in answers if answer is not None)
        completion, reasoning, cached = (sum(each) for each in zip(*found, strict=True))
        drafts = sum(answer.num_drafts for answer in answers if answer is not None)
        accepted = sum(answer.num_accepted for answer in answers if answer is not None)
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
    def is_accepted(self) -> bool:
        """Whether the log, if there is one, has all of it."""
        return bool(self._turns) and all(turn.stream.is_accepted for turn in self._turns)

    @property
    def backlog(self) -> int:
        return sum(turn.stream.backlog for turn in self._turns)

    def close(self) -> None:
        """Cancel what still runs. Closing twice is no error."""
        for turn in self._turns:
            turn.stream.cancel()

    def leave(self) -> None:
        """Nobody listens any more, and what still runs goes on."""
        for turn in self._turns:
            turn.stream.leave()

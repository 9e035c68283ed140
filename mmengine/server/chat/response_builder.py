"""Builds the response to a call from the engine's outputs, as stream frames or as a whole body."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from mmengine.core.executor import PromptLogprobs
from mmengine.events.vocabulary import ANSWERED
from mmengine.models.plugin import Tokenizer
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.stream.answer_record import AnswerSource
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import Completion, RequestOutput
from mmengine.server.chat.chat_frames import Frames, Usage
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.prompt_stream import ChoiceUpdate, PromptStream, abort_error
from mmengine.server.http.errors import ApiError
from mmengine.structured_output.request.tool_calls import calls_of

# Maximum number of outputs that are processed before the event loop serves other sockets.
MAX_OUTPUTS_AT_ONCE = 128


class ResponseBuilder:
    """Builds the response to a call. The owner calls `open`, then `take` for frames or `whole` for the body,
    and finally `close`. `sources`: an answer source for each prompt.
    """

    def __init__(
        self,
        parsed_request: ParsedRequest,
        frames: Frames,
        sources: Sequence[AnswerSource],
        tokenizer: Tokenizer,
    ):
        self.request, self._frames = parsed_request, frames
        num_choices = parsed_request.sampling.n
        self._prompt_streams = [
            PromptStream(source, parsed_request, tokenizer, number * num_choices)
            for number, source in enumerate(sources)
        ]
        # Outputs that are not yet in a frame.
        self._pending: deque[tuple[PromptStream, RequestOutput]] = deque()
        self._arrived = asyncio.Event()
        self._listener: Callable[[], None] | None = None
        # Work on another thread. Later outputs wait until this work is done.
        self._background: asyncio.Future[Sequence[ChoiceUpdate | bytes]] | None = None

    async def open(self) -> None:
        """Wait until the engine has accepted all prompts. Raises the engine's errors."""
        for prompt_stream in self._prompt_streams:
            await prompt_stream.stream.accepted()
            prompt_stream.begin()
            self._frames.tails.set_prompt(prompt_stream.indices, prompt_stream.stream.num_prompt_tokens)
        self.listen(self._arrived.set)

    async def wait_for_output(self, patience_s: float) -> None:
        """Wait up to `patience_s` seconds for the first output. An error within this time still sets the HTTP
        status. Raises the engine's errors.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not self._pending and not self._is_over:
                    await self._wait()
                    for prompt_stream in self._prompt_streams:
                        self._fetch(prompt_stream)
        for _, output in self._pending:
            if output.finish_reason not in (None, *ANSWERED):
                raise abort_error(self.request, output)

    def listen(self, listener: Callable[[], None] | None) -> None:
        self._listener = listener
        for prompt_stream in self._prompt_streams:
            prompt_stream.stream.listen(listener)

    async def _wait(self) -> None:
        """Wait for the next output. The listener must be `_arrived.set`."""
        if self.has_more:
            await asyncio.sleep(0)
        elif not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()

    def _fetch(self, prompt_stream: PromptStream) -> None:
        """Move the prompt's new outputs to `_pending`. Raises the prompt's error if the prompt failed."""
        for output in prompt_stream.stream.take():
            self._pending.append((prompt_stream, output))

    def _outputs(self) -> Iterator[tuple[PromptStream, RequestOutput]]:
        """Yield about MAX_OUTPUTS_AT_ONCE new outputs. A failed prompt's error is raised after the earlier
        prompts' outputs.
        """
        while self._pending:
            yield self._pending.popleft()
        count = 0
        for prompt_stream in self._prompt_streams:
            if prompt_stream.stream.backlog and count < MAX_OUTPUTS_AT_ONCE:
                self._fetch(prompt_stream)
                count += len(self._pending)
                while self._pending:
                    yield self._pending.popleft()

    def _updates(self) -> Iterator[ChoiceUpdate | bytes]:
        """Yield updates for new outputs, and frames for echoed prompts with logprobs. If an output needs long
        work, the work is started on a thread and the iteration ends. The listener is called when the work is
        done.
        """
        if self._background is not None:
            if not self._background.done():
                return
            frames, self._background = self._background.result(), None
            yield from frames
        for prompt_stream, output in self._outputs():
            if output.prompt_scores is not None and self.request.stream:
                self._pending.appendleft((prompt_stream, msgspec.structs.replace(output, prompt_scores=None)))
                self._run_in_background(partial(self._echo_frames, prompt_stream, output.prompt_scores))
                return
            for delta in prompt_stream.push(output):
                yield ChoiceUpdate(prompt_stream.first + output.index, delta)
            if output.finish_reason is None:
                continue
            if (slow_end := prompt_stream.slow_end(output)) is not None:
                self._run_in_background(slow_end)
                return
            yield prompt_stream.end(output)

    def _run_in_background(self, make: Callable[[], Sequence[ChoiceUpdate | bytes]]) -> None:
        self._background = asyncio.get_running_loop().run_in_executor(None, make)
        self._background.add_done_callback(self._background_done)

    def _background_done(self, done: asyncio.Future[Sequence[ChoiceUpdate | bytes]]) -> None:
        if self._listener is not None:
            self._listener()

    def _echo_frames(self, prompt_stream: PromptStream, scores: PromptLogprobs) -> list[bytes]:
        return [self._frames.first(index, scores) for index in prompt_stream.indices]

    @property
    def _is_over(self) -> bool:
        """Whether all streams have ended and no background work remains."""
        # Fast path for calls with one prompt, since each step reads this property.
        first = self._prompt_streams[0]
        if not first.stream.is_over or self._background is not None:
            return False
        return all(prompt_stream.stream.is_over for prompt_stream in self._prompt_streams)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of tools whose schemas are enforced only partly. Available after `open`."""
        calls = calls_of(self._prompt_streams[0].stream.grammar)
        return () if calls is None else calls.unenforced

    def first(self) -> bytes:
        """Return the frames before all output."""
        if self.request.sampling.prompt_logprobs is not None:
            return b""  # `_echo_frames` makes these frames later.
        return b"".join(self._frames.first(index) for index in range(self._num_choices))

    @property
    def _num_choices(self) -> int:
        return len(self._prompt_streams) * self.request.sampling.n

    def take(self, to_api_error: Callable[[Exception], ApiError]) -> tuple[bytes, str]:
        """Return the frames for new outputs, and the stream's state.

        The state is "" if more frames will follow, "whole" at the end, and "error" if an error ended the
        stream. `to_api_error` converts the error for the last frame.
        """
        frames: list[bytes] = []
        try:
            waits = self._background is not None or len(self._prompt_streams) > 1
            if not waits and not self._pending:
                self._take_plain(self._prompt_streams[0], frames)
            for update in self._updates() if waits or self._pending else ():
                if isinstance(update, bytes):
                    frames.append(update)
                elif update.reason is None:
                    frames.append(self._frames.delta(update.number, update.delta))
                else:
                    frames.append(
                        self._frames.finish(update.number, update.delta, update.reason, update.stop_reason)
                    )
            if not self._is_over:
                return b"".join(frames), ""
            if self.request.usage_frames != "none":
                frames.append(self._frames.usage(self._usage()))
        except Exception as error:
            frames.append(self.error_frames(to_api_error(error)))
            return b"".join(frames), "error"
        frames.append(self._frames.done)
        return b"".join(frames), "whole"

    def error_frames(self, error: ApiError) -> bytes:
        """Return the last frames for a stream that ends with an error."""
        return self._frames.error(error) + self._frames.done

    def _take_plain(self, prompt_stream: PromptStream, frames: list[bytes]) -> None:
        """Append frames for new outputs. This is a faster path than `_updates`. The first output that ends a
        choice or has prompt logprobs, and all later outputs, go to `_pending`.
        """
        outputs = prompt_stream.stream.take()
        for place, output in enumerate(outputs):
            if output.finish_reason is not None or output.prompt_scores is not None:
                self._pending.extend([(prompt_stream, each) for each in outputs[place:]])
                break
            for delta in prompt_stream.push(output):
                frames.append(self._frames.delta(prompt_stream.first + output.index, delta))

    async def whole(self) -> bytes:
        """Wait for the answer's end, and return the body of an unstreamed response."""
        choices = [AccumulatedChoice(index) for index in range(self._num_choices)]
        while True:
            for update in self._updates():
                if isinstance(update, ChoiceUpdate):  # Bytes are frames for streams.
                    choices[update.number].add(update.delta, update.reason, update.stop_reason)
            if self._is_over:
                for prompt_stream in self._prompt_streams:
                    for index in prompt_stream.indices:
                        choices[index].scores = prompt_stream.prompt_scores
                if self.request.logprobs:  # Many logprobs take long to encode.
                    return await asyncio.to_thread(self._frames.whole, choices, self._usage())
                return self._frames.whole(choices, self._usage())
            await self._wait()

    def _usage(self) -> Usage:
        found = [prompt_stream.usage() for prompt_stream in self._prompt_streams]
        answers = self.completions
        prompt = sum(len(answer.prompt_token_ids) for answer in answers)
        completion, reasoning, cached = (sum(each) for each in zip(*found, strict=True))
        drafts = sum(answer.num_drafts for answer in answers)
        accepted = sum(answer.num_accepted for answer in answers)
        details: dict[str, int] = {"cached_tokens": cached}
        for prompt_stream in self._prompt_streams:
            for kind, count in prompt_stream.stream.num_embeds.items():
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
        """The completions of the prompts that have ended."""
        return [
            found
            for prompt_stream in self._prompt_streams
            if (found := prompt_stream.stream.completion) is not None
        ]

    @property
    def can_reattach(self) -> bool:
        """Whether a later call can read this answer, because it is stored or in the log."""
        return not any(isinstance(prompt_stream.stream, Stream) for prompt_stream in self._prompt_streams)

    @property
    def is_accepted(self) -> bool:
        """Whether the engine has accepted all requests."""
        return bool(self._prompt_streams) and all(
            prompt_stream.stream.is_accepted for prompt_stream in self._prompt_streams
        )

    @property
    def backlog(self) -> int:
        return sum(prompt_stream.stream.backlog for prompt_stream in self._prompt_streams)

    @property
    def has_more(self) -> bool:
        """Whether `take` would return frames now."""
        if self._background is not None:
            return False
        return bool(self._prompt_streams[0].stream.backlog) or (
            len(self._prompt_streams) > 1 and bool(self.backlog)
        )

    def close(self) -> None:
        """Cancel the requests that are still running. May be called twice."""
        for prompt_stream in self._prompt_streams:
            prompt_stream.stream.cancel()

    def leave(self) -> None:
        """Stop listening. The requests continue."""
        for prompt_stream in self._prompt_streams:
            prompt_stream.stream.leave()

"""A request in an ingress. The request moves to another replica if its replica fails or drains.

At first a single replica computes the whole request. When this replica dies, hangs or drains, each unfinished
choice (answer) continues as a separate request on another replica. The new request contains the forwarded
tokens as `outputs` and the choice's `sample_index`. Any engine with equal weights continues with the same
tokens. Sampling noise depends only on seed, sample index and position; grammars, penalties and stop strings
depend only on tokens.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ErrorCode, RequestFailed, in_one_line
from mmengine.events.vocabulary import DEADLINE
from mmengine.fleet.attempt import Attempt, Carrier, ReplicaChoice, Reroute, RoutingLimits
from mmengine.fleet.choice_progress import ChoiceProgress
from mmengine.fleet.wire import Accepted, AnswerEnd, Outputs, ReplicaRequest
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.request_output import Completion, RequestOutput, engine_failed, split_output

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.3  # seconds between two attempts


class RequestKeeper(Protocol):
    """Stores a request that must outlive its ingress."""

    async def accept(self, request: ReplicaRequest, accepted: Accepted) -> None:
        """Store a request that a replica's log has recorded. The caller learns of the acceptance only
        afterwards.

        Raises an error if the request is refused.
        """

    async def released(self, replica: str, names: Collection[str]) -> None:
        """Wait until `replica` no longer computes these core ids (one id per choice)."""


class RoutedRequest:
    """A request and the state of its choices.

    `request` must have a seed. `key`: the routing key that selects replicas. `moved`: called with the reason
    for each move. With a `keeper` the request survives this process, and at most one replica computes the
    request at any time. The next replica begins only after the request has ended in the previous replica's
    log. After its acceptance, a request with a keeper waits for a replica without a time limit. If the
    request fails later, the caller gets the error as the answer.
    """

    def __init__(
        self,
        request: ReplicaRequest,
        key: str,
        channel: Channel,
        carrier: Carrier,
        limits: RoutingLimits,
        moved: Callable[[str], None],
        keeper: RequestKeeper | None = None,
    ):
        self._request, self._channel = request, channel
        self._carrier, self._limits, self._moved = carrier, limits, moved
        self._replicas = ReplicaChoice(key)
        self._keeper, self._core_ids = keeper, core_ids(request.request_id, request.sampling.n)
        self._choices = [ChoiceProgress(index) for index in range(request.sampling.n)]
        self._scores: PromptLogprobs | None = None
        self._ends: list[AnswerEnd] = []
        self._last: RequestOutput | None = None
        self._num_prompt_tokens = 0
        self._deaths = 0  # consecutive replicas that ended while they computed the whole request
        self.news_at = time.monotonic()  # time at which a replica last accepted the request or sent outputs
        self.is_unheard = True  # whether no live replica is known to compute the request

    @property
    def num_tokens(self) -> int:
        """The number of forwarded tokens."""
        return _num_tokens(self._choices)

    @property
    def is_accepted(self) -> bool:
        """Whether the log of any replica has recorded the request."""
        return self._channel.accepted.is_set

    @property
    def _is_owed(self) -> bool:
        """Whether the caller must get an answer even if this process ends."""
        return self._keeper is not None and self.is_accepted

    @property
    def is_over(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.last is not None for choice in self._choices)

    def restore(self, outputs: Iterable[RequestOutput]) -> None:
        """Add the outputs of a request that a previous ingress accepted. Call before `run`."""
        self._num_prompt_tokens = self._channel.num_prompt_tokens
        for output in outputs:
            self._scores = output.prompt_scores or self._scores
            for piece in split_output(output):
                self._put(self._choices[piece.index], piece)
        self._channel.wake()

    async def run(self) -> None:
        """Run the request to its end, and send the last output to the channel."""
        try:
            await self._run_whole()
            await _all(self._run_choice(choice) for choice in self._choices if choice.last is None)
        except asyncio.CancelledError:
            if not self._channel.closed:
                raise
            self._end_all("abort", "cancelled", ErrorCode.CANCELLED)
        except Exception as error:
            if not self._is_owed:
                self._channel.end(engine_failed(error))
                return
            reason = in_one_line(error)
            operator_log.error("request failed", request_id=self._request.request_id, reason=reason)
            self._end_all("error", reason, ErrorCode.REQUEST_FAILED)
        self._complete()

    async def _run_whole(self) -> None:
        """Send the whole request until a replica accepts the request. Return when the request has ended, or
        when its choices must continue separately.
        """
        await self._retry(self._whole_request, lambda: self.is_accepted, self._choices)

    async def _run_choice(self, choice: ChoiceProgress) -> None:
        await self._retry(lambda: self._choice_request(choice), lambda: choice.last is not None, [choice])

    async def _retry(
        self,
        make_request: Callable[[], ReplicaRequest],
        is_done: Callable[[], bool],
        choices: Sequence[ChoiceProgress],
    ) -> None:
        """Repeat attempts for these choices until an attempt succeeds or `is_done` is true."""
        names = [self._core_ids[choice.index] for choice in choices]
        pause, deaths = FIRST_PAUSE_S, 0 if _num_tokens(choices) else self._deaths
        while not is_done() and not self._end_if_late():
            last_news, tokens_before = self.news_at, _num_tokens(choices)
            request = make_request()
            try:
                await Attempt(self._carrier, self._limits, self._replicas, request, self).run()
                return
            except Reroute as move:
                self.is_unheard = True
                self._moved(str(move))
                if self._keeper is not None and move.replica:
                    self.is_unheard = False  # this replica may still have the request
                    await self._keeper.released(move.replica, names)
                # New tokens reset the count of deaths, because a request that crashes replicas gets no
                # tokens.
                deaths = move.is_death + (deaths if _num_tokens(choices) == tokens_before else 0)
                if is_done():
                    self._deaths = deaths
                    return
                if self.news_at != last_news:
                    pause = FIRST_PAUSE_S
                self._check_limits(deaths, move)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _check_limits(self, deaths: int, move: Reroute) -> None:
        """Raise RequestFailed if the limits forbid another attempt."""
        if deaths >= self._limits.deaths:
            raise RequestFailed(
                f"{deaths} replicas in a row ended without a token of this request, which may be the cause: "
                f"{move}"
            ) from None
        patience_s = self._limits.patience_s
        if time.monotonic() - self.news_at > patience_s and not self._is_owed:
            raise RequestFailed(f"no replica answered for {patience_s:g} seconds: {move}") from None

    def _end_if_late(self) -> bool:
        """End the request if its deadline has passed. Return whether the deadline has passed."""
        deadline_s = self._channel.options.deadline_s
        if not deadline_s or self._channel.age_s < deadline_s:
            return False
        self._end_all("abort", DEADLINE, ErrorCode.DEADLINE_EXCEEDED)
        return True

    def _whole_request(self) -> ReplicaRequest:
        """Return the request with the remaining time to its deadline. The deadline counts from submission to
        the ingress.
        """
        options = self._request.options
        rest_s = self._channel.options.after(self._channel.age_s).deadline_s
        if rest_s:
            options = {**options, "deadline_s": rest_s}
        return msgspec.structs.replace(self._request, options=options, avoid=self._replicas.avoided)

    def _choice_request(self, choice: ChoiceProgress) -> ReplicaRequest:
        """Return a request that continues a single choice after its forwarded tokens."""
        request = self._whole_request()
        scored = request.sampling.prompt_logprobs
        if choice.index or choice.token_ids or self._scores is not None:
            scored = None
        return msgspec.structs.replace(
            request,
            request_id=self._core_ids[choice.index],
            sampling=msgspec.structs.replace(request.sampling, n=1, prompt_logprobs=scored),
            outputs=np.asarray(choice.token_ids, np.int32).tobytes(),
            sample_index=choice.index,
        )

    # Messages from replicas: methods for attempt.Receiver

    def note_alive(self) -> None:
        self.is_unheard = False

    async def accept(self, message: Accepted) -> None:
        channel = self._channel
        self.news_at = time.monotonic()
        self._num_prompt_tokens = message.num_prompt_tokens
        if channel.accepted.is_set:
            return
        if self._keeper is not None:
            await self._keeper.accept(self._request, message)
        message.tell(channel)

    def receive(self, message: Outputs) -> None:
        self.news_at = time.monotonic()
        for each in message.outputs:
            output, choice = each.output(self._request.request_id), self._choices[each.index]
            if choice.last is None:
                self._scores = output.prompt_scores or self._scores
                self._put(choice, output)
        self._channel.wake()
        if message.end is not None:
            self._ends.append(message.end)

    def _put(self, choice: ChoiceProgress, output: RequestOutput) -> None:
        """Add an output to its choice, and forward the output. `_complete` forwards the request's last
        output.
        """
        choice.add(output)
        if self.is_over:
            self._last = output
        else:
            self._channel.put(output)

    def _end_all(self, reason: str, detail: str, code: ErrorCode) -> None:
        """End all choices that have not ended."""
        for choice in self._choices:
            if choice.last is None:
                output = RequestOutput(
                    self._request.request_id, choice.index, "", [], reason, detail=detail, code=code
                )
                self._put(choice, output)

    def _complete(self) -> None:
        """Forward the last output with the completion."""
        assert self._last is not None, "each choice has ended"
        has_form = self._channel.options.grammar is not None
        ends = self._ends or [AnswerEnd(np.zeros(self._num_prompt_tokens, np.int32).tobytes())]
        completion = Completion(
            self._request.request_id,
            np.frombuffer(ends[-1].prompt, np.int32),
            [choice.choice(has_form=has_form) for choice in self._choices],
            max(each.num_cached_tokens for each in ends),
            sum(each.num_drafts for each in ends),
            sum(each.num_accepted for each in ends),
            ends[0].notes,
            self._scores,
        )
        self._channel.put(msgspec.structs.replace(self._last, completion=completion))
        self._channel.wake()


def _num_tokens(choices: Iterable[ChoiceProgress]) -> int:
    """Return the number of forwarded tokens in all choices."""
    return sum(len(choice.token_ids) for choice in choices)


async def _all(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Wait for all calls. The first error cancels the other calls and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

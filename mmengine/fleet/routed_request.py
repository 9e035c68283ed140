"""One request's way over replicas, at the ingress: what was said of it is kept, and whoever goes on has it.

A request begins whole. When its replica dies, hangs or drains, each of its choices that is not over goes on
as a request of its own, with the tokens that were forwarded as its `outputs` and its `sample_index`: sampling
is keyed by seed, index and place, and forms, penalties and stops follow from tokens, so any engine of the
same weights says what the first one would have said.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ErrorCode, InvalidRequest, MMEngineError, QueueFull, RequestFailed, in_one_line
from mmengine.events.vocabulary import DEADLINE
from mmengine.fleet.choice_progress import ChoiceProgress
from mmengine.fleet.wire import (
    Accepted,
    AnswerEnd,
    Heartbeat,
    Outputs,
    Redirect,
    Rejection,
    ReplicaName,
    ReplicaRequest,
    WireOutput,
    decode_message,
    encode,
)
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.request_output import Completion, RequestOutput, engine_failed, split_output

AVOIDED = 8  # replicas, the last ones of which a request was let down
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.3  # before it is asked for again
DODGES = 8  # that the ring led to one of them, after which they may be all that there are


class ReplicaLost(Exception):
    """The replica that answered is no more."""


class Carrier(Protocol):
    """How bytes go from an ingress to replicas and back."""

    def call(self, key: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """What a replica says to an Ask: the one that `key` belongs to, or where that takes none, another.
        Closing it is the request's end there. Raises ReplicaLost."""

    def is_leaving(self, replica: str) -> bool:
        """Whether this replica is known to take no more requests: what it has goes elsewhere."""


class RoutingLimits(NamedTuple):
    """`silence_s`: without a sign of life, after which a replica is given up. `patience_s`: for which a
    request waits for a replica that takes it. `deaths`: of replicas in a row without a token, after which a
    request is taken for what kills them."""

    silence_s: float = 10.0
    patience_s: float = 120.0
    deaths: int = 3


class RequestKeeper(Protocol):
    """Of a request that outlives its ingress."""

    async def accept(self, ask: ReplicaRequest, begun: Accepted) -> None:
        """A replica's log has it, and its caller has not heard so. Raises what it is refused with."""

    async def released(self, replica: str, names: Collection[str]) -> None:
        """Wait until this replica, which had it, computes none of these any more, by core id."""


class _Reroute(Exception):
    """It is to go on elsewhere. `replica`: that may still have it, or "". `is_death`: of that, or of what
    looks like it."""

    def __init__(self, why: str, replica: str, *, is_death: bool = False):
        super().__init__(why)
        self.replica, self.is_death = replica, is_death


class RoutedRequest:
    """`ask`: with its seed drawn. `key`: for routing. `moved`: hears why, each time that it moves. `keeper`:
    of one that outlives this process: it is computed by one replica at a time, and by another only when the
    log of the one before says so; once it is accepted it waits for that, and for a replica, as long as it
    takes, and where it fails, that is its answer."""

    def __init__(
        self,
        ask: ReplicaRequest,
        key: str,
        channel: Channel,
        carrier: Carrier,
        patience: RoutingLimits,
        moved: Callable[[str], None],
        keeper: RequestKeeper | None = None,
    ):
        self._ask, self._key, self._channel = ask, key, channel
        self._carrier, self._patience, self._moved = carrier, patience, moved
        self._keeper, self._core_ids = keeper, core_ids(ask.request_id, ask.sampling.n)
        self._told = [ChoiceProgress(index) for index in range(ask.sampling.n)]
        self._scores: PromptLogprobs | None = None
        self._ends: list[AnswerEnd] = []
        self._last: RequestOutput | None = None
        self._num_prompt_tokens = 0
        self._avoid: list[str] = []
        self._deaths = 0  # in a row, of replicas that had it whole
        self._num_dodges = 0  # how often the ring led where it is not to go
        self.news_at = time.monotonic()  # when something was said of it last
        self.is_unheard = True  # nobody who lives has it

    @property
    def num_tokens(self) -> int:
        """That were forwarded."""
        return _num_said(self._told)

    @property
    def _is_owed(self) -> bool:
        """Whether its answer is promised, whatever becomes of this process."""
        return self._keeper is not None and self._channel.accepted.is_set

    @property
    def is_over(self) -> bool:
        """Whether all choices are."""
        return all(told.last is not None for told in self._told)

    def go_on(self, news: Iterable[RequestOutput]) -> None:
        """Before `run`, of one that an ingress before had accepted: what was said of it, choice by choice."""
        self._num_prompt_tokens = self._channel.num_prompt_tokens
        for output in news:
            self._scores = output.prompt_scores or self._scores
            for piece in split_output(output):
                self._put(self._told[piece.index], piece)
        self._channel.wake()

    async def run(self) -> None:
        """To its end, which the channel has then."""
        try:
            await self._persist(
                lambda: self._leg(self._ask_for_all()),
                lambda: self._channel.accepted.is_set,
                self._told,
            )
            await _all(self._go_on(told) for told in self._told if told.last is None)
        except asyncio.CancelledError:
            if not self._channel.closed:
                raise
            self._end_all("abort", "cancelled", ErrorCode.CANCELLED)
        except Exception as error:
            if not self._is_owed:
                self._channel.end(engine_failed(error))
                return
            why = in_one_line(error)
            operator_log.error("request failed", request_id=self._ask.request_id, reason=why)
            self._end_all("error", why, ErrorCode.REQUEST_FAILED)
        self._complete()

    async def _go_on(self, told: ChoiceProgress) -> None:
        await self._persist(lambda: self._leg(self._ask_for(told)), lambda: told.last is not None, [told])

    async def _persist(
        self,
        leg: Callable[[], Awaitable[None]],
        is_done: Callable[[], bool],
        choices: Sequence[ChoiceProgress],
    ) -> None:
        """Legs of these choices, until one comes to its end, or `is_done` says that no other is to begin."""
        names = [self._core_ids[told.index] for told in choices]
        pause, deaths = FIRST_PAUSE_S, 0 if _num_said(choices) else self._deaths
        while not is_done() and not self._is_late():
            before, said_before = self.news_at, _num_said(choices)
            try:
                await leg()
                return
            except _Reroute as move:
                if self._keeper is not None and move.replica:
                    self.is_unheard = False  # it is known who may have it
                    await self._keeper.released(move.replica, names)
                # What kills replicas is taken by each of them before, and says no token.
                deaths = move.is_death + (deaths if _num_said(choices) == said_before else 0)
                if is_done():
                    self._deaths = deaths
                    return
                if self.news_at != before:
                    pause = FIRST_PAUSE_S
                if deaths >= self._patience.deaths:
                    raise RequestFailed(
                        f"{deaths} replicas in a row ended without a token of it, and it may be why: {move}"
                    ) from None
                silent_s = time.monotonic() - self.news_at
                if silent_s > self._patience.patience_s and not self._is_owed:
                    raise RequestFailed(
                        f"no replica has said a word of it for {self._patience.patience_s:g} seconds: {move}"
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _is_late(self) -> bool:
        """Its deadline passed between two replicas."""
        deadline_s = self._channel.options.deadline_s
        if not deadline_s or self._channel.age_s < deadline_s:
            return False
        self._end_all("abort", DEADLINE, ErrorCode.DEADLINE_EXCEEDED)
        return True

    # What is asked

    def _ask_for_all(self) -> ReplicaRequest:
        return msgspec.structs.replace(self._ask, options=self._options(), avoid=tuple(self._avoid))

    def _ask_for(self, told: ChoiceProgress) -> ReplicaRequest:
        """One choice, from behind what was said of it."""
        ask = self._ask_for_all()
        scored = ask.sampling.prompt_logprobs
        if told.index or told.token_ids or self._scores is not None:
            scored = None
        return msgspec.structs.replace(
            ask,
            request_id=self._core_ids[told.index],
            sampling=msgspec.structs.replace(ask.sampling, n=1, prompt_logprobs=scored),
            outputs=np.asarray(told.token_ids, np.int32).tobytes(),
            sample_index=told.index,
        )

    def _options(self) -> dict[str, object]:
        """What is left of them: a deadline counts from when the ingress was asked."""
        left = self._channel.options.after(self._channel.age_s).deadline_s
        return {**self._ask.options, "deadline_s": left} if left else self._ask.options

    # What is said

    async def _leg(self, ask: ReplicaRequest) -> None:
        """On one replica. Raises _Move, and what the request is refused with."""
        key = f"{self._key}/{self._num_dodges}" if self._num_dodges else self._key
        replica = ""
        async with aclosing(self._carrier.call(key, encode(ask))) as words:
            while True:
                try:
                    async with asyncio.timeout(self._patience.silence_s):
                        told = decode_message(await anext(words))
                except StopAsyncIteration:
                    raise self._let_down(replica, "it stopped in the middle") from None
                except ReplicaLost as lost:
                    raise self._let_down(replica, f"it is lost ({lost})") from None
                except QueueFull as full:  # of the way to all replicas
                    self._refuse(full, replica, is_first=not self._channel.accepted.is_set)
                except TimeoutError:
                    self._num_dodges += bool(replica)
                    raise self._let_down(replica, "it is silent") from None
                self.is_unheard = False
                match told:
                    case ReplicaName(replica=name):
                        replica = name
                        if name in self._avoid:
                            self._num_dodges += 1  # another place on the ring, the next time
                            if self._num_dodges % DODGES == 0:
                                self._avoid = []
                    case Redirect(why=why):
                        if replica in ask.avoid:
                            raise self._move(f"replica {replica}: {why}")
                        self._dodge(replica)
                        raise self._move(f"replica {replica}: {why}", replica)
                    case Rejection():
                        self._refuse(told.error(), replica, is_first=not self._channel.accepted.is_set)
                    case Accepted():
                        await self._begin(told)
                    case Outputs():
                        self._tell(told.outputs)
                        if told.end is not None:
                            self._ends.append(told.end)
                            return
                    case Heartbeat():
                        pass
                if self._carrier.is_leaving(replica):
                    raise self._move(f"replica {replica} takes no more requests", replica)

    def _let_down(self, replica: str, why: str) -> _Reroute:
        self._dodge(replica)
        return self._move(f"replica {replica or '(none yet)'}: {why}", replica, is_death=bool(replica))

    def _move(self, why: str, replica: str = "", *, is_death: bool = False) -> _Reroute:
        self.is_unheard = True
        self._moved(why)
        return _Reroute(why, replica, is_death=is_death)

    def _dodge(self, replica: str) -> None:
        if replica and replica not in self._avoid:
            self._avoid = [*self._avoid, replica][-AVOIDED:]

    def _refuse(self, error: MMEngineError, replica: str, is_first: bool) -> None:
        """Of a request that was taken once, a replica that has no room says nothing."""
        if is_first or not isinstance(error, (QueueFull, InvalidRequest)):
            raise error
        self._dodge(replica)
        raise self._move(f"replica {replica} refused it: {error}")

    async def _begin(self, begun: Accepted) -> None:
        channel = self._channel
        self.news_at = time.monotonic()
        self._num_prompt_tokens = begun.num_prompt_tokens
        if channel.accepted.is_set:
            return
        if self._keeper is not None:
            await self._keeper.accept(self._ask, begun)
        begun.tell(channel)

    def _tell(self, said: list[WireOutput]) -> None:
        """Forward it."""
        self.news_at = time.monotonic()
        for each in said:
            output, told = each.output(self._ask.request_id), self._told[each.index]
            if told.last is None:
                self._scores = output.prompt_scores or self._scores
                self._put(told, output)
        self._channel.wake()

    def _put(self, told: ChoiceProgress, output: RequestOutput) -> None:
        """The last word of all is kept back for `_complete`."""
        told.add(output)
        if self.is_over:
            self._last = output
        else:
            self._channel.put(output)

    def _end_all(self, reason: str, detail: str, code: ErrorCode) -> None:
        """Give up those that are not over."""
        for told in self._told:
            if told.last is None:
                output = RequestOutput(
                    self._ask.request_id, told.index, "", [], reason, detail=detail, code=code
                )
                self._put(told, output)

    def _complete(self) -> None:
        """The last word, with the answer."""
        assert self._last is not None, "each choice is over"
        has_form = self._channel.options.grammar is not None
        ends = self._ends or [AnswerEnd(np.zeros(self._num_prompt_tokens, np.int32).tobytes())]
        completion = Completion(
            self._ask.request_id,
            np.frombuffer(ends[-1].prompt, np.int32),
            [told.choice(has_form=has_form) for told in self._told],
            max(each.num_cached_tokens for each in ends),
            sum(each.num_drafts for each in ends),
            sum(each.num_accepted for each in ends),
            ends[0].notes,
            self._scores,
        )
        self._channel.put(msgspec.structs.replace(self._last, completion=completion))
        self._channel.wake()


def _num_said(choices: Iterable[ChoiceProgress]) -> int:
    """Tokens of them."""
    return sum(len(told.token_ids) for told in choices)


async def _all(ways: Iterable[Coroutine[None, None, None]]) -> None:
    """All of them, or the first error, which ends the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

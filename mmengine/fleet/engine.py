"""Many replicas as one engine, for a server: what AsyncEngine is, without a model."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Unpack

import msgspec

from mmengine.config import EngineConfig
from mmengine.core.outputs import Stats
from mmengine.errors import ConfigError, InvalidRequest, QueueFull, RequestFailed
from mmengine.fleet.durable_requests import DurableRequests
from mmengine.fleet.ledger import LedgerEntry
from mmengine.fleet.media import with_fetched_media
from mmengine.fleet.metrics import FleetMetrics
from mmengine.fleet.routed_request import Carrier, ReplicaLost, RoutedRequest, RoutingLimits
from mmengine.fleet.routing import affinity
from mmengine.fleet.wire import (
    Accepted,
    Rejection,
    ReplicaRequest,
    decode_message,
    encode,
    prompt_from_wire,
    submit_options,
    wire_prompt,
)
from mmengine.models.plugin import Processor
from mmengine.processing.workers.attempt import GIVEN_UP
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.typed_answers import AsyncAnswers
from mmengine.serve.prompt.options import SUBMIT, Options, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt, PromptInput, request_ids
from mmengine.serve.requests.adapters import LocalAdapter
from mmengine.serve.requests.health import Readiness
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.requests.request_times import Times
from mmengine.serve.stream.channel import Channel
from mmengine.serve.stream.request_stream import HeldAnswer, Stream
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.reasoning import Reasoning
from mmengine.serve.text.request_output import RequestOutput, engine_failed

COUNT_TRIES = 3  # replicas that may be lost while a prompt is counted
STRANDED_S = 5.0  # without a word of a request, after which no other should be sent
LEFT = "the ingress ends; the request is kept, and goes on when another one serves with the same --log"
PASSED_ON = SUBMIT - {"request_id", "calls", "outputs", "sample_index"}  # as they are; an Ask names these


class FleetEngine(AsyncAnswers):
    """`processor`, `config`: those of the replicas' model. `max_open`: requests that may be open at once; one
    more raises QueueFull. It has what was said of each request in memory: its own end is a broken connection
    to all of its callers. What is asked to `hold` outlives it where there is `kept`, which it closes: whoever
    asks the next one has it. It must be made on the event loop that it belongs to."""

    metrics: "FleetMetrics"

    def __init__(
        self,
        carrier: Carrier,
        processor: Processor,
        config: EngineConfig,
        max_open: int,
        patience: RoutingLimits = RoutingLimits(),  # noqa: B008 (it is frozen)
        kept: DurableRequests | None = None,
    ):
        self._kept = kept
        self._carrier, self._processor, self.config = carrier, processor, config
        self._max_open, self._patience = max_open, patience
        self._loop = asyncio.get_running_loop()
        self._open: dict[Channel, asyncio.Task[None]] = {}
        self._journeys: dict[Channel, RoutedRequest] = {}  # of those whose prompts are here
        self._names: set[str] = set()  # of the requests that are open
        self._new_id = request_ids()
        markers = config.reasoning_start, config.reasoning_end
        reasoning = Reasoning(processor.tokenizer, config.eos_token_ids, *markers)
        self._can_end_reasoning = reasoning.can_end
        self._closing = self._leaving = False
        self.metrics = FleetMetrics(lambda: len(self._open))

    @property
    def processor(self) -> Processor:
        return self._processor

    @property
    def has_log(self) -> bool:
        """False: what is not asked to `hold` ends with this process."""
        return False

    @property
    def keeps_held(self) -> bool:
        """Whether what is asked to `hold` outlives this process."""
        return self._kept is not None

    @property
    def max_open(self) -> int:
        return self._max_open

    @property
    def adapters(self) -> tuple[LocalAdapter, ...]:
        """None: replicas are given no adapters."""
        return ()

    async def load_adapter(self, name: str, source: str) -> LocalAdapter:
        """Raises ConfigError."""
        raise ConfigError("replicas take no adapters")

    async def unload_adapter(self, name: str) -> None:
        """Raises InvalidRequest."""
        raise InvalidRequest(f"no adapter {name!r:.80} is loaded")

    @property
    def can_end_reasoning(self) -> bool:
        """Whether thinking_token_budget is taken."""
        return self._can_end_reasoning

    async def count(self, prompt: PromptInput) -> int:
        """Tokens of a prompt with its media, as a replica prepares it. Raises what comes out of a stream."""
        async with with_fetched_media(Prompt.of(prompt)) as given:
            return await self._count(given)

    async def _count(self, given: Prompt) -> int:
        ask = ReplicaRequest(self._new_id(), wire_prompt(given), SamplingParams(), is_count=True)
        for _ in range(COUNT_TRIES):
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(self._patience.patience_s):
                    async for word in self._carrier.call(affinity(given), encode(ask)):
                        match decode_message(word):
                            case Accepted(num_prompt_tokens=count):
                                return count
                            case Rejection() as refused:
                                raise refused.error()
        raise RequestFailed("no replica counted the prompt's tokens; try again later")

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """As AsyncEngine's, with a seed that is drawn here, so that all replicas draw alike. `hold` changes
        nothing where nothing is kept."""
        asked = make_options(sampling, options)
        asked.check()
        if asked.outputs or asked.sample_index:
            raise InvalidRequest("outputs and sample_index are the fleet's own; leave them out")
        seed = secrets.randbits(63) if asked.sampling.seed is None else asked.sampling.seed
        params = msgspec.structs.replace(asked.sampling, seed=seed)
        name = asked.request_id or self._new_id()
        asked = replace(asked, sampling=params, request_id=name)
        channel = Channel(asked, OutputText(self._processor.tokenizer, params), hold)
        channel.request_id = name
        if len(self._open) >= self._max_open:
            raise QueueFull(f"{self._max_open} requests are open already; try again later")
        if name in self._names or (self._kept is not None and name in self._kept):
            raise InvalidRequest(f"a request with the id {name!r} is running; ids must differ")
        return self._begin(channel, self._asked(channel, Prompt.of(prompt), options))

    def _begin(self, channel: Channel, way: Coroutine[None, None, None]) -> Stream:
        if self._closing:
            way.close()
            raise InvalidRequest("the engine is closed")
        self._open[channel] = self._loop.create_task(self._answer(channel, way))
        self._names.add(channel.request_id)
        return Stream(channel, self._close_channel, self.release_answers)

    async def _answer(self, channel: Channel, way: Coroutine[None, None, None]) -> None:
        try:
            await way
        except asyncio.CancelledError:
            channel.end(RequestFailed(LEFT if self._leaving else GIVEN_UP))
            if not channel.closed:
                raise
        except Exception as error:
            channel.end(engine_failed(error))
        finally:
            self._names.discard(channel.request_id)
            self._open.pop(channel, None)
            if self._kept is not None and not (channel.is_held or self._leaving):
                self._kept.drop(channel.request_id)  # as it is handed over, it is delivered

    async def _asked(self, channel: Channel, prompt: Prompt, options: SubmitOptions) -> None:
        async with with_fetched_media(prompt, lambda: channel.closed) as given:
            await self._travel(channel, given, options)

    async def _travel(self, channel: Channel, prompt: Prompt, options: SubmitOptions) -> None:
        asked = channel.options
        ask = ReplicaRequest(
            asked.request_id,
            wire_prompt(prompt),
            asked.sampling,
            {key: value for key, value in options.items() if key in PASSED_ON and value is not None},
            options.get("calls"),
            journey=secrets.token_hex(8),
        )
        await self._journey(channel, ask, prompt, ())

    async def _journey(
        self, channel: Channel, ask: ReplicaRequest, prompt: Prompt, said: Iterable[RequestOutput]
    ) -> None:
        """`said`: of the answer by an ingress before this one."""
        salt = channel.options.cache_salt
        if prompt.has_media:  # which may be large
            key = await asyncio.to_thread(affinity, prompt, salt)
        else:
            key = affinity(prompt, salt)
        moved = partial(self._moved, ask.request_id)
        keeper = self._kept if channel.is_held or channel.accepted.is_set else None
        journey = RoutedRequest(ask, key, channel, self._carrier, self._patience, moved, keeper)
        journey.go_on(said)
        self._journeys[channel] = journey
        try:
            await journey.run()
        finally:
            del self._journeys[channel]
            self.metrics.ended(journey.num_tokens)

    def _moved(self, request_id: str, why: str) -> None:
        self.metrics.moves.inc()
        operator_log.info("request moves", request_id=request_id, reason=why)

    def _close_channel(self, channel: Channel) -> None:
        """From any thread."""
        if channel.closed:
            return
        channel.closed = True
        if (task := self._open.get(channel)) is not None:
            journey = self._journeys.get(channel)
            if journey is None or not journey.is_over:  # what is given up is nobody's
                self.release_answers([HeldAnswer(channel.request_id, 1)])
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(task.cancel)

    # Of an ingress before this one

    def recovered_requests(self) -> list[LedgerEntry]:
        """Requests of an ingress before this one that nobody took up yet."""
        return [] if self._kept is None else self._kept.recovered_requests()

    def attach(self, request_id: str, *, hold: bool = False) -> Stream:
        """As AsyncEngine's: what replicas' logs have of its answer comes first."""
        kept = self._taken(request_id)
        sampling, options = kept.ask.sampling, submit_options(kept.ask)
        asked = Options(
            sampling,
            request_id,
            cache_salt=options.get("cache_salt") or "",
            deadline_s=options.get("deadline_s") or 0.0,
            envelope=kept.envelope,
        )
        channel = Channel(asked, OutputText(self._processor.tokenizer, sampling), hold)
        channel.request_id = request_id
        kept.begun.tell(channel)
        return self._begin(channel, self._go_on(channel, kept))

    async def _go_on(self, channel: Channel, kept: LedgerEntry) -> None:
        assert self._kept is not None
        said = await self._kept.heard(kept)
        await self._journey(channel, kept.ask, prompt_from_wire(kept.ask.prompt), said)

    def give_up(self, request_id: str) -> None:
        """Nobody will take up a request of an ingress before. Raises InvalidRequest for one that is not among
        the `recovered_requests`."""
        self.release_answers([HeldAnswer(self._taken(request_id).request_id, 1)])

    def _taken(self, request_id: str) -> LedgerEntry:
        if self._kept is not None:
            with suppress(KeyError):
                return self._kept.take(request_id)
        raise InvalidRequest(f"no request {request_id!r} of the process before waits to be taken up")

    def release_answers(self, answers: list[HeldAnswer]) -> None:
        """These answers, of streams that held them, are where they will not be lost."""
        if self._kept is None or self._leaving:
            return
        for answer in answers:
            self._kept.drop(answer.request_id)

    async def settled(self) -> None:
        """Wait until what was let go before stays so. Raises RequestFailed."""
        if self._kept is not None:
            await self._kept.settled()

    def tell_times(self, told: Callable[[str, Times], None]) -> None:
        """What of an answer began when, its replicas know: spans have no children here."""

    # How it is

    def stats(self) -> Stats:
        """Tokens that were forwarded, and the requests that are open."""
        live = sum(journey.num_tokens for journey in self._journeys.values())
        return Stats(num_output_tokens=self.metrics.num_tokens + live, num_running=len(self._open))

    def readiness(self) -> Readiness:
        """Not ready while nothing is heard of a request, which shows that no replica takes any."""
        if self._closing:
            return Readiness(("the engine is closed",), is_over=True)
        now = time.monotonic()
        silent_s = max(
            (now - each.news_at for each in self._journeys.values() if each.is_unheard), default=0.0
        )
        if silent_s <= STRANDED_S:
            return Readiness()
        return Readiness((f"no replica has taken a request for {silent_s:.0f} seconds",))

    async def close(self, *, drain: bool = True, leave: bool = False) -> None:
        """Take no more requests, and finish those that run (`drain`), or give them up, or `leave` those that
        are kept to the next ingress, and give the others up. Closing twice is no error."""
        self._closing, self._leaving = True, leave
        for channel, task in [] if drain and not leave else list(self._open.items()):
            if leave and self._kept is not None and channel.request_id in self._kept:
                self._loop.call_soon(task.cancel)  # behind its beginning, without which it has no end
            else:
                self._close_channel(channel)
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        if self._kept is not None:
            self._kept.close()

"""Many replicas as one engine, for a server: what AsyncEngine is, without a model."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Unpack

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric

from mmengine.config import EngineConfig
from mmengine.core.outputs import Stats
from mmengine.errors import ConfigError, InvalidRequest, QueueFull, RequestFailed
from mmengine.fleet.journey import Carrier, Journey, Patience, ReplicaLost
from mmengine.fleet.routing import affinity
from mmengine.fleet.wire import Ask, Begun, Refused, asked_prompt, decoded_told, encoded
from mmengine.models.plugin import Processor
from mmengine.processing.workers.attempt import GIVEN_UP
from mmengine.request import SamplingParams
from mmengine.serve.adapters import KnownAdapter
from mmengine.serve.answers import engine_failed
from mmengine.serve.async_forms import AsyncForms
from mmengine.serve.channel import Channel
from mmengine.serve.health import Readiness
from mmengine.serve.left import Left
from mmengine.serve.media_urls import PromptMedia, names_urls
from mmengine.serve.operators import operator_log
from mmengine.serve.options import SUBMIT, SubmitOptions, make_options
from mmengine.serve.prompts import Prompt, Prompted, request_ids
from mmengine.serve.reasoning import Reasoning
from mmengine.serve.request_times import Times
from mmengine.serve.stream import Held, Stream
from mmengine.serve.texts import AnswerTexts

COUNT_TRIES = 3  # replicas that may be lost while a prompt is counted
STRANDED_S = 5.0  # without a word of a request, after which no other should be sent
PASSED_ON = SUBMIT - {"request_id", "calls", "outputs", "sample_index"}  # as they are; an Ask names these


class FleetEngine(AsyncForms):
    """`processor`, `config`: those of the replicas' model. `max_open`: requests that may be open at once; one
    more raises QueueFull. It keeps what was said of each request and nothing else: its own end is a broken
    connection to all of its callers. It must be made on the event loop that it belongs to."""

    metrics: "FleetMetrics"

    def __init__(
        self,
        carrier: Carrier,
        processor: Processor,
        config: EngineConfig,
        max_open: int,
        patience: Patience = Patience(),  # noqa: B008 (it is frozen)
    ):
        self._carrier, self._processor, self.config = carrier, processor, config
        self._max_open, self._patience = max_open, patience
        self._loop = asyncio.get_running_loop()
        self._open: dict[Channel, asyncio.Task[None]] = {}
        self._journeys: dict[Channel, Journey] = {}  # of those whose prompts are here
        self._names: set[str] = set()  # of the requests that are open
        self._new_id = request_ids()
        markers = config.reasoning_start, config.reasoning_end
        reasoning = Reasoning(processor.tokenizer, config.eos_token_ids, *markers)
        self._can_end_reasoning = reasoning.can_end
        self._closing = False
        self.metrics = FleetMetrics(lambda: len(self._open))

    @property
    def processor(self) -> Processor:
        return self._processor

    @property
    def has_log(self) -> bool:
        """False: what is accepted ends with this process. The replicas' logs are evidence, not work."""
        return False

    @property
    def max_open(self) -> int:
        return self._max_open

    @property
    def adapters(self) -> tuple[KnownAdapter, ...]:
        """None: replicas are given no adapters."""
        return ()

    async def load_adapter(self, name: str, source: str) -> KnownAdapter:
        """Raises ConfigError."""
        raise ConfigError("replicas take no adapters")

    async def unload_adapter(self, name: str) -> None:
        """Raises InvalidRequest."""
        raise InvalidRequest(f"no adapter {name!r:.80} is loaded")

    @property
    def can_end_reasoning(self) -> bool:
        """Whether thinking_token_budget is taken."""
        return self._can_end_reasoning

    async def count(self, prompt: Prompted) -> int:
        """Tokens of a prompt with its media, as a replica prepares it. Raises what comes out of a stream."""
        given = Prompt.of(prompt)
        if names_urls(given):
            media = await asyncio.to_thread(PromptMedia, given)
            given = await asyncio.to_thread(media.prompt)
            media.release()
        ask = Ask(self._new_id(), asked_prompt(given), SamplingParams(), is_count=True)
        for _ in range(COUNT_TRIES):
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(self._patience.patience_s):
                    async for word in self._carrier.call(affinity(given), encoded(ask)):
                        match decoded_told(word):
                            case Begun(num_prompt_tokens=count):
                                return count
                            case Refused() as refused:
                                raise refused.error()
        raise RequestFailed("no replica counted the prompt's tokens; try again later")

    def stream(
        self,
        prompt: Prompted,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """As AsyncEngine's, with a seed that is drawn here, so that all replicas draw alike. `hold` changes
        nothing: no log has the answer for anybody else."""
        asked = make_options(sampling, options)
        asked.check()
        if asked.outputs or asked.sample_index:
            raise InvalidRequest("outputs and sample_index are the fleet's own; leave them out")
        seed = secrets.randbits(63) if asked.sampling.seed is None else asked.sampling.seed
        params = msgspec.structs.replace(asked.sampling, seed=seed)
        name = asked.request_id or self._new_id()
        asked = replace(asked, sampling=params, request_id=name)
        channel = Channel(asked, AnswerTexts(self._processor.tokenizer, params), hold)
        channel.request_id = name
        if self._closing:
            raise InvalidRequest("the engine is closed")
        if len(self._open) >= self._max_open:
            raise QueueFull(f"{self._max_open} requests are open already; try again later")
        if name in self._names:
            raise InvalidRequest(f"a request with the id {name!r} is running; ids must differ")
        self._open[channel] = self._loop.create_task(self._answer(channel, Prompt.of(prompt), options))
        self._names.add(name)
        return Stream(channel, self._close_channel, self.let_go)

    async def _answer(self, channel: Channel, prompt: Prompt, options: SubmitOptions) -> None:
        media: PromptMedia | None = None
        try:
            if names_urls(prompt):  # here, so that whoever goes on has the same bytes
                media = await asyncio.to_thread(PromptMedia, prompt, None, lambda: channel.closed)
                prompt = await asyncio.to_thread(media.prompt)
            await self._travel(channel, prompt, options)
        except asyncio.CancelledError:
            channel.end(RequestFailed(GIVEN_UP))
            if not channel.closed:
                raise
        except Exception as error:
            channel.end(engine_failed(error))
        finally:
            if media is not None:
                media.release()
            self._names.discard(channel.request_id)
            self._open.pop(channel, None)

    async def _travel(self, channel: Channel, prompt: Prompt, options: SubmitOptions) -> None:
        asked = channel.options
        ask = Ask(
            asked.request_id,
            asked_prompt(prompt),
            asked.sampling,
            {key: value for key, value in options.items() if key in PASSED_ON and value is not None},
            options.get("calls"),
            journey=secrets.token_hex(8),
        )
        if prompt.has_media:  # which may be large
            key = await asyncio.to_thread(affinity, prompt, asked.cache_salt)
        else:
            key = affinity(prompt, asked.cache_salt)
        moved = partial(self._moved, asked.request_id)
        journey = Journey(ask, key, channel, self._carrier, self._patience, moved)
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
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(task.cancel)

    # Of a process before this one there is nothing here

    def left(self) -> list[Left]:
        return []

    def attach(self, request_id: str, *, hold: bool = False) -> Stream:
        raise InvalidRequest(f"no request {request_id!r} of the process before waits to be taken up")

    def give_up(self, request_id: str) -> None:
        raise InvalidRequest(f"no request {request_id!r} of the process before waits to be taken up")

    def let_go(self, answers: list[Held]) -> None:
        """What no log holds needs no letting go."""

    async def settled(self) -> None:
        """There is no log to wait for."""

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
        """Take no more requests, and finish those that run (`drain`), or give them up: `leave` too, for here
        is no log to leave them in."""
        self._closing = True
        tasks = list(self._open.values())
        if not drain or leave:
            for channel in list(self._open):
                self._close_channel(channel)
        await asyncio.gather(*tasks, return_exceptions=True)


class FleetMetrics:
    """What an ingress counts; its replicas count the rest."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.moves = Counter(
            "mmengine_fleet_moves", "Times that a request went on elsewhere.", registry=registry
        )
        self.num_tokens = 0  # of answers that ended
        self._tokens = Counter("mmengine_fleet_tokens", "Tokens of answers that ended.", registry=registry)
        Gauge("mmengine_fleet_open", "Requests that are open.", registry=registry).set_function(num_open)

    def ended(self, num_tokens: int) -> None:
        """An answer ended, of which so many tokens were forwarded."""
        self.num_tokens += num_tokens
        self._tokens.inc(num_tokens)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()

"""FleetEngine: has AsyncEngine's methods but no model, and forwards requests to replicas."""

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
from mmengine.errors import ConfigError, ErrorCode, InvalidRequest, QueueFull, RequestFailed, id_in_use
from mmengine.fleet.attempt import Carrier, ReplicaLost, RoutingLimits
from mmengine.fleet.durable_requests import DurableRequests
from mmengine.fleet.ledger import LedgerEntry
from mmengine.fleet.metrics import FleetMetrics
from mmengine.fleet.routed_request import RoutedRequest
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
from mmengine.models.box_unit import BoxUnit, unknown_unit
from mmengine.models.plugin import Processor
from mmengine.processing.workers.attempt import GIVEN_UP
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.typed_answers import AsyncAnswers
from mmengine.serve.pooling.calls import Jobs
from mmengine.serve.pooling.pooled_model import PooledModel
from mmengine.serve.prompt.fetched_media import with_fetched_media
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
from mmengine.serve.text.request_output import Completion, RequestOutput, engine_failed

COUNT_TRIES = 3  # maximum number of attempts to count a prompt's tokens on a replica
STRANDED_S = 5.0  # seconds that a request may wait for a message before the fleet counts as not ready
LEFT = "the ingress ends; the request is kept and continues when another ingress serves with the same --log"
# Options that are sent as `ReplicaRequest.options`. ReplicaRequest has separate fields for the other options.
FORWARDED = SUBMIT - {"request_id", "calls", "outputs", "sample_index"}


class FleetEngine(AsyncAnswers):
    """The engine of an ingress: a server without a model, which forwards requests to replicas.

    `processor` and `config` belong to the replicas' model. A new request raises QueueFull while `max_open`
    requests are open. When this process ends, the streams of all callers break. `durable`: stores the
    requests that callers submit with `hold=True`, so that the next ingress continues these requests. This
    engine closes `durable`. `box_unit`: returns the unit for the model's box coordinates, or raises
    InvalidRequest. An instance must be created on its event loop.
    """

    metrics: FleetMetrics

    def __init__(
        self,
        carrier: Carrier,
        processor: Processor,
        config: EngineConfig,
        max_open: int,
        limits: RoutingLimits = RoutingLimits(),  # noqa: B008 (it is frozen)
        durable: DurableRequests | None = None,
        box_unit: Callable[[], BoxUnit] = unknown_unit,
    ):
        self._durable, self._box_unit = durable, box_unit
        self._carrier, self._processor, self.config = carrier, processor, config
        self._max_open, self._limits = max_open, limits
        self._loop = asyncio.get_running_loop()
        self._open: dict[Channel, asyncio.Task[None]] = {}
        self._routed: dict[Channel, RoutedRequest] = {}  # requests whose media have been fetched
        self._names: set[str] = set()  # ids of open requests
        self._new_id = request_ids()
        markers = config.reasoning_start, config.reasoning_end
        reasoning = Reasoning(processor.tokenizer, config.eos_token_ids, *markers)
        self._can_end_reasoning = reasoning.can_end
        self._is_closing = self._leaves = False
        self.metrics = FleetMetrics(lambda: len(self._open))

    @property
    def processor(self) -> Processor:
        return self._processor

    @property
    def has_log(self) -> bool:
        """False, because a request without `hold` ends with this process."""
        return False

    @property
    def keeps_held(self) -> bool:
        """Whether requests with `hold` survive this process's end."""
        return self._durable is not None

    @property
    def pooled(self) -> PooledModel:
        """The PooledModel for the task "chat", because replicas send no vectors."""
        return PooledModel()

    @property
    def width(self) -> int:
        """The length of pooled vectors: 0, because replicas send no vectors."""
        return 0

    def box_unit(self) -> BoxUnit:
        """Return the unit for the model's box coordinates. Raises InvalidRequest if the plugin declares no
        unit.
        """
        return self._box_unit()

    async def pool(self, jobs: Jobs) -> list[Completion]:
        """Raise InvalidRequest, because replicas send no vectors."""
        raise InvalidRequest(
            "vectors belong to one engine, and this server has several; send the call to one engine's server",
            code=ErrorCode.UNSUPPORTED_FIELD,
        )

    @property
    def max_open(self) -> int:
        return self._max_open

    @property
    def adapters(self) -> tuple[LocalAdapter, ...]:
        """Empty, because replicas do not support adapters."""
        return ()

    async def load_adapter(self, name: str, source: str) -> LocalAdapter:
        """Raise ConfigError, because replicas do not support adapters."""
        raise ConfigError("replicas do not support adapters")

    async def unload_adapter(self, name: str) -> None:
        """Raise InvalidRequest, because replicas do not support adapters."""
        raise InvalidRequest(f"no adapter {name!r:.80} is loaded")

    @property
    def can_end_reasoning(self) -> bool:
        """Whether thinking_token_budget is supported."""
        return self._can_end_reasoning

    async def count(self, prompt: PromptInput) -> int:
        """Return the number of tokens in a prompt, including media, as counted by a replica.

        Raises the same errors as a stream does.
        """
        async with with_fetched_media(Prompt.of(prompt)) as fetched:
            return await self._count(fetched)

    async def _count(self, prompt: Prompt) -> int:
        request = ReplicaRequest(self._new_id(), wire_prompt(prompt), SamplingParams(), is_count=True)
        for _ in range(COUNT_TRIES):
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(self._limits.patience_s):
                    async for message in self._carrier.call(affinity(prompt), encode(request)):
                        match decode_message(message):
                            case Accepted(num_prompt_tokens=count):
                                return count
                            case Rejection() as rejection:
                                raise rejection.error()
        raise RequestFailed("no replica counted the prompt's tokens; try again later")

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """Submit a prompt as `AsyncEngine.stream` does. A missing seed is chosen here, so that all replicas
        use the same seed.

        `hold` has no effect without `durable`.
        """
        given = make_options(sampling, options)
        given.check()
        if given.outputs or given.sample_index:
            raise InvalidRequest("outputs and sample_index are set by the fleet; leave them out")
        seed = secrets.randbits(63) if given.sampling.seed is None else given.sampling.seed
        params = msgspec.structs.replace(given.sampling, seed=seed)
        name = given.request_id or self._new_id()
        channel = Channel(
            replace(given, sampling=params, request_id=name),
            OutputText(self._processor.tokenizer, params),
            hold,
        )
        channel.request_id = name
        if len(self._open) >= self._max_open:
            raise QueueFull(f"{self._max_open} requests are open, which is the limit: try again later")
        if name in self._names or (self._durable is not None and name in self._durable):
            raise id_in_use(name)
        return self._begin(channel, self._run_new(channel, Prompt.of(prompt), options))

    def _begin(self, channel: Channel, answer: Coroutine[None, None, None]) -> Stream:
        if self._is_closing:
            answer.close()
            raise InvalidRequest("the engine is closed")
        self._open[channel] = self._loop.create_task(self._run(channel, answer))
        self._names.add(channel.request_id)
        return Stream(channel, self._close_channel, self.release_answers)

    async def _run(self, channel: Channel, answer: Coroutine[None, None, None]) -> None:
        try:
            await answer
        except asyncio.CancelledError:
            channel.end(RequestFailed(LEFT if self._leaves else GIVEN_UP))
            if not channel.closed:
                raise
        except Exception as error:
            channel.end(engine_failed(error))
        finally:
            self._names.discard(channel.request_id)
            self._open.pop(channel, None)
            if self._durable is not None and not (channel.is_held or self._leaves):
                self._durable.drop(channel.request_id)  # an answer without `hold` has been delivered by now

    async def _run_new(self, channel: Channel, prompt: Prompt, options: SubmitOptions) -> None:
        async with with_fetched_media(prompt, lambda: channel.closed) as fetched:
            request = ReplicaRequest(
                channel.options.request_id,
                wire_prompt(fetched),
                channel.options.sampling,
                {key: value for key, value in options.items() if key in FORWARDED and value is not None},
                options.get("calls"),
                route=secrets.token_hex(8),
            )
            await self._route(channel, request, fetched, ())

    async def _run_recovered(self, channel: Channel, entry: LedgerEntry) -> None:
        assert self._durable is not None
        outputs = await self._durable.logged_outputs(entry)
        await self._route(channel, entry.request, prompt_from_wire(entry.request.prompt), outputs)

    async def _route(
        self, channel: Channel, request: ReplicaRequest, prompt: Prompt, outputs: Iterable[RequestOutput]
    ) -> None:
        """Run a request to its end. `outputs`: a recovered request's outputs in the replicas' logs."""
        salt = channel.options.cache_salt
        if prompt.has_media:  # hashing media may take long
            key = await asyncio.to_thread(affinity, prompt, salt)
        else:
            key = affinity(prompt, salt)
        moved = partial(self._count_move, request.request_id)
        keeper = self._durable if channel.is_held or channel.accepted.is_set else None
        routed = RoutedRequest(request, key, channel, self._carrier, self._limits, moved, keeper)
        routed.restore(outputs)
        self._routed[channel] = routed
        try:
            await routed.run()
        finally:
            del self._routed[channel]
            self.metrics.ended(routed.num_tokens)

    def _count_move(self, request_id: str, reason: str) -> None:
        self.metrics.moves.inc()
        operator_log.info("request moves", request_id=request_id, reason=reason)

    def _close_channel(self, channel: Channel) -> None:
        """Cancel a request. Thread-safe."""
        if channel.closed:
            return
        channel.closed = True
        if (task := self._open.get(channel)) is not None:
            routed = self._routed.get(channel)
            if routed is None or not routed.is_over:  # a cancelled request is not kept
                self.release_answers([HeldAnswer(channel.request_id, 1)])
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(task.cancel)

    # Requests that the previous ingress accepted

    def recovered_requests(self) -> list[LedgerEntry]:
        """Return the previous ingress's requests that no caller has attached to yet."""
        return [] if self._durable is None else self._durable.recovered_requests()

    def attach(self, request_id: str, *, hold: bool = False) -> Stream:
        """Return the stream of a recovered request. Outputs from the replicas' logs come first."""
        entry = self._claim(request_id)
        sampling, options = entry.request.sampling, submit_options(entry.request)
        given = Options(
            sampling,
            request_id,
            cache_salt=options.get("cache_salt") or "",
            deadline_s=options.get("deadline_s") or 0.0,
            envelope=entry.envelope,
        )
        channel = Channel(given, OutputText(self._processor.tokenizer, sampling), hold)
        channel.request_id = request_id
        entry.accepted.tell(channel)
        return self._begin(channel, self._run_recovered(channel, entry))

    def give_up(self, request_id: str) -> None:
        """Drop a recovered request. Raises InvalidRequest if it is not among `recovered_requests`."""
        self.release_answers([HeldAnswer(self._claim(request_id).request_id, 1)])

    def _claim(self, request_id: str) -> LedgerEntry:
        if self._durable is not None:
            with suppress(KeyError):
                return self._durable.claim(request_id)
        raise InvalidRequest(f"no request {request_id!r} of the previous process waits to be attached")

    def release_answers(self, answers: list[HeldAnswer]) -> None:
        """Drop requests with `hold` whose answers have been stored or are no longer needed."""
        if self._durable is None or self._leaves:
            return
        for answer in answers:
            self._durable.drop(answer.request_id)

    async def settled(self) -> None:
        """Wait until all earlier `release_answers` calls have reached the disk. Raises RequestFailed."""
        if self._durable is not None:
            await self._durable.settled()

    def tell_times(self, report: Callable[[str, Times], None]) -> None:
        """Do nothing. Only the replicas know the times, so an ingress's tracing spans have no children."""

    # State

    def stats(self) -> Stats:
        """Return the numbers of forwarded tokens and of open requests."""
        live = sum(routed.num_tokens for routed in self._routed.values())
        return Stats(num_output_tokens=self.metrics.num_tokens + live, num_running=len(self._open))

    def readiness(self) -> Readiness:
        """Return "not ready" if a request has waited longer than STRANDED_S for a message from any
        replica.
        """
        if self._is_closing:
            return Readiness(("the engine is closed",), is_over=True)
        now = time.monotonic()
        silent_s = max((now - each.news_at for each in self._routed.values() if each.is_unheard), default=0.0)
        if silent_s <= STRANDED_S:
            return Readiness()
        return Readiness((f"no replica has taken a request for {silent_s:.0f} seconds",))

    async def close(self, *, drain: bool = True, leave: bool = False) -> None:
        """Refuse new requests and end the running ones.

        With `drain`, running requests finish; otherwise they are cancelled. With `leave`, durable requests
        stay for the next ingress, and all others are cancelled. Closing twice is no error.
        """
        self._is_closing, self._leaves = True, leave
        for channel, task in [] if drain and not leave else list(self._open.items()):
            if leave and self._durable is not None and channel.request_id in self._durable:
                # deferred, because a task that is cancelled before its first step does not end its channel
                self._loop.call_soon(task.cancel)
            else:
                self._close_channel(channel)
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        if self._durable is not None:
            self._durable.close()

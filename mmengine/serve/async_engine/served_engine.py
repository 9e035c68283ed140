"""The engine interface that the server uses. AsyncEngine and the replica fleet implement it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Unpack

from prometheus_client import Metric

from mmengine.config import EngineConfig
from mmengine.core.outputs import Stats
from mmengine.models.box_unit import BoxUnit
from mmengine.models.plugin import Processor
from mmengine.request import SamplingParams
from mmengine.serve.pooling.calls import Jobs
from mmengine.serve.pooling.pooled_model import PooledModel
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.prompt.prompt import PromptInput
from mmengine.serve.requests.adapters import LocalAdapter
from mmengine.serve.requests.health import Readiness
from mmengine.serve.requests.recovery import UnclaimedRequest
from mmengine.serve.requests.request_times import Times
from mmengine.serve.stream.request_stream import HeldAnswer, Stream
from mmengine.serve.text.request_output import Completion


class Collects(Protocol):
    """A collector for prometheus_client's registry."""

    def collect(self) -> Iterable[Metric]: ...


class ServedEngine(Protocol):
    """The engine members that the server uses. AsyncEngine documents each member."""

    config: EngineConfig

    @property
    def processor(self) -> Processor: ...

    @property
    def metrics(self) -> Collects: ...

    @property
    def has_log(self) -> bool: ...

    @property
    def keeps_held(self) -> bool: ...

    @property
    def max_open(self) -> int: ...

    @property
    def adapters(self) -> tuple[LocalAdapter, ...]: ...

    async def load_adapter(self, name: str, source: str) -> LocalAdapter: ...

    async def unload_adapter(self, name: str) -> None: ...

    @property
    def pooled(self) -> PooledModel: ...

    @property
    def width(self) -> int: ...

    async def pool(self, jobs: Jobs) -> list[Completion]: ...

    def box_unit(self) -> BoxUnit: ...

    @property
    def can_end_reasoning(self) -> bool: ...

    async def count(self, prompt: PromptInput) -> int: ...

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream: ...

    async def generate(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Completion: ...

    def recovered_requests(self) -> Sequence[UnclaimedRequest]: ...

    def attach(self, request_id: str, *, hold: bool = False) -> Stream: ...

    def give_up(self, request_id: str) -> None: ...

    def release_answers(self, answers: list[HeldAnswer]) -> None: ...

    async def settled(self) -> None: ...

    def tell_times(self, report: Callable[[str, Times], None]) -> None: ...

    def stats(self) -> Stats: ...

    def readiness(self) -> Readiness: ...

    async def close(self, *, drain: bool = True, leave: bool = False) -> None: ...

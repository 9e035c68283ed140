"""Measures requests' latencies, such as time to first token, and records them in histograms.

All rows that get a token in two consecutive steps have the same inter-token time. A single `add` with the row
count records this time.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import HistogramMetricFamily, Metric

from mmengine.core.outputs import Output
from mmengine.events.vocabulary import ANSWERED
from mmengine.request import Request

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Buckets:
    """A histogram to which a single call can add several equal values.

    Only a single thread may add values; any thread may collect.
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]):
        self._name, self._help, self._bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Metric:
        family, total = HistogramMetricFamily(self._name, self._help), 0
        buckets = []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([], buckets, self._sum)
        return family


class Times(NamedTuple):
    """The times when an ended answer reached each stage, in seconds on the monotonic clock; 0 if never.

    `begun`: when the preparation began, or the submission time of a request without preparation.
    """

    begun: float
    queued: float
    admitted: float
    first: float
    last: float
    over: float


@dataclass(slots=True)
class _Live:
    """The times when a running answer reached each stage, as in Times; 0 for stages not yet reached."""

    begun: float  # as in Times
    queued: float
    num_prompt: int
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0  # when the newest tokens arrived
    num_tokens: int = 0


class RequestTimes:
    """An engine's request latencies and token counts, as histograms."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        # Called when an answer has ended, with the core's request id and the times.
        self.report: Callable[[str, Times], None] | None = None
        self._before = -1.0  # when the last step with outputs returned
        self._all: list[Buckets] = []
        self._preparation = self._new("request_preparation_seconds", "Time from a call to its submission.")
        self._queue = self._new("request_queue_seconds", "Time from submission to the first step.")
        self._first = self._new("time_to_first_token_seconds", "Time from a call to its first token.")
        self._prefill = self._new("request_prefill_seconds", "Time from the first step to the first token.")
        self._decode = self._new("request_decode_seconds", "Time from the first token to the last.")
        self._inference = self._new(
            "request_inference_seconds", "Time from the first step to the last token."
        )
        self._whole = self._new("request_seconds", "Time from a call to its end.")
        text = "Time between two steps that gave a request tokens."
        self._between = self._new("inter_token_seconds", text, TOKEN_SECONDS)
        text = "Mean time between tokens of a request."
        self._mean = self._new("time_per_output_token_seconds", text, TOKEN_SECONDS)
        self._prompt = self._new("request_prompt_tokens", "Tokens of prompts that were answered.", COUNTS)
        self._output = self._new("request_output_tokens", "Tokens of answers.", COUNTS)
        self._most = self._new("request_max_tokens", "Maximum tokens of answers.", COUNTS)
        self._choices = self._new("request_choices", "Answers requested for a prompt.", CHOICES)
        self._step = self._new("step_tokens", "Tokens that a step computed.", COUNTS)

    def _new(self, name: str, help_text: str, bounds: Sequence[float] = SECONDS) -> Buckets:
        self._all.append(Buckets(f"mmengine_{name}", help_text, bounds))
        return self._all[-1]

    def submitted(self, request: Request, num_choices: int, prepared_s: float) -> None:
        """Record that one of a request's `num_choices` answers was submitted, after `prepared_s` seconds in
        preparation.
        """
        now = time.monotonic()
        num_prompt = len(request.prompt_token_ids)
        self._live[request.request_id] = _Live(now - prepared_s, now, num_prompt)
        self._most.add(request.sampling.max_tokens)
        if request.sample_index == 0:
            self._choices.add(num_choices)
            self._preparation.add(prepared_s)

    def saw_step(self, outputs: Sequence[Output], admitted: Sequence[str], num_scheduled: int) -> None:
        """Record new outputs, newly admitted requests, and the number of tokens scheduled since the last
        call.
        """
        now = time.monotonic()
        if num_scheduled:
            self._step.add(num_scheduled)
        for name in admitted:
            live = self._live.get(name)
            if live is not None and not live.admitted:
                live.admitted = now
                self._queue.add(now - live.queued)
        if outputs:
            self._take(outputs, now)
            self._before = now

    def _take(self, outputs: Sequence[Output], now: float) -> None:
        find, before, num_regular = self._live.get, self._before, 0
        for output in outputs:  # must be fast, because it runs for each row of each step
            live = find(output.request_id)
            if live is None:
                continue
            if output.token_ids:
                if live.last == before:
                    num_regular += 1
                elif live.last:
                    self._between.add(now - live.last)
                else:
                    self._begun(live, now)
                live.last = now
                live.num_tokens += len(output.token_ids)
            if output.finish_reason is not None and output.finish_reason in ANSWERED:
                self._ended(live, now)
        if num_regular:
            self._between.add(now - before, num_regular)

    def _begun(self, live: _Live, now: float) -> None:
        live.first = now
        self._first.add(now - live.begun)
        self._prefill.add(now - live.admitted)

    def _ended(self, live: _Live, now: float) -> None:
        self._whole.add(now - live.begun)
        self._prompt.add(live.num_prompt)
        self._output.add(live.num_tokens)
        if live.num_tokens:
            self._decode.add(live.last - live.first)
            self._inference.add(live.last - live.admitted)
        if live.num_tokens > 1:
            self._mean.add((live.last - live.first) / (live.num_tokens - 1))

    def release(self, request_id: str) -> None:
        """Report and forget a request that has ended. An unknown id is no error."""
        live = self._live.pop(request_id, None)
        if live is not None and self.report is not None:
            over = time.monotonic()
            self.report(
                request_id, Times(live.begun, live.queued, live.admitted, live.first, live.last, over)
            )

    def collect(self) -> Iterator[Metric]:
        for buckets in self._all:
            yield buckets.collect()

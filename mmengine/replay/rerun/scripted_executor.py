"""An executor that returns each request's answer from a script. Step durations come from a cost model."""

from collections.abc import Callable, Mapping

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult, room_of
from mmengine.errors import ExecutorFailed
from mmengine.replay.rerun.script import Answer
from mmengine.request import Request
from mmengine.simulation.device import Cost, Observer, TimedExecutor
from mmengine.simulation.sampled_rows import sampled_rows
from mmengine.simulation.simulated_executor import CostModel

# For each row that ends: the index in the step's rows, and the stop or error.
Ends = tuple[tuple[int, str], ...]
_ODD, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class ScriptedExecutor(TimedExecutor):
    """Returns the tokens of each request's answer. If a request continues after its answer in the script,
    made-up tokens follow.

    `failed_steps`: the error message for each step that must fail. If the log had drafts at a position, the
    same number of drafts is accepted. At all other positions, each draft is right with the probability
    `acceptance`. The results are deterministic.
    """

    def __init__(
        self,
        config: EngineConfig,
        answers: Mapping[str, Answer],
        *,
        cost: Cost = CostModel(),  # noqa: B008 - frozen
        host_ns: Callable[[int], int] = lambda num_rows: 0,
        observers: tuple[Observer, ...] = (),
        failed_steps: Mapping[int, str] | None = None,
        acceptance: float = 0.0,
    ):
        super().__init__(cost, observers, host_ns)
        self._config, self._answers = config, answers
        self._failed_steps = failed_steps or {}
        self._acceptance = acceptance
        rows, width = config.max_num_seqs, config.max_model_len + config.num_draft_tokens + 1
        self._tokens = np.zeros((rows, width), np.int32)  # Indexed by row and output index.
        self._num_prompt = np.zeros(rows, np.int64)
        # Output index at which a stop or an error ends the answer, or -1.
        self._ends_at = np.zeros(rows, np.int64)
        self._end: list[Answer | None] = [None] * rows
        # Indexed by row and output index. Each entry describes the logged step that began at this output
        # index: how many tokens the step returned (0: unknown), and how many drafts the step had.
        drafted = (rows, width) if config.num_draft_tokens else (0, 0)
        self._given, self._offered = np.zeros(drafted, np.int8), np.zeros(drafted, np.int8)
        # Total number of prompt and answer tokens at which the request ends by length.
        self._room = np.zeros(rows, np.int64)

    def _set_row(self, row: int, request: Request) -> None:
        answer = self._answers[request.request_id]
        count = len(answer.tokens)
        width = self._tokens.shape[1]
        self._num_prompt[row] = len(request.prompt_token_ids)
        longest = min(request.sampling.max_tokens, width)
        self._tokens[row, :longest] = np.arange(longest) % 997
        self._tokens[row, : min(count, width)] = answer.tokens[:width]
        self._ends_at[row] = count - 1 if answer.stop else count if answer.error else -1
        self._end[row] = answer
        if self._config.num_draft_tokens:
            index, given, drafts = answer.runs[answer.runs[:, 0] < width].T
            self._given[row] = 0
            self._given[row, index], self._offered[row, index] = given, drafts
        total = self._num_prompt[row] + request.sampling.max_tokens
        self._room[row] = min(int(total), self._config.max_model_len)

    def _run(self, plan: StepPlan, device_ns: int) -> StepResult:
        if plan.step in self._failed_steps:
            raise ExecutorFailed(self._failed_steps[plan.step])
        sampled = sampled_rows(plan)
        rows, num_known = sampled.rows, sampled.num_known
        if not self._config.num_draft_tokens:
            return self._one_each(rows, num_known, device_ns)
        most = int(sampled.num_drafts.max(initial=0))
        index = (num_known - self._num_prompt[rows])[:, None] + np.arange(most + 1)
        tokens = self._tokens[rows[:, None], np.minimum(index, self._tokens.shape[1] - 1)]
        counts = np.ones(len(rows), np.int64)
        if most:
            counts += sampled.accepted(plan.input_ids, tokens)
            counts = np.minimum(counts, np.maximum(self._room[rows] - num_known, 1))
        ends = (index == self._ends_at[rows][:, None]) & (np.arange(most + 1) < counts[:, None])
        ended = ends.any(axis=1).nonzero()[0]
        counts[ended] = ends[ended].argmax(axis=1) + 1
        stops, errors = self._ends(rows, ended)
        given = np.arange(most + 1) < counts[:, None]
        room = room_of(plan, np.zeros(len(rows), np.intp))
        drafts, num_next = self._draft(rows, num_known + counts, ended, room)
        return StepResult(
            tokens[given],
            stops,
            errors,
            device_ns=device_ns,
            counts=counts.astype(np.int32) if plan.num_drafts is not None else None,
            drafts=drafts,
            num_drafts=num_next,
        )

    def _one_each(self, rows: np.ndarray, num_known: np.ndarray, device_ns: int) -> StepResult:
        """Return the result of a step without drafts. Most steps in `log minimize` have no drafts, so this
        method must be fast.
        """
        index = num_known - self._num_prompt[rows]
        tokens = self._tokens[rows, np.minimum(index, self._tokens.shape[1] - 1)]
        stops, errors = self._ends(rows, (index == self._ends_at[rows]).nonzero()[0])
        return StepResult(tokens, stops, errors, device_ns=device_ns)

    def _ends(self, rows: np.ndarray, ended: np.ndarray) -> tuple[Ends, Ends]:
        """Return the stops and the errors of the rows at the indices `ended` in `rows`."""
        stops: list[tuple[int, str]] = []
        errors: list[tuple[int, str]] = []
        for place in ended.tolist():
            answer = self._end[rows[place]]
            (errors if answer.error else stops).append((place, answer.error or answer.stop))
        return tuple(stops), tuple(errors)

    def _draft(
        self, rows: np.ndarray, places: np.ndarray, ended: np.ndarray, room: np.ndarray | None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        count = self._config.num_draft_tokens
        if not count:
            return None, None
        index = (places - self._num_prompt[rows])[:, None] + np.arange(count)
        tokens = self._tokens[rows[:, None], np.minimum(index, self._tokens.shape[1] - 1)]
        salt = self._num_prompt[rows].astype(np.uint64) * _ODD + places.astype(np.uint64)
        mixed = (salt[:, None] * np.uint64(count + 1) + np.arange(count, dtype=np.uint64)) * _MIX
        chance = ((mixed ^ (mixed >> np.uint64(29))) * _ODD >> np.uint64(11)).astype(np.float64) / 2.0**53
        luck = np.logical_and.accumulate(chance < self._acceptance, axis=1).sum(axis=1)
        at = rows, np.minimum(index[:, 0], self._given.shape[1] - 1)
        given = self._given[at]
        num_right = np.where(given > 0, given - 1, luck)
        num_next = np.where(given > 0, np.minimum(self._offered[at], count), count)
        num_next[ended] = 0
        if room is not None:
            num_next = np.minimum(num_next, room)
        right = np.arange(count) < num_right[:, None]
        drafts = np.where(right, tokens, (tokens + 1) % 2**30)
        return drafts[np.arange(count) < num_next[:, None]].astype(np.int32), num_next.astype(np.int32)

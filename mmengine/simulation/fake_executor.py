"""The executor of simulations: tokens come from the fake model, and times from a cost model."""

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult, room_of
from mmengine.request import Request
from mmengine.simulation.device import Observer, TimedExecutor
from mmengine.simulation.fake_model import FakeModel
from mmengine.simulation.sampled_rows import sampled_rows
from mmengine.simulation.simulated_executor import CostModel
from mmengine.simulation.workload import SimRequest

BROKEN = "a token breaks the grammar"


class FakeExecutor(TimedExecutor):
    """Executes steps with the fake model. `requests`: request id -> request."""

    def __init__(
        self,
        config: EngineConfig,
        requests: dict[str, SimRequest],
        cost: CostModel,
        observers: tuple[Observer, ...] = (),
    ):
        super().__init__(cost, observers)
        self._config = config
        self._requests = requests
        self._model = FakeModel(config.max_num_seqs)

    def _set_row(self, row: int, request: Request) -> None:
        sim = self._requests[request.request_id]
        num_before = len(request.prompt_token_ids) - sim.num_prompt
        self._model.set_row(row, sim, self._config.max_model_len, num_before)

    def _run(self, plan: StepPlan, device_ns: int) -> StepResult:
        """Return the step's result. Each row that samples gets one token, and one more token per accepted
        draft.
        """
        sampled = sampled_rows(plan)
        rows, num_known = sampled.rows, sampled.num_known
        most = int(sampled.num_drafts.max(initial=0))
        places = num_known[:, None] + np.arange(most + 1)
        tokens = self._model.tokens(rows, places)
        counts = np.ones(len(rows), np.int64)
        if most:
            counts += sampled.accepted(plan.input_ids, tokens)
        counts, stopped = self._ends(rows, num_known, tokens, counts)
        given = np.arange(most + 1) < counts[:, None]
        broken = (self._model.breaks_grammar(rows, places, tokens) & given).any(axis=1)
        room = room_of(plan, np.zeros(len(rows), np.intp))
        drafts, next_counts = self._draft(rows, num_known + counts, stopped | broken, room)
        return StepResult(
            tokens[given].astype(np.int32),
            stops=tuple((index, "token") for index in np.flatnonzero(stopped & ~broken).tolist()),
            errors=tuple((index, BROKEN) for index in np.flatnonzero(broken).tolist()),
            device_ns=device_ns,
            counts=counts.astype(np.int32) if most else None,
            drafts=drafts,
            num_drafts=next_counts,
        )

    def _ends(
        self, rows: np.ndarray, num_known: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's token count, and which rows stopped (bool).

        A row's tokens end after the first stop token, or at the request's length limit. `tokens`: [rows,
        maximum tokens per row]. `counts`: each row's token count before these limits apply.
        """
        room = np.maximum(self._model.max_total[rows] - num_known, 1)
        counts = np.minimum(counts, room)
        stops = tokens == self._model.stop_token[rows][:, None]
        stops &= np.arange(tokens.shape[1]) < counts[:, None]
        stopped = stops.any(axis=1)
        return np.where(stopped, stops.argmax(axis=1) + 1, counts), stopped

    def _draft(
        self, rows: np.ndarray, places: np.ndarray, over: np.ndarray, room: np.ndarray | None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the next step's drafts, row by row, and each row's number of drafts, both int32.

        `places`: the position of each row's first draft. `over`: whether a row's text has ended, so that the
        row gets no drafts. `room`: maximum number of drafts for each row, or None. Returns (None, None)
        without a drafter.
        """
        count = self._config.num_draft_tokens
        if not count:
            return None, None
        drafts, valid = self._model.drafts(rows, places, count)
        valid[over] = 0
        if room is not None:
            valid = np.minimum(valid, room)
        return drafts[np.arange(count) < valid[:, None]].astype(np.int32), valid.astype(np.int32)

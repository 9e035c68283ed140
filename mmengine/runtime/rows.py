"""Host columns by row: what a step needs to know of the requests that run, set at admission."""

from collections.abc import Callable, Sequence

import numpy as np

from mmengine.core.executor import Admission
from mmengine.request import MAX_STOP_STRINGS, MediaItem, Request, SamplingParams

PositionsOf = Callable[[np.ndarray, Sequence[MediaItem]], tuple[np.ndarray, int]]

# Bits of the `options` column: what a row asks for beyond the most likely token.
RANDOM = 1
TOP_K = 2
TOP_P = 4
MIN_P = 8
PENALTIES = 16
BIAS = 32
MIN_TOKENS = 64
LOGPROBS = 128
STOP_IDS = 256
STOP_STRINGS = 512

COLUMNS = np.dtype(
    [
        ("options", np.int32),
        ("num_prompt", np.int32),
        ("delta", np.int32),  # an output token at index i has position i + delta
        ("seed", np.int64),
        ("sample_index", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),  # off: vocab_size
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.int32),
        ("logprobs", np.int32),
        ("ignore_eos", np.bool_),
    ]
)
NO_TOKEN = -1


class RowColumns:
    """One record a row in `columns` (dtype COLUMNS), and the few lists that do not fit a column.

    A token id outside the vocabulary can neither be sampled nor stop a request, so `bias` and
    `blocked` leave it out.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], positions_of: PositionsOf
    ) -> None:
        self.columns = np.zeros(max_rows, dtype=COLUMNS)
        self.stop_ids = np.full((max_rows, MAX_STOP_STRINGS), NO_TOKEN, dtype=np.int32)
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # token ids int64, what is added float32
        self.blocked: dict[int, np.ndarray] = {}  # int64: not to be sampled before min_tokens
        self._prompt_positions: list[np.ndarray | None] = [None] * max_rows
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._positions_of = positions_of

    def admit(self, admission: Admission) -> None:
        """Set every column of the row anew; nothing of the request that held it before stays."""
        row, request = admission.row, admission.request
        sampling = request.sampling
        positions, delta = self._positions_of(request.prompt_token_ids, request.media)
        self._prompt_positions[row] = positions
        self.columns[row] = (
            self._options(request),
            len(request.prompt_token_ids),
            delta,
            sampling.seed or 0,
            request.sample_index,
            sampling.temperature,
            min(sampling.top_k or self._vocab_size, self._vocab_size),
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.min_tokens,
            -1 if sampling.logprobs is None else sampling.logprobs,
            sampling.ignore_eos,
        )
        self._admit_lists(row, sampling)

    def _admit_lists(self, row: int, sampling: SamplingParams) -> None:
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.bias.pop(row, None)
        self.blocked.pop(row, None)
        if sampling.logit_bias:
            kept = {token: add for token, add in sampling.logit_bias.items() if 0 <= token < self._vocab_size}
            self.bias[row] = (np.array(list(kept), np.int64), np.array(list(kept.values()), np.float32))
        if sampling.min_tokens:
            stops = set(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._eos_token_ids)
            inside = sorted(token for token in stops if 0 <= token < self._vocab_size)
            self.blocked[row] = np.array(inside, np.int64)

    def _options(self, request: Request) -> int:
        sampling = request.sampling
        options = 0
        if sampling.temperature > 0:  # filters leave the most likely token alone: nothing to do when greedy
            options |= RANDOM
            options |= TOP_K if 0 < sampling.top_k < self._vocab_size else 0
            options |= TOP_P if sampling.top_p < 1 else 0
            options |= MIN_P if sampling.min_p > 0 else 0
        if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
            options |= PENALTIES
        options |= BIAS if sampling.logit_bias else 0
        options |= MIN_TOKENS if sampling.min_tokens else 0
        options |= LOGPROBS if sampling.logprobs is not None else 0
        options |= STOP_IDS if sampling.stop_token_ids else 0
        options |= STOP_STRINGS if sampling.stop else 0
        return options

    def positions(
        self, rows: np.ndarray, num_scheduled: np.ndarray, num_computed: np.ndarray, token_index: np.ndarray
    ) -> np.ndarray:
        """Rotary positions [3, t] of a step's tokens: int64.

        Rows that only decode cost no loop; a row inside its prompt copies its stored positions.
        """
        delta = self.columns["delta"][rows]
        if len(token_index) != len(rows):
            delta = np.repeat(delta, num_scheduled)
        positions = np.empty((3, len(token_index)), dtype=np.int64)
        np.add(token_index, delta, out=positions[0])
        positions[1:] = positions[0]
        in_prompt = np.flatnonzero(num_computed < self.columns["num_prompt"][rows])
        if len(in_prompt):
            starts = np.cumsum(num_scheduled) - num_scheduled
            for n in in_prompt.tolist():
                stored = self._prompt_positions[rows[n]]
                chunk = stored[:, num_computed[n] : num_computed[n] + num_scheduled[n]]
                positions[:, starts[n] : starts[n] + chunk.shape[1]] = chunk
        return positions

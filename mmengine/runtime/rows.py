"""Stores each row's sampling parameters and other request data in columns on the host.

A row's values are set when a request is admitted to the row.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mmengine.core.executor import PADDING, Admission, StepPlan
from mmengine.models.spec import RunKind
from mmengine.request import MAX_STOP_STRINGS, MediaItem, Request, SamplingParams
from mmengine.runtime.attention.run_ids import RunIds
from mmengine.runtime.repetition_watcher import RepetitionWatcher

PositionsOf = Callable[[np.ndarray, Sequence[MediaItem]], tuple[np.ndarray, int]]

# Bits of the column `options`: the features beyond greedy sampling that the row's request uses.
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
GRAMMAR = 1024
CLOSES = 2048  # near max_tokens, the answer is completed as its grammar allows
HISTORY = 4096  # rules that depend on earlier tokens: no-repeat n-grams, biased sequences
TYPICAL = 8192
THINKING = 16384  # the reasoning has its own token budget
REPETITION = 32768  # a repetition ends the answer
CONFIDENCE = 65536  # each token's probability among the allowed tokens is computed

NEVER = float("-inf")  # the logit, or the bias, of a token that is never sampled

COLUMNS = np.dtype(
    [
        ("options", np.int32),
        ("num_prompt", np.int32),
        ("delta", np.int32),  # the output token at index i has the position i + delta
        ("seed", np.int64),
        ("sample_index", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),  # vocab_size turns the filter off
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.int32),
        ("min_stop_tokens", np.int32),  # stop strings are ignored until the answer has this many tokens
        ("logprobs", np.int32),
        ("ignore_eos", np.bool_),
        ("max_total", np.int32),  # number of tokens, with the prompt, at which max_tokens ends the answer
        ("no_repeat_ngram_size", np.int32),
        ("typical_p", np.float32),
    ]
)


class RowColumns:
    """Each row's values in `columns` (dtype COLUMNS), and lists that do not fit into a column.

    `bias` and `blocked` omit token ids outside the vocabulary.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        positions_of: PositionsOf,
        runs: RunKind = "",
    ) -> None:
        self.columns = np.zeros(max_rows, dtype=COLUMNS)
        self.stop_ids = np.full((max_rows, MAX_STOP_STRINGS), PADDING, dtype=np.int32)
        # For each row with a bias: token ids (int64) and their biases (float32).
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # For rows with MIN_TOKENS: ids that must not be sampled yet, padded with the first id.
        self.blocked = np.zeros((max_rows, len(eos_token_ids) + MAX_STOP_STRINGS), dtype=np.int64)
        self.repetitions = RepetitionWatcher(max_rows)
        self._prompt_positions: list[np.ndarray | None] = [None] * max_rows
        self._runs = RunIds(runs, max_rows) if runs else None
        self._rows_of_last, self._last = b"", self.columns[:0]
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._positions_of = positions_of

    def admit(self, admission: Admission) -> None:
        """Set all columns of the row, so that nothing remains from the row's previous request."""
        row, request = admission.row, admission.request
        sampling = request.sampling
        positions, delta = self._positions_of(request.prompt_token_ids, request.media)
        self._prompt_positions[row] = positions
        if self._runs is not None:
            self._runs.admit(row, request)
        self._rows_of_last, self._last = b"", self.columns[:0]
        self.columns[row] = (
            self._options(request),
            len(request.prompt_token_ids),
            delta,
            sampling.seed or 0,
            request.sample_index,
            sampling.temperature,
            min(sampling.top_k or self.vocab_size, self.vocab_size),
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.min_tokens,
            sampling.min_stop_tokens,
            -1 if sampling.logprobs is None else sampling.logprobs,
            sampling.ignore_eos,
            len(request.prompt_token_ids) + sampling.max_tokens,
            sampling.no_repeat_ngram_size,
            sampling.typical_p,
        )
        self._admit_lists(row, sampling)
        if sampling.repetition_detection:
            self.repetitions.admit(row, request, admission.token_ids)

    def has_repeated(self, row: int) -> bool:
        """Return whether the answer had repeated itself before this admission, for example before a
        preemption. The row then only completes the answer, as the request's grammar allows.
        """
        return bool(self.columns["options"][row] & REPETITION and self.repetitions.has_repeated[row])

    def _admit_lists(self, row: int, sampling: SamplingParams) -> None:
        self.stop_ids[row] = PADDING
        self.stop_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.bias.pop(row, None)
        if bias := _biases(sampling):
            kept = {token: add for token, add in bias.items() if 0 <= token < self.vocab_size}
            self.bias[row] = (np.array(list(kept), np.int64), np.array(list(kept.values()), np.float32))
        if blocked := self._blocked(sampling):
            self.blocked[row] = blocked[0]
            self.blocked[row, : len(blocked)] = blocked

    def _blocked(self, sampling: SamplingParams) -> list[int]:
        if not sampling.min_tokens:
            return []
        stops = set(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._eos_token_ids)
        return sorted(token for token in stops if 0 <= token < self.vocab_size)

    def _options(self, request: Request) -> int:
        sampling = request.sampling
        options = 0
        if sampling.temperature > 0:  # filters keep the most likely token, so they change nothing when greedy
            options |= RANDOM
            options |= TOP_K if 0 < sampling.top_k < self.vocab_size else 0
            options |= TOP_P if sampling.top_p < 1 else 0
            options |= MIN_P if sampling.min_p > 0 else 0
            options |= TYPICAL if sampling.typical_p < 1 else 0
        if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
            options |= PENALTIES
        options |= BIAS if _biases(sampling) else 0
        options |= HISTORY if sampling.no_repeat_ngram_size or sequences_of(sampling) else 0
        options |= MIN_TOKENS if self._blocked(sampling) else 0
        options |= LOGPROBS if sampling.logprobs is not None else 0
        options |= STOP_IDS if sampling.stop_token_ids else 0
        options |= STOP_STRINGS if sampling.stop else 0
        if request.grammar is not None:
            options |= GRAMMAR | (CLOSES if request.closes else 0)
            options |= CONFIDENCE if request.grammar.field_confidence else 0
        options |= THINKING if request.thinking is not None else 0
        options |= REPETITION if sampling.repetition_detection else 0
        return options

    def is_eos(self, token_ids: np.ndarray) -> np.ndarray:
        """Return which of `token_ids` [s] are end-of-sequence tokens, bool [s]."""
        found = np.zeros(len(token_ids), dtype=bool)
        for eos in self._eos_token_ids:
            found |= token_ids == eos
        return found

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the records of `rows` [n]. Do not write to the result.

        Calls with the same rows return the same array until a request is admitted.
        """
        key = rows.tobytes()
        if key != self._rows_of_last:
            self._rows_of_last, self._last = key, self.columns.take(rows)  # faster than [] for records
        return self._last

    def positions(self, plan: StepPlan, out: np.ndarray) -> None:
        """Write the rotary positions of the step's tokens to `out`, int64 [3, t].

        Rows in prefill get their stored prompt positions, in a loop over the rows.
        """
        columns = self.of(plan.rows)
        delta = columns["delta"]
        if len(plan.token_index) != len(plan.rows):
            delta = np.repeat(delta, plan.num_scheduled)
        np.add(plan.token_index, delta, out=out[0])
        out[1:] = out[0]
        in_prompt = (plan.num_computed < columns["num_prompt"]).nonzero()[0]
        if len(in_prompt):
            starts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
            for n in in_prompt.tolist():
                stored = self._prompt_positions[plan.rows[n]]
                chunk = stored[:, plan.num_computed[n] : plan.num_computed[n] + plan.num_scheduled[n]]
                out[:, starts[n] : starts[n] + chunk.shape[1]] = chunk

    def run_ids(self, plan: StepPlan) -> np.ndarray | None:
        """Return the array `AttentionMeta.run_ids` for a step."""
        return None if self._runs is None else self._runs.of(plan)


def sequences_of(sampling: SamplingParams) -> list[tuple[tuple[int, ...], float]]:
    """Return the biased sequences with several tokens, each with its bias.

    The bias is added to the logit of the sequence's last token if the other tokens directly precede it.
    """
    banned = [(sequence, NEVER) for sequence in sampling.bad_words_ids]
    return [each for each in (*sampling.sequence_bias, *banned) if len(each[0]) > 1]


def _biases(sampling: SamplingParams) -> dict[int, float]:
    """Return token id -> bias, for the biases that apply at every position."""
    found = dict(sampling.logit_bias)
    for (token, *others), bias in sampling.sequence_bias:
        if not others:
            found[token] = found.get(token, 0.0) + bias
    banned = (sequence[0] for sequence in sampling.bad_words_ids if len(sequence) == 1)
    return {**found, **dict.fromkeys((*sampling.suppress_tokens, *banned), NEVER)}

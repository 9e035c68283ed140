"""A fake model for simulations. A token is computed from a checksum over the request's id and the position.

Positions ("places") count from the prompt's first token, and output indices from the answer's first token. At
output index `stop_at` the model emits the request's stop token, and at `bad_at` a token that the grammar
forbids. All other tokens lie in the grammar's range, or in TOKEN_LOW to TOKEN_HIGH without a grammar. A
second checksum determines how many leading drafts are right. The drafts after them are wrong.
"""

import numpy as np

from mmengine.simulation.hashing import crc_of_numbers, prefix_state
from mmengine.simulation.workload import NEVER, TOKEN_HIGH, TOKEN_LOW, SimRequest

BAD_TOKEN = 7  # allowed by no grammar


class FakeModel:
    def __init__(self, num_rows: int):
        self.num_prompt = np.zeros(num_rows, np.int64)
        # total of prompt and output tokens at which the request ends with reason "length"
        self.max_total = np.zeros(num_rows, np.int64)
        self.stop_token = np.full(num_rows, NEVER, np.int64)
        self.stop_at = np.full(num_rows, NEVER, np.int64)
        self.bad_at = np.full(num_rows, NEVER, np.int64)
        self._token_crc = np.zeros(num_rows, np.uint32)
        self._accept_crc = np.zeros(num_rows, np.uint32)
        self._invalid_crc = np.zeros(num_rows, np.uint32)
        self._num_ranges = np.zeros(num_rows, np.int64)  # 0: no grammar
        self._low = np.full((num_rows, 1), TOKEN_LOW, np.int64)
        self._high = np.full((num_rows, 1), TOKEN_HIGH, np.int64)

    def set_row(self, row: int, request: SimRequest, max_model_len: int, num_before: int = 0) -> None:
        """Assign a request to a row. `num_before`: number of session tokens before the request's prompt."""
        num_prompt = num_before + request.num_prompt
        name = request.request_id
        self.num_prompt[row] = num_prompt
        self.max_total[row] = min(num_prompt + request.max_tokens, max_model_len)
        self.stop_token[row], self.stop_at[row] = request.stop_token, request.stop_at
        self.bad_at[row] = request.bad_at
        self._token_crc[row] = prefix_state(f"{name}:")
        self._accept_crc[row] = prefix_state(f"acc:{name}:")
        self._invalid_crc[row] = prefix_state(f"inv:{name}:")
        ranges = request.ranges or ((TOKEN_LOW, TOKEN_HIGH),)
        self._widen(len(ranges))
        self._num_ranges[row] = len(request.ranges)
        self._low[row, : len(ranges)] = [low for low, _ in ranges]
        self._high[row, : len(ranges)] = [high for _, high in ranges]

    def _widen(self, width: int) -> None:
        missing = width - self._low.shape[1]
        if missing > 0:
            self._low = np.pad(self._low, ((0, 0), (0, missing)))
            self._high = np.pad(self._high, ((0, 0), (0, missing)))

    def tokens(self, rows: np.ndarray, places: np.ndarray, *, as_drafted: bool = False) -> np.ndarray:
        """Return the tokens that the model emits in `rows` ([s]) at `places` ([s, k]), as int64 [s, k].

        `as_drafted`: return the tokens that the drafter expects, which are never bad tokens.
        """
        column = rows[:, None]
        output = places - self.num_prompt[column]
        low, high = self._range(column, output)
        tokens = low + crc_of_numbers(self._token_crc[column], places) % (high - low)
        tokens = np.where(output == self.stop_at[column], self.stop_token[column], tokens)
        return tokens if as_drafted else np.where(output == self.bad_at[column], BAD_TOKEN, tokens)

    def drafts(self, rows: np.ndarray, places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` drafts per row (int64 [s, count]), and how many drafts per row precede the first
        forbidden draft (int64 [s]). `places`: each row's first draft position, [s].
        """
        column = rows[:, None]
        all_places = places[:, None] + np.arange(count)
        right = crc_of_numbers(self._accept_crc[rows], places) % (count + 1)
        spoiled = crc_of_numbers(self._invalid_crc[rows], places) % 2 == 1
        low, high = self._range(column, all_places - self.num_prompt[column])
        tokens = self.tokens(rows, all_places, as_drafted=True)
        wrong = low + (tokens - low + 1) % (high - low)
        constrained = self._num_ranges[rows] > 0
        wrong = np.where((spoiled & constrained)[:, None], BAD_TOKEN, wrong)
        tokens = np.where(np.arange(count) < right[:, None], tokens, wrong)
        valid = ~constrained[:, None] | (tokens >= low) & (tokens < high)
        return tokens, np.logical_and.accumulate(valid, axis=1).sum(axis=1)

    def breaks_grammar(self, rows: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return bool [s, k]: whether the row's grammar forbids each token. `tokens` and `places`: [s, k]."""
        column = rows[:, None]
        low, high = self._range(column, places - self.num_prompt[column])
        return (self._num_ranges[column] > 0) & ((tokens < low) | (tokens >= high))

    def _range(self, column: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = output % np.maximum(self._num_ranges[column], 1)
        return self._low[column, number], self._high[column, number]

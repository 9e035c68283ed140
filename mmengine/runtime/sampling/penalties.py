"""Applies repetition, presence and frequency penalties, from token counts that are kept on the device."""

from typing import NamedTuple

import numpy as np
import torch

from mmengine.core.executor import Admission
from mmengine.runtime.device.upload import upload
from mmengine.runtime.rows import PENALTIES, RowColumns
from mmengine.runtime.sampling.row_places import RowPlaces


class DraftPairs(NamedTuple):
    """For rows with penalties: m pairs of a sampling position and a token that is drafted before this
    position.
    """

    rows: np.ndarray  # intp [m], the row of each pair
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray]  # int64 [m]: position, token, number of occurrences


class TokenCounts:
    """Token counts for rows with penalties: which tokens the prompt and the output contain, and how
    often the output contains each token.

    A row with penalties takes vocab_size * 5 bytes, on a CPU up to vocab_size * 9. The tables grow with the
    number of such rows. If a request without penalties takes the row, the row's table entry is freed.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._places = RowPlaces(max_rows, self._grow)
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # Only on a CPU: the distinct tokens of each row as a list, and the length of each list.
        self._distinct = np.zeros((0, 64), dtype=np.int32)
        self._num_distinct = np.zeros(0, dtype=np.int64)

    def admit(self, admission: Admission, rows: RowColumns) -> None:
        """Count an admitted row's known tokens, if the row has penalties."""
        row = admission.row
        if not rows.columns["options"][row] & PENALTIES:
            self._places.leave(row)
            return
        place = self._places.take(row)
        known = admission.token_ids.astype(np.int64)
        outputs = known[rows.columns["num_prompt"][row] :]
        known = known[known < self._vocab_size]  # Media tokens may have no logits.
        seen = np.bincount(known, minlength=self._vocab_size) > 0
        counts = np.bincount(outputs, minlength=self._vocab_size).astype(np.int32)
        self._seen[place] = upload(seen, self._device)
        self._counts[place] = upload(counts, self._device)
        if self._device.type == "cpu":
            distinct = seen.nonzero()[0]
            self._widen(len(distinct))
            self._distinct[place, : len(distinct)] = distinct
            self._num_distinct[place] = len(distinct)

    def count(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Count the sampled tokens for `rows` [r]. `token_ids`: int64 [r] on the device; negative: no
        token.
        """
        places = upload(self._places.of[rows], self._device)
        tokens = token_ids.clamp(min=0)
        if self._device.type == "cpu":
            self._list_new(places.numpy(), tokens.numpy())
        self._seen[places, tokens] = True
        self._counts[places, tokens] += 1

    def penalise_on_cpu(
        self, logits: np.ndarray, selected: np.ndarray, rows: np.ndarray, penalties: np.ndarray
    ) -> None:
        """Penalise float32 logits [n, vocab_size] in place on a CPU. The results equal those of `penalise`.

        `selected` [r]: the index in `logits` for each row in `rows` [r]. Only the logits of tokens in the
        row's prompt and output are read and written.
        """
        places = self._places.of[rows]
        held = np.arange(self._distinct.shape[1]) < self._num_distinct[places][:, None]
        index, tokens = held.nonzero()[0], self._distinct[places][held]
        repetition, presence, frequency = penalties[:, index, 0]
        counts = self._counts.numpy()[places[index], tokens]
        values = logits[selected[index], tokens]
        with np.errstate(all="ignore"):  # rows with logits that are not finite are reported elsewhere
            values = np.where(values > 0, values / repetition, values * repetition)
            values -= counts.astype(np.float32) * frequency
            values -= (counts > 0) * presence
        logits[selected[index], tokens] = values

    def penalise_drafted(
        self, logits: torch.Tensor, before: torch.Tensor, drafted: DraftPairs, penalties: torch.Tensor
    ) -> None:
        """Recompute the logits of the m pairs in `drafted` in place, so that penalties also count the drafts
        before each position.

        `before` [m]: these logits before any penalty. `penalties`: as in `penalise`, [3, m, 1].
        """
        places = upload(self._places.of[drafted.rows], self._device)
        positions, tokens, further = (upload(each, self._device) for each in drafted.pairs)
        repetition, presence, frequency = penalties[:, :, 0]
        values = torch.where(before > 0, before / repetition, before * repetition)
        values -= (self._counts[places, tokens] + further).float() * frequency
        logits[positions, tokens] = values - presence

    def penalise(self, logits: torch.Tensor, rows: np.ndarray, penalties: torch.Tensor) -> torch.Tensor:
        """Return the penalised float32 logits [r, vocab_size] of `rows` [r].

        `penalties` [3, r, 1]: repetition, presence and frequency penalties. Repetition penalty (Keskar et
        al., CTRL, 2019): if the prompt or the output contains the token, a positive logit is divided by the
        penalty, and a negative logit is multiplied by the penalty. Frequency and presence penalties (as
        defined by OpenAI) are then subtracted. The frequency penalty is multiplied by the token's count in
        the output. The presence penalty applies if the output contains the token.
        """
        repetition, presence, frequency = penalties
        places = upload(self._places.of[rows], self._device)
        seen, counts = self._seen[places], self._counts[places]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits.sub_(counts * frequency).sub_((counts > 0) * presence)

    def _list_new(self, places: np.ndarray, tokens: np.ndarray) -> None:
        is_new = ~self._seen.numpy()[places, tokens]
        places, tokens = places[is_new], tokens[is_new]
        if len(places):
            self._widen(int(self._num_distinct[places].max()) + 1)
            self._distinct[places, self._num_distinct[places]] = tokens
            self._num_distinct[places] += 1

    def _widen(self, need: int) -> None:
        width = self._distinct.shape[1]
        if need > width:
            more = max(width, need - width)
            self._distinct = np.pad(self._distinct, ((0, 0), (0, more)))

    def _grow(self, count: int) -> None:
        more = count - len(self._counts)
        # Allocate both tensors first, so that the object stays unchanged if memory runs out.
        seen = torch.cat((self._seen, self._seen.new_zeros(more, self._vocab_size)))
        counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab_size)))
        self._distinct = np.pad(self._distinct, ((0, more), (0, 0)))
        self._num_distinct = np.pad(self._num_distinct, (0, more))
        self._seen, self._counts = seen, counts

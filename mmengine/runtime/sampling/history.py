"""Applies sampling rules that depend on earlier tokens: no-repeat n-grams, and biased or excluded sequences.

A biased sequence has a bias and several tokens. If a row ends with all the sequence's tokens except the
last, the bias is added to the last token's logit.
"""

import numpy as np
import torch

from mmengine.core.executor import Admission
from mmengine.runtime.device.upload import upload
from mmengine.runtime.rows import HISTORY, RowColumns, sequences_of
from mmengine.runtime.sampling.filters import NEVER
from mmengine.runtime.sampling.row_places import RowPlaces
from mmengine.runtime.sampling.sample_rows import SampleRows

_ANY = -1  # padding in front of shorter sequences, which matches any token
_NOTHING = -2  # a position before a row's first token, which matches no token


class TokenHistory:
    """Tokens and biased sequences for rows with history rules, on the device.

    A row with history rules takes 8 bytes for each token in the longest row, plus 8 * c * (k - 1) + 20 * c
    bytes for sequences. Here, c is the largest number of sequences in any row, and k is the length of the
    longest sequence.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._places = RowPlaces(max_rows, lambda count: self._grow(places=count))
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        # For each sequence: its tokens except the last (right-aligned), its last token, its bias, its length.
        self._before = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        self._last = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._added = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._length = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def admit(self, admission: Admission, rows: RowColumns) -> None:
        """Store an admitted row's tokens and sequences. A row without history rules releases its place in the
        tables.
        """
        row = admission.row
        if not rows.columns["options"][row] & HISTORY:
            self._places.leave(row)
            return
        place = self._places.take(row)
        known = upload(admission.token_ids.astype(np.int64), self._device)
        self._grow(width=len(known))
        self._tokens[place, : len(known)] = known
        found = [each for each in sequences_of(admission.request.sampling) if each[0][-1] < rows.vocab_size]
        self._admit_sequences(place, found)

    def _admit_sequences(self, place: int, found: list[tuple[tuple[int, ...], float]]) -> None:
        self._length[place] = 0
        if not found:
            return
        longest = max(len(sequence) for sequence, _ in found)
        self._grow(count=len(found), longest=longest - 1)
        before = np.full((len(found), self._before.shape[2]), _ANY, np.int64)
        for index, (sequence, _) in enumerate(found):
            before[index, before.shape[1] + 1 - len(sequence) :] = sequence[:-1]
        self._before[place, : len(found)] = upload(before, self._device)
        numbers = np.array([(sequence[-1], len(sequence)) for sequence, _ in found], np.int64).T
        self._last[place, : len(found)], self._length[place, : len(found)] = upload(numbers, self._device)
        added = np.array([value for _, value in found], np.float32)
        self._added[place, : len(found)] = upload(added, self._device)

    def count(self, batch: SampleRows, selected: np.ndarray, token_ids: torch.Tensor) -> None:
        """Append `token_ids` (int64 [r]; negative: no token) to the rows at the indices `selected` in
        `batch`.
        """
        index = self._known(batch, selected)
        self._grow(width=int(index.max()) + 1)
        places, index = upload(np.stack((self._places.of[batch.rows[selected]], index)), self._device)
        self._tokens[places, index] = token_ids.clamp(min=0)

    def apply(self, logits: torch.Tensor, batch: SampleRows, selected: np.ndarray) -> None:
        """Apply the history rules to the rows `selected` [r] of float32 logits [n, vocab_size], in place.

        At a position after drafts, the drafts count as earlier tokens.
        """
        known = self._known(batch, selected)
        self._grow(width=int(known.max()) + 1)
        rows = self._places.of[batch.rows[selected]]
        ngrams = batch.columns["no_repeat_ngram_size"][selected].astype(np.int64)
        positions, places, lengths, sizes = upload(np.stack((selected, rows, known, ngrams)), self._device)
        if batch.follows is not None:
            self._write_drafts(batch.follows[selected], rows, known)
        tokens = self._tokens[places, : int(known.max())]
        if self._last.shape[1]:
            self._add(logits, positions, places, self._tail(tokens, lengths, self._before.shape[2]), lengths)
        if ngrams.any():
            banned = _repeats(tokens, lengths, sizes, int(ngrams.max()), logits.shape[1])
            logits[positions] = logits[positions].masked_fill_(banned, NEVER)

    def _known(self, batch: SampleRows, selected: np.ndarray) -> np.ndarray:
        return (batch.columns["num_prompt"][selected] + batch.output_index[selected]).astype(np.int64)

    def _write_drafts(self, follows: np.ndarray, places: np.ndarray, known: np.ndarray) -> None:
        """Write drafts into the token table. Sampled tokens overwrite the drafts later."""
        is_draft = follows >= 0
        if is_draft.any():
            columns = np.stack((places[is_draft], known[is_draft], follows[is_draft].astype(np.int64)))
            place, index, token = upload(columns, self._device)
            self._tokens[place, index] = token

    def _tail(self, tokens: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """Return each row's last `width` tokens, right-aligned, [r, width]."""
        index = lengths[:, None] - torch.arange(width, 0, -1, device=self._device)
        return tokens.gather(1, index.clamp(min=0)).masked_fill_(index < 0, _NOTHING)

    def _add(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        tail: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        before, size = self._before[places], self._length[places]
        matches = ((before == tail[:, None]) | (before == _ANY)).all(-1)
        matches &= (size > 0) & (size <= lengths[:, None])
        added = torch.where(matches, self._added[places], 0.0)
        index = positions[:, None].expand_as(added)
        logits.index_put_((index, self._last[places]), added, accumulate=True)

    def _grow(self, *, places: int = 0, width: int = 0, count: int = 0, longest: int = 0) -> None:
        """Enlarge the tables if necessary.

        `places`: number of rows. `width`: number of tokens in a row. `count`: number of sequences in a row.
        `longest`: number of tokens in a sequence, without its last token.
        """
        held, room = self._tokens.shape
        places, width = max(places, held), room if width <= room else max(width, 2 * room, 64)
        if (places, width) != (held, room):
            self._tokens = _padded(self._tokens, (places, width))
        held, sequences, tokens = self._before.shape
        count, longest = max(count, sequences), max(longest, tokens)
        if (places, count, longest) == (held, sequences, tokens):
            return
        before = self._before.new_full((places, count, longest), _ANY)
        before[:held, :sequences, longest - tokens :] = self._before
        self._before = before
        self._last, self._added, self._length = (
            _padded(each, (places, count)) for each in (self._last, self._added, self._length)
        )


def _padded(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    larger = tensor.new_zeros(shape)
    larger[: tensor.shape[0], : tensor.shape[1]] = tensor
    return larger


def _repeats(
    tokens: torch.Tensor, lengths: torch.Tensor, sizes: torch.Tensor, largest: int, vocab_size: int
) -> torch.Tensor:
    """Return which tokens would complete a repeated n-gram, bool [r, vocab_size].

    `sizes` [r]: the row's n-gram length (0: no rule). `lengths` [r]: the number of earlier tokens in each row
    of `tokens` [r, t].
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    ends = (place >= sizes[:, None] - 1) & (place < lengths[:, None]) & (sizes > 0)[:, None]
    for back in range(1, min(largest, tokens.shape[1] + 1)):
        said = tokens.gather(1, (lengths - back).clamp(min=0)[:, None])
        same = torch.zeros_like(ends)
        same[:, back:] = tokens[:, : tokens.shape[1] - back] == said
        ends &= same | (sizes <= back)[:, None]
    ends &= tokens < vocab_size  # Media tokens may have larger ids than the logits cover.
    found = torch.zeros(len(tokens), vocab_size, device=tokens.device)
    return found.scatter_add_(1, tokens.clamp(max=vocab_size - 1), ends.float()) > 0

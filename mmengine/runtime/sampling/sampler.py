"""Samples tokens from logits, for all rows in a step together.

A row's operations are applied in this order; unused operations are skipped.

    1. Logprobs are computed from the model's unchanged logits. Then tokens that the row's grammar does
       not allow are excluded, and confidences are computed (confidence.py).
    2. Logit bias is added, and some tokens are always excluded. Then history rules, repetition penalty,
       frequency penalty and presence penalty are applied. End-of-sequence and stop tokens are excluded until
       the output has min_tokens tokens.
    3. With temperature 0, the most likely token is chosen; of equally likely tokens, the one with the lowest
       id.
    4. Otherwise temperature, top-k, top-p, min-p, typical-p and Gumbel noise are applied. The token with
       the largest sum of logit and noise is chosen.
    5. Some texts must be complete within their token budget. If the budget after the chosen
       token would be too small to complete the text, `close` replaces the chosen token. The replacement
       is the next token of a continuation that fits into the budget.

Steps 2 and 4 follow the order in transformers' logits processors. A row gets no token if its logits contain
NaN or +inf, or if all are -inf. A mask changes the caller's logits in place. The logits of rows without a
mask stay unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from mmengine.core.executor import ERROR_TOKEN, Admission
from mmengine.gpu.sampling import compile_all, sampling_kernels
from mmengine.runtime.device.upload import upload, upload_columns
from mmengine.runtime.rows import (
    BIAS,
    CONFIDENCE,
    HISTORY,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    RANDOM,
    STOP_IDS,
    RowColumns,
)
from mmengine.runtime.sampling.confidence import AllowedWeights, Confidences, confidences_of, weigh_allowed
from mmengine.runtime.sampling.drawing import draw
from mmengine.runtime.sampling.filters import NEVER
from mmengine.runtime.sampling.history import TokenHistory
from mmengine.runtime.sampling.masking import keep_allowed
from mmengine.runtime.sampling.penalties import TokenCounts
from mmengine.runtime.sampling.row_select import on_rows, take
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.topk import topk_tokens, topk_tokens_of
from mmengine.structured_output.rows.rows import Closing, Masks

ADJUSTED = BIAS | HISTORY | PENALTIES | MIN_TOKENS
COUNTED = HISTORY | PENALTIES


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprobs for m sampling rows. `indices` [m]: the rows' indices among all sampling rows, on the
    host.

    `chosen` [m]: each chosen token's logprob. `best`, `best_ids` [m, k]: the k likeliest tokens in descending
    order (k: the largest number that a row requests).
    """

    indices: np.ndarray
    chosen: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor


class SampledTokens(msgspec.Struct, frozen=True, eq=False):
    """The sampled tokens of s sampling rows, and their logprobs if any row wants them."""

    token_ids: torch.Tensor  # int64 [s]; ERROR_TOKEN for a row without a finite distribution
    logprobs: Logprobs | None
    confidences: Confidences | None = None

    @property
    def has_entries(self) -> bool:
        """Whether any token has logprobs or a confidence."""
        return self.logprobs is not None or self.confidences is not None

    def to_host(self) -> "SampledTokens":
        """Return the tokens on the host. Does not wait for a copy from a GPU."""
        if self.token_ids.device.type == "cpu":
            return self
        token_ids, lists = self.token_ids.to("cpu", non_blocking=True), self.logprobs
        confidences = None if self.confidences is None else self.confidences.to_host()
        if lists is None:
            return SampledTokens(token_ids, None, confidences)
        chosen, best, ids = (
            one.to("cpu", non_blocking=True) for one in (lists.chosen, lists.best, lists.best_ids)
        )
        return SampledTokens(token_ids, Logprobs(lists.indices, chosen, best, ids), confidences)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The chosen tokens, int64 [s], and each row's largest allowed logit [s].

    A row has failed if its `largest` is not finite. `logits`: the model's unchanged logits, if logprobs are
    wanted. `allowed`: statistics about the tokens that grammars allow, if confidences are wanted.
    """

    token_ids: torch.Tensor
    largest: torch.Tensor
    logits: torch.Tensor
    allowed: AllowedWeights | None = None


class ForcedTokens(NamedTuple):
    """Tokens that are forced instead of sampled, and their indices among the sampling positions."""

    places: Sequence[int] = ()
    token_ids: Sequence[int] = ()


NO_FORCED_TOKENS = ForcedTokens()


class Sampler:
    """Samples tokens, with each row's parameters from `rows`. Owns the token counts and histories."""

    def __init__(self, rows: RowColumns, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._rows, self._vocab_size, self.device = rows, vocab_size, device
        self._counts = TokenCounts(max_rows, vocab_size, device)
        self._history = TokenHistory(max_rows, device)
        self._kernels = sampling_kernels(device)
        if self._kernels is not None:
            compile_all(self._kernels, vocab_size, device)

    def admit(self, admission: Admission) -> None:
        """Prepare a row for its new request. Call this method after `RowColumns.admit`."""
        self._counts.admit(admission, self._rows)
        self._history.admit(admission, self._rows)

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleRows,
        masks: Masks | None = None,
        forced: ForcedTokens = NO_FORCED_TOKENS,
    ) -> SampledTokens:
        """Sample tokens from float32 logits [s, vocab_size], with one row for each entry in `batch`.

        Does not wait for the device.
        """
        chosen = self.choose(logits, batch, masks)
        self.put(chosen, forced)
        return self.conclude(chosen, batch)

    def put(self, chosen: TokenChoice, forced: ForcedTokens) -> None:
        """Replace chosen tokens by the tokens `forced`, in place."""
        if forced.places:
            places = upload(np.array(forced.places, np.int64), self.device)
            chosen.token_ids[places] = upload(np.array(forced.token_ids, np.int64), self.device)

    def choose(self, logits: torch.Tensor, batch: SampleRows, masks: Masks | None = None) -> TokenChoice:
        """Choose tokens. The caller may still change them, and must then call `conclude`."""
        largest, token_ids = topk_tokens(logits)
        options, wanted = batch.columns["options"], batch.wanted
        own_logits, allowed = logits, None
        if masks is not None:
            own_logits = logits.clone() if wanted & LOGPROBS else logits
            self._mask(logits, masks, options, largest, token_ids)
            if wanted & CONFIDENCE:
                allowed = weigh_allowed(logits, masks, options)
        if wanted & MIN_TOKENS:
            options, wanted = self._before_min_tokens(logits, token_ids, batch)
        if wanted & (ADJUSTED | RANDOM):
            selected = np.flatnonzero(options & (ADJUSTED | RANDOM))
            if len(selected) == len(options):
                is_adjusted = int(np.bitwise_or.reduce(options)) & ADJUSTED
                token_ids = self._choose(logits.clone() if is_adjusted else logits, options, batch)
            else:
                chosen = self._choose(take(logits, selected), options[selected], batch.take(selected))
                token_ids[upload(selected, self.device)] = chosen
        return TokenChoice(token_ids, largest, own_logits, allowed)

    def choose_again(self, chosen: TokenChoice, batch: SampleRows, masks: Masks) -> None:
        """Replace the chosen tokens for the rows in `masks` by tokens that the masks allow, in place.

        Only for a CPU.
        """
        selected = torch.from_numpy(masks.selected)
        narrow = Masks(np.arange(len(masks.selected)), masks.bits)
        again = self.choose(chosen.logits.index_select(0, selected), batch.take(masks.selected), narrow)
        chosen.token_ids[selected], chosen.largest[selected] = again.token_ids, again.largest

    def close(self, chosen: TokenChoice, closing: Closing) -> None:
        """Replace chosen tokens, in place, where `closing` requires tokens that complete the text.

        Waits for the device, because `closing` needs the sampled tokens.
        """
        places = upload(closing.places, self.device)
        sampled = chosen.token_ids[places].tolist()
        kept = closing.keep(sampled)
        if kept != sampled:
            chosen.token_ids[places] = upload(np.array(kept, np.int64), self.device)

    def conclude(self, chosen: TokenChoice, batch: SampleRows) -> SampledTokens:
        """Count the chosen tokens, compute their logprobs and confidences, and return them."""
        token_ids = chosen.token_ids
        _refuse_broken(token_ids, chosen.largest)
        if batch.wanted & COUNTED and not batch.in_runs:
            self.count(batch, token_ids)
        options, logprobs, confidences = batch.columns["options"], None, None
        if batch.wanted & LOGPROBS:
            logprobs = self._logprobs(chosen.logits, token_ids, options, batch)
        if chosen.allowed is not None:
            confidences = confidences_of(chosen.allowed, chosen.logits, token_ids)
        return SampledTokens(token_ids, logprobs, confidences)

    def count(self, batch: SampleRows, token_ids: torch.Tensor) -> None:
        """Count `token_ids` [s] for the penalties and history rules of their rows.

        `sample` calls this method, except in a step with drafts. In such a step, the caller counts the
        accepted tokens later.
        """
        options = batch.columns["options"]
        if len(selected := np.flatnonzero(options & PENALTIES)):
            self._counts.count(batch.rows[selected], take(token_ids, selected))
        if len(selected := np.flatnonzero(options & HISTORY)):
            self._history.count(batch, selected, take(token_ids, selected))

    def _mask(
        self,
        logits: torch.Tensor,
        masks: Masks,
        options: np.ndarray,
        largest: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        """Exclude the tokens that masks do not allow, in place, and replace `token_ids` by the likeliest
        allowed tokens.

        `largest` becomes each row's largest allowed logit, except for failed rows.
        """
        is_read = (options[masks.selected] & (ADJUSTED | RANDOM)) != 0
        left, chosen = keep_allowed(logits, masks, is_read)
        if logits.device.type == "cpu":
            before = largest.numpy()[masks.selected]
            token_ids.numpy()[masks.selected] = chosen.numpy()
            largest.numpy()[masks.selected] = np.where(np.isfinite(before), left.numpy(), before)
            return
        places = upload(masks.selected, self.device)
        token_ids[places] = chosen
        largest[places] = torch.where(largest[places].isfinite(), left, largest[places])

    def _before_min_tokens(
        self, logits: torch.Tensor, token_ids: torch.Tensor, batch: SampleRows
    ) -> tuple[np.ndarray, int]:
        """Apply min_tokens to the rows whose logits need not change. Returns the remaining options [s], and
        their bitwise OR.

        On a CPU, a greedy row without other options gets another token in `token_ids` if its token would end
        the text too early. These rows, and rows that already have min_tokens tokens, lose the bit MIN_TOKENS.
        If no row has other options, only the bitwise OR loses the bit: the caller then reads no row's
        options.
        """
        options = batch.columns["options"]
        is_early = ((options & MIN_TOKENS) != 0) & (batch.output_index < batch.columns["min_tokens"])
        if logits.device.type == "cpu":
            tokens = token_ids.numpy()
            may_end = self._rows.is_eos(tokens)
            if batch.wanted & STOP_IDS:
                may_end |= (options & STOP_IDS) != 0
            if not batch.wanted & (ADJUSTED | RANDOM) & ~MIN_TOKENS:
                self._next_topk(logits.numpy(), tokens, (may_end & is_early).nonzero()[0], batch.rows)
                return options, batch.wanted & ~MIN_TOKENS
            is_plain = options & (ADJUSTED | RANDOM) == MIN_TOKENS
            self._next_topk(logits.numpy(), tokens, (may_end & is_early & is_plain).nonzero()[0], batch.rows)
            is_early &= ~is_plain
        options = np.where(is_early, options, options & ~MIN_TOKENS)
        return options, int(np.bitwise_or.reduce(options))

    def _next_topk(
        self, logits: np.ndarray, tokens: np.ndarray, selected: np.ndarray, rows: np.ndarray
    ) -> None:
        """Write to `tokens` [s], at the indices `selected`, the most likely tokens that do not end the
        text.
        """
        if not len(selected):
            return
        places = selected[:, None], self._rows.blocked[rows[selected]]
        kept = logits[places]
        logits[places] = NEVER
        tokens[selected] = (logits if len(selected) == len(logits) else logits[selected]).argmax(axis=-1)
        logits[places] = kept

    def _choose(self, logits: torch.Tensor, options: np.ndarray, batch: SampleRows) -> torch.Tensor:
        """Return tokens for rows that have options in ADJUSTED or RANDOM.

        Rows of `logits` with options in ADJUSTED are overwritten.
        """
        if int(np.bitwise_or.reduce(options)) & ADJUSTED:
            logits = self._adjust(logits, options, batch)
        selected = np.flatnonzero(options & RANDOM)
        if len(selected) == len(options):
            return draw(logits, options, batch, self._kernels)
        token_ids = topk_tokens(logits)[1]
        if len(selected):
            drawn = draw(take(logits, selected), options[selected], batch.take(selected), self._kernels)
            token_ids[upload(selected, self.device)] = drawn
        return token_ids

    def _adjust(self, logits: torch.Tensor, options: np.ndarray, batch: SampleRows) -> torch.Tensor:
        """Apply step 2 in the module docstring. Returns the changed logits, which may be `logits` itself."""
        selected = np.flatnonzero(options & BIAS)
        if len(selected):
            pairs = [self._rows.bias[row] for row in batch.rows[selected].tolist()]
            added = upload(np.concatenate([values for _, values in pairs]), self.device)
            index = _scatter_index(selected, [ids for ids, _ in pairs], self.device)
            logits.index_put_(index, added, accumulate=True)
        selected = np.flatnonzero(options & HISTORY)
        if len(selected):
            self._history.apply(logits, batch, selected)
        selected = np.flatnonzero(options & PENALTIES)
        if len(selected):
            columns, rows = batch.columns[selected], batch.rows[selected]
            penalties = self._penalties_of(columns)
            drafted = batch.drafted
            if drafted is not None:
                positions, tokens = (upload(each, self.device) for each in drafted.pairs[:2])
                before = logits[positions, tokens]
            if self.device.type == "cpu":
                self._counts.penalise_on_cpu(logits.numpy(), selected, rows, penalties.numpy())
            else:
                logits = on_rows(logits, selected, lambda some: self._counts.penalise(some, rows, penalties))
            if drafted is not None:
                of_pairs = self._penalties_of(batch.columns[drafted.pairs[0]])
                self._counts.penalise_drafted(logits, before, drafted, of_pairs)
        selected = np.flatnonzero(options & MIN_TOKENS)
        if len(selected):
            blocked = self._rows.blocked[batch.rows[selected]]
            places = upload(
                np.stack((np.broadcast_to(selected[:, None], blocked.shape), blocked)), self.device
            )
            logits[places[0], places[1]] = NEVER
        return logits

    def _penalties_of(self, columns: np.ndarray) -> torch.Tensor:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return upload_columns(*(columns[name] for name in names), device=self.device)

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, options: np.ndarray, batch: SampleRows
    ) -> Logprobs:
        selected = np.flatnonzero(options & LOGPROBS)
        most = min(int(batch.columns["logprobs"][selected].max()), self._vocab_size)
        some = take(logits, selected)
        logprobs = some.log_softmax(dim=-1) if self._kernels is None else self._kernels.log_softmax(some)
        chosen = logprobs.gather(-1, take(token_ids, selected).clamp(min=0)[:, None])[:, 0]
        return Logprobs(selected, chosen, *topk_tokens_of(logprobs, most))


def _refuse_broken(token_ids: torch.Tensor, largest: torch.Tensor) -> None:
    """Write ERROR_TOKEN for rows whose `largest` logit is not finite, in place."""
    if token_ids.device.type != "cpu":
        token_ids.masked_fill_(~largest.isfinite(), ERROR_TOKEN)
        return
    is_sound = np.isfinite(largest.numpy())
    if np.count_nonzero(is_sound) < len(is_sound):
        token_ids.numpy()[~is_sound] = ERROR_TOKEN


def _scatter_index(
    selected: np.ndarray, ids: list[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two index tensors, rows and tokens. `ids`: the token ids for each row in `selected`."""
    rows = np.repeat(selected, [len(some) for some in ids])
    both = upload(np.stack((rows, np.concatenate(ids))), device)
    return both[0], both[1]

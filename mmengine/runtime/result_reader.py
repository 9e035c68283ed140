"""Turns sampled tokens into a step's result: accepted drafts, stops, errors, logprobs and the next drafts."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from mmengine.core.executor import (
    CUT,
    ERROR_TOKEN,
    REPETITION,
    REPETITION_CLOSED,
    PromptLogprobs,
    StepPlan,
    StepResult,
)
from mmengine.ragged import NO_PLACE
from mmengine.runtime.device.clock import StepClock
from mmengine.runtime.device.upload import upload
from mmengine.runtime.drafting.head.target_states import TargetStates
from mmengine.runtime.drafting.next_drafts import Drafting
from mmengine.runtime.rows import CLOSES, GRAMMAR, THINKING, RowColumns
from mmengine.runtime.sampling.lazy_masks import LazyMaskResult, uses_lazy_mask
from mmengine.runtime.sampling.pooling import PooledRow, vectors_of
from mmengine.runtime.sampling.runs import Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import COUNTED, SampledTokens, Sampler
from mmengine.runtime.sampling.stops import (
    CLOSED,
    GRAMMAR_END,
    REPETITION_ENDS,
    STRING,
    STRING_ENDS,
    StopWatcher,
    find_stops,
    may_stop,
)
from mmengine.runtime.sampling.thinking import ThinkingRows
from mmengine.runtime.sampling.token_entries import TokenEntries, token_entries
from mmengine.structured_output.rows.rows import RowMatchers

NOT_FINITE = "the model gave NaN or infinite logits for this request"

Stops = tuple[tuple[int, str], ...]


class ComputedStep(msgspec.Struct, frozen=True, eq=False):
    """A step that was launched up to its logits, without sampling.

    `logits`: float32 [s, vocab_size], for the s positions in `batch`; None if no row samples. For the other
    fields, see LaunchedStep.
    """

    plan: StepPlan
    batch: SampleRows
    logits: torch.Tensor | None
    runs: Runs | None
    target_states: TargetStates | None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledRow, ...] = ()

    @property
    def depends_on_sampled(self) -> bool:
        """Whether the step's masks or forced tokens depend on the previous step's tokens."""
        return bool(self.batch.wanted & (GRAMMAR | THINKING))


class LaunchedStep(msgspec.Struct, frozen=True, eq=False):
    """A step that was launched, including its sampling.

    `sampled`: host tensors, valid once the device has finished. `batch`: the sampled positions; a row with
    drafts has several (see `runs`). `lazy_masked`: rows that completed their grammar or failed during
    sampling. `target_states`: input for a draft head. `draft_room`: the plan's limits on the next drafts, for
    the rows that sample.
    """

    batch: SampleRows
    sampled: SampledTokens
    runs: Runs | None = None
    lazy_masked: LazyMaskResult = LazyMaskResult({}, {})
    target_states: TargetStates | None = None
    draft_room: np.ndarray | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledRow, ...] = ()


@dataclass(slots=True)
class Reader:
    """Reads the results of launched steps. `watcher`, `matchers`, `drafting`: None if the engine has none."""

    rows: RowColumns
    sampler: Sampler
    watcher: StopWatcher | None
    matchers: RowMatchers | None
    drafting: Drafting | None
    thinking: ThinkingRows

    def read(self, launched: LaunchedStep) -> StepResult:
        """Return the result of a launched step. The executor sets `device_ns` later."""
        result = self._read(launched)
        result.prompt_logprobs, result.pooled = launched.prompt_logprobs, vectors_of(launched.pooled)
        if launched.batch.wanted & THINKING:
            rows = launched.batch.rows if launched.runs is None else launched.batch.rows[launched.runs.first]
            self.thinking.advance(rows, result.token_ids, result.counts)
        return result

    def _read(self, launched: LaunchedStep) -> StepResult:
        token_ids = launched.sampled.token_ids.numpy().astype(np.int32)
        if not len(token_ids):
            result = StepResult(token_ids)
            self._draft(result, launched, np.zeros(0, np.int32), None)
            return result
        if launched.runs is not None:
            return self._read_runs(launched, token_ids, launched.runs)
        batch = launched.batch
        errors = (
            dict.fromkeys((token_ids == ERROR_TOKEN).nonzero()[0].tolist(), NOT_FINITE)
            | launched.lazy_masked.errors
        )
        stops = find_stops(token_ids, batch, self.rows, self.watcher)
        if batch.wanted & GRAMMAR:
            found = dict(stops)
            repeating = self._take_repeating(batch, found)
            over = {*found, *errors}
            self._cut(batch, found)
            continuing = [index for index in self._masked(batch) if index not in over]
            ends = self._advance(
                batch, continuing, [[token] for token in token_ids[continuing].tolist()], errors
            )
            ends |= launched.lazy_masked.complete
            self._close(batch, [index for index in repeating if index not in (*ends, *errors)], found)
            stops = self._named(batch, {**dict.fromkeys(ends, GRAMMAR_END), **found}.items())
        result = StepResult(token_ids, stops)
        if errors or launched.sampled.has_entries:
            token_ids[list(errors)] = 0
            places = np.arange(len(token_ids))
            places[list(errors)] = NO_PLACE
            result = StepResult(
                token_ids=token_ids,
                stops=tuple(stop for stop in stops if stop[0] not in errors),
                errors=tuple(sorted(errors.items())),
                logprobs=token_entries(launched.sampled, batch, token_ids, places),
            )
        self._draft(result, launched, batch.rows, None)
        return result

    def _read_runs(self, launched: LaunchedStep, token_ids: np.ndarray, runs: Runs) -> StepResult:
        """Return the result of a step with drafts, which may give a row several tokens.

        Rows stop at the same token as without drafts.
        """
        counts = runs.counts(token_ids)
        errors = dict(launched.lazy_masked.errors)
        if ERROR_TOKEN in token_ids:
            for position in (token_ids == ERROR_TOKEN).nonzero()[0].tolist():
                row = int(runs.row_of[position])
                depth = position - int(runs.first[row])
                if depth == 0:
                    errors.setdefault(row, NOT_FINITE)
                # Only the tokens before the non-finite logits are used. The next step computes this position
                # again, and the row fails if the logits are still not finite.
                counts[row] = min(counts[row], max(depth, 1))
        batch = launched.batch
        stops = self._cut_at_stops(token_ids, batch, runs, counts, errors)
        if batch.wanted & GRAMMAR:
            heads = batch.take(runs.first)
            complete = launched.lazy_masked.complete
            stops = self._end_in_runs(token_ids, heads, runs, complete, stops, counts, errors)
        if errors:
            counts[list(errors)] = 1
            token_ids[runs.first[list(errors)]] = 0
        if batch.wanted & COUNTED:
            self._count(token_ids, batch, runs, counts)
        kept = np.arange(len(token_ids)) < (runs.first + counts)[runs.row_of]
        entries: TokenEntries = ()
        if launched.sampled.has_entries:
            places = np.where(kept, runs.row_of, NO_PLACE)
            places[runs.first[list(errors)]] = NO_PLACE
            entries = token_entries(launched.sampled, batch, token_ids, places)
        result = StepResult(
            token_ids=token_ids[kept],
            stops=tuple(stop for stop in stops if stop[0] not in errors),
            errors=tuple(sorted(errors.items())),
            logprobs=entries,
            counts=counts.astype(np.int32),
        )
        self._draft(result, launched, batch.rows[runs.first], counts)
        return result

    def _cut_at_stops(
        self,
        token_ids: np.ndarray,
        batch: SampleRows,
        runs: Runs,
        counts: np.ndarray,
        errors: dict[int, str],
    ) -> Stops:
        """Return the stops within the rows' accepted tokens, and shorten `counts` to the stops."""
        if not may_stop(token_ids, batch, self.rows):
            return ()
        stops: dict[int, str] = {}
        sound = np.ones(len(counts), bool)
        sound[list(errors)] = False
        for depth in range(int(counts.max())):
            reached = np.flatnonzero((counts > depth) & sound)
            positions = runs.first[reached] + depth
            found = find_stops(token_ids[positions], batch.take(positions), self.rows, self.watcher)
            for index, kind in found:
                row = int(reached[index])
                stops[row], counts[row] = kind, depth + 1
        return tuple(sorted(stops.items()))

    def _count(self, token_ids: np.ndarray, batch: SampleRows, runs: Runs, counts: np.ndarray) -> None:
        """Count the accepted tokens for penalties and history rules."""
        for depth in range(int(counts.max())):
            positions = runs.first[counts > depth] + depth
            sampled_tokens = upload(token_ids[positions].astype(np.int64), self.sampler.device)
            with torch.inference_mode():  # the sampler's tables were created in inference mode
                self.sampler.count(batch.take(positions), sampled_tokens)

    def _end_in_runs(
        self,
        token_ids: np.ndarray,
        heads: SampleRows,
        runs: Runs,
        complete: dict[int, int],
        stops: Stops,
        counts: np.ndarray,
        errors: dict[int, str],
    ) -> Stops:
        """Return `stops`, and a stop for each row whose grammar is complete. If a row has two stops, the
        earlier stop counts.

        Tokens after the end of the grammar are cut. `complete`: row -> number of the step's tokens up to the
        grammar's end, for rows that completed their grammar during sampling. Changes `counts` and `errors`.
        """
        stopped = dict(stops)
        repeating = self._take_repeating(heads, stopped)
        over = dict(stopped)  # `_cut` may remove rows from `stopped`
        self._cut(heads, stopped)
        continuing, sampled_tokens = [], []
        for row in self._masked(heads):
            first, count = int(runs.first[row]), int(counts[row]) - (row in over)
            if count and row not in errors:
                continuing.append(row)
                sampled_tokens.append(token_ids[first : first + count].tolist())
        ends = self._advance(heads, continuing, sampled_tokens, errors) | complete
        for row, used in ends.items():
            if row not in over or used < counts[row]:
                stopped[row], counts[row] = GRAMMAR_END, used
        self._close(heads, [row for row in repeating if row not in (*ends, *errors)], stopped)
        return self._named(heads, stopped.items())

    def _cut(self, batch: SampleRows, stops: dict[int, str]) -> None:
        """Correct `stops` for rows that have a grammar and ended at a stop string.

        A stop's kind becomes STRING if the grammar was complete, otherwise CUT. Rows whose answer continues
        until the grammar is complete are removed.
        """
        if self.matchers is None or self.watcher is None:
            return
        for index, kind in list(stops.items()):
            if kind != STRING or not batch.columns["options"][index] & GRAMMAR:
                continue
            row = int(batch.rows[index])
            cut = self.watcher.cut(row)
            is_complete = cut is not None and self.matchers.cut(row, cut)
            if is_complete is None:
                del stops[index]
            else:
                stops[index] = STRING_ENDS[is_complete]

    def _take_repeating(self, batch: SampleRows, stops: dict[int, str]) -> list[int]:
        """Remove from `stops` the rows that have a grammar and repeat themselves. Return these rows."""
        options = batch.columns["options"]
        found = [index for index, kind in stops.items() if kind == REPETITION and options[index] & GRAMMAR]
        for index in found:
            del stops[index]
        return found

    def _close(self, batch: SampleRows, repeating: list[int], stops: dict[int, str]) -> None:
        """Add the rows in `repeating` to `stops`, except rows whose answer continues until the grammar is
        complete. Call after the grammars have advanced.
        """
        for index in repeating:
            is_complete = self.matchers is not None and self.matchers.close(int(batch.rows[index]))
            if is_complete is not None:
                stops[index] = REPETITION_ENDS[is_complete]

    def _named(self, batch: SampleRows, stops: Iterable[tuple[int, str]]) -> Stops:
        """Return `stops` sorted by row. A closer generates the tokens that complete a truncated value. A stop
        after such tokens gets the kind CLOSED or REPETITION_CLOSED.
        """
        closers = {} if self.matchers is None else self.matchers.closers
        # The option is checked first, because `closers` may still have the closer for the row's previous
        # request.
        options = batch.columns["options"]
        named = []
        for index, kind in sorted(stops):
            closer = closers.get(int(batch.rows[index])) if options[index] & CLOSES else None
            if closer is not None and closer.has_closed and kind not in (CUT, REPETITION):
                kind = REPETITION_CLOSED if closer.has_repeated else CLOSED
            named.append((index, kind))
        return tuple(named)

    def _advance(
        self,
        batch: SampleRows,
        continuing: list[int],
        sampled_tokens: list[list[int]],
        errors: dict[int, str],
    ) -> dict[int, int]:
        """Advance the grammars for the rows `continuing` (indices into `batch`) by their `sampled_tokens`.

        Returns index -> number of tokens up to the grammar's end, for each row whose grammar is now complete.
        Adds failed rows to `errors`.
        """
        if self.matchers is None or not continuing:
            return {}
        complete, broken = self.matchers.advance(batch.rows[continuing].tolist(), sampled_tokens)
        errors |= {continuing[place]: what for place, what in broken.items()}
        return {continuing[place]: count for place, count in complete.items()}

    def _masked(self, batch: SampleRows) -> list[int]:
        """Return the rows whose grammar was applied as a mask. These grammars must still advance by the
        sampled tokens.
        """
        options = batch.columns["options"]
        is_masked = (options & GRAMMAR) != 0
        if self.sampler.device.type == "cpu":
            is_masked &= ~uses_lazy_mask(options)
        return np.flatnonzero(is_masked).tolist()

    def _draft(
        self, result: StepResult, launched: LaunchedStep, rows: np.ndarray, counts: np.ndarray | None
    ) -> None:
        """Add to `result` the drafts for the continuing rows, and the drafting time.

        `counts`: each row's number of tokens; None: one token each.
        """
        if self.drafting is None or not self.drafting.num_followed:
            return
        if launched.draft_room is not None and not len(launched.draft_room):
            self.drafting.skip(rows, result.token_ids, counts)
            return
        if counts is None:
            counts = np.ones(len(rows), np.int64)
        clock = StepClock()
        # Rows with a closer get no drafts, because a closer may replace any sampled token.
        continuing = (self.rows.columns["options"][rows] & CLOSES) == 0
        continuing[[index for index, _ in (*result.stops, *result.errors)]] = False
        drafts = self.drafting.drafts(
            rows,
            result.token_ids,
            counts,
            continuing.nonzero()[0],
            launched.target_states,
            launched.draft_room,
        )
        result.draft_ns = clock.lap()
        if drafts is None:
            return
        result.drafts = drafts.token_ids
        result.num_drafts, drafters = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        result.num_drafts[continuing], drafters[continuing] = drafts.counts, drafts.drafters
        result.drafters = drafters if drafters.any() else None

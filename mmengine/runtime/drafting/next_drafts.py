"""Chooses the next step's drafts. A row gets its drafts from the first drafter that has drafts for it.

A draft head may continue another drafter's drafts. A drafter may be third-party code: if a drafter raises an
exception or returns invalid drafts, its drafts in this step are ignored. Failures are counted, and the first
failure is logged.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import structlog

from mmengine.core.executor import Admission, StepPlan
from mmengine.runtime.drafting.head.drafter import GivenDrafts, HeadDrafter
from mmengine.runtime.drafting.head.target_states import TargetStates
from mmengine.runtime.rows import GRAMMAR, RowColumns
from mmengine.spec_decode.base import Drafter, Proposed, within_vocabulary
from mmengine.spec_decode.texts import Texts
from mmengine.structured_output.rows.rows import RowMatchers

# Maximum number of a head's proposals for a row in a step. The second proposal continues after tokens that
# the grammar forces.
MOST_GOES = 2

log = structlog.get_logger("mmengine.operators")


class Drafts(NamedTuple):
    """The drafts for s rows, as in StepResult. `token_ids`: int32 [counts.sum()]. `counts`: int32 [s].
    `drafters`: int32 [s], the drafter that proposed each row's last draft, as an index in `Drafting.names`.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    drafters: np.ndarray


class Drafting:
    """An engine's drafters, preferred drafters first. A drafter's index is its number in the log.

    A row gets at most `most` drafts, and no more drafts than remaining output tokens. All drafts conform to
    the row's grammar.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        most: int,
        max_model_len: int,
        vocab_size: int,
        rows: RowColumns,
        matchers: RowMatchers | None,
    ):
        self._drafters, self._most, self._rows, self._matchers = drafters, most, rows, matchers
        self.names = [str(getattr(each, "name", type(each).__name__)) for each in drafters]
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._texts = Texts(len(rows.columns), max_model_len + 1)
        # [drafter, row]: whether the drafter drafts for the request in the row.
        self._follows = np.zeros((len(drafters), len(rows.columns)), bool)
        self.num_followed = 0  # number of rows for which at least one drafter drafts
        # The drafter that reads hidden states of the target model, or None.
        self.head = next((each for each in drafters if isinstance(each, HeadDrafter)), None)
        self.failures = [0] * len(drafters)

    @property
    def report(self) -> list[tuple[str, int]]:
        """Each drafter's name and failure count, in the order of the drafter numbers."""
        return list(zip(self.names, self.failures, strict=True))

    def admit(self, admission: Admission) -> None:
        row, request = admission.row, admission.request
        self._texts.settle()
        for number, drafter in enumerate(self._drafters):
            try:
                drafter.leave(row, self._texts)
            except Exception as error:
                self._failed(number, error)
        self._texts.admit(row, admission.token_ids, len(request.prompt_token_ids))
        for number, drafter in enumerate(self._drafters):
            try:
                self._follows[number, row] = drafter.admit(row, request, self._texts)
            except Exception as error:
                self._follows[number, row] = False
                self._failed(number, error)
        self.num_followed = int(np.count_nonzero(self._follows.any(axis=0)))

    def skip(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None) -> None:
        """Add the tokens of a step after which no drafts are needed. `counts` None: one token for each
        row.
        """
        self._texts.append_later(rows, token_ids, counts)

    def drafts(
        self,
        rows: np.ndarray,
        token_ids: np.ndarray,
        counts: np.ndarray,
        going: np.ndarray,
        states: TargetStates | None = None,
        room: np.ndarray | None = None,
    ) -> Drafts | None:
        """Return the drafts after a step in which `rows` [s] got `token_ids`, or None if there are no drafts.

        `counts` [s]: how many tokens each row got. `going`: ascending indices (intp) of the rows that
        continue and may have drafts. `states`: the target model's hidden states in this step, for a draft
        head. `room`: each drafter's maximum number of drafts for each row (`StepPlan.draft_room`).
        """
        if not self.num_followed:
            return None
        rows = rows.astype(np.intp)
        self._texts.settle()
        self._texts.append(rows, token_ids, counts)
        head_knows = self.head is None or self._catch_up(self.head, states)
        if room is not None and not len(room):
            return None
        rows = rows[going]
        follows = self._follows[:, rows]
        if not head_knows:
            follows[self._drafters.index(self.head)] = False
        if room is not None:
            numbers = np.minimum(np.arange(len(self._drafters)), len(room) - 1)
            room = room[numbers[:, None], going]
            follows = follows & (room > 0)
        if not follows.any():
            return None
        longest = np.minimum(self._rows.columns["max_total"][rows], self._max_model_len)
        most = np.clip(longest - self._texts.lengths[rows] - 1, 0, self._most)
        drafts = np.zeros((len(rows), self._most), np.int32)
        found, drafters = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        out = drafts, found, drafters
        for number, selected in enumerate(follows):
            limits = most if room is None else np.minimum(most, room[number])
            self._draft(number, np.flatnonzero(selected), rows, limits, out)
        if not found.any():
            return None
        return Drafts(drafts[np.arange(self._most) < found[:, None]], found, drafters)

    def _catch_up(self, head: HeadDrafter, states: TargetStates | None) -> bool:
        """Pass the step's tokens and hidden states to the head. Returns False if the head failed and must not
        draft after this step.
        """
        if not head.is_asked:
            if states is not None:
                head.wait(states)
            return True
        try:
            head.catch_up(states, self._texts)
        except Exception as error:
            self._failed(self._drafters.index(head), error)
            return False
        return True

    def _draft(
        self,
        number: int,
        selected: np.ndarray,
        rows: np.ndarray,
        limits: np.ndarray,
        out: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Put drafter `number`'s tokens for rows[selected] into `out`, within the rows' `limits`.

        A draft head continues after other drafters' tokens. All other drafters skip rows that have drafts.
        """
        drafts, found, _ = out
        is_head = self._drafters[number] is self.head
        for _ in range(MOST_GOES if is_head else 1):
            if not len(selected):
                return
            before, bounds = found[selected], limits[selected]
            if is_head:
                given = GivenDrafts(drafts[selected], before) if before.any() else None
                proposed = self._propose(number, rows[selected], np.maximum(bounds - before, 0), given)
            else:
                proposed = self._propose(number, rows[selected], np.where(before > 0, 0, bounds))
            if proposed is None:
                return
            selected = self._take(number, proposed, selected, rows, limits, out)

    def _propose(
        self, number: int, rows: np.ndarray, most: np.ndarray, given: GivenDrafts | None = None
    ) -> Proposed | None:
        """Return a drafter's proposal, or None without a valid proposal.

        `given`: other drafters' tokens, which a head continues.
        """
        try:
            behind = () if given is None else (given,)
            proposed = self._drafters[number].propose(rows, self._texts, most.copy(), *behind)
            if proposed is None:
                return None
            token_ids, counts = np.asarray(proposed.token_ids), np.asarray(proposed.counts)
            if counts.shape != most.shape or counts.dtype.kind not in "iu":
                raise ValueError("the drafter's counts do not have one entry per row")
            if (counts < 0).any() or (counts > most).any():
                raise ValueError("the drafter gave more drafts than requested")
            if token_ids.shape != (int(counts.sum()),) or token_ids.dtype.kind not in "iu":
                raise ValueError("the drafter's token ids do not match its counts")
            if getattr(self._drafters[number], "copies_text", False):
                token_ids, counts = within_vocabulary(token_ids, counts, self._vocab_size)
            if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self._vocab_size:
                raise ValueError("the drafter gave token ids outside the vocabulary")
            return Proposed(token_ids, counts)
        except Exception as error:
            self._failed(number, error)
            return None

    def _take(
        self,
        number: int,
        proposed: Proposed,
        selected: np.ndarray,
        rows: np.ndarray,
        limits: np.ndarray,
        out: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Put the proposal for rows[selected] into `out`, up to the first token that a row's grammar forbids.

        Returns indices in `rows`: the rows whose grammar appended forced tokens within `limits`. The drafter
        may continue after these tokens.
        """
        drafts, found, drafters = out
        first, ends, places = found.copy(), found.copy(), np.arange(self._most)
        ends[selected] += proposed.counts
        drafts[(places >= first[:, None]) & (places < ends[:, None])] = proposed.token_ids
        forces = np.zeros(len(found), bool)
        if self.names[number] != "grammar" and self._matchers is not None:
            mixes = self._drafters[number] is self.head and "grammar" in self.names
            bound = (ends > first) & (self._rows.columns["options"][rows] & GRAMMAR != 0)
            for place in np.flatnonzero(bound).tolist():
                row, ahead = int(rows[place]), drafts[place, : ends[place]].tolist()
                end = max(self._matchers.num_allowed(row, ahead), int(first[place]))
                if mixes and end < limits[place]:
                    forced = self._matchers.forced_after_drafts(row, int(limits[place]) - end)
                    drafts[place, end : end + len(forced)] = forced
                    end, forces[place] = end + len(forced), len(forced) > 0
                ends[place] = end
        found[:] = ends
        drafters[ends > first] = number
        return np.flatnonzero(forces)

    def _failed(self, number: int, error: Exception) -> None:
        self.failures[number] += 1
        if self.failures[number] == 1:
            reason = f"{type(error).__name__}: {error}"[:300]
            log.warning("a drafter failed; its drafts are dropped", drafter=self.names[number], reason=reason)


def drafts_for_no_row(plan: StepPlan) -> bool:
    """Return whether no row may have drafts in the step after `plan`."""
    return plan.draft_room is not None and not len(plan.draft_room)

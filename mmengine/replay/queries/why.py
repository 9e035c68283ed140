"""Explains a request's history: waits, prefix cache hits, and blocks and encoder outputs that other requests
took. Each claim comes from the state just before the explained decision.
"""

from pathlib import Path
from typing import Any

import msgspec

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.fold import sessions
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.request_state import request_of
from mmengine.core.state.sessions import SessionState
from mmengine.core.state.view import View
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.hosted.verify import PROGRESS
from mmengine.replay.queries.expected_decisions import AGREED, UNKNOWN, Expected, Note, Rules
from mmengine.replay.queries.host_difference import host_difference
from mmengine.replay.queries.media_trail import MediaTrail
from mmengine.replay.queries.prefix_trail import PrefixTrail, describe_miss
from mmengine.replay.queries.reasons import GAVE_WAY, Reasons
from mmengine.replay.queries.waits import Wait, describe_waits
from mmengine.replay.queries.wording import words_of
from mmengine.replay.timeline import fold, is_scheduling
from mmengine.replay.verify_report import Divergence


class Claim(msgspec.Struct, frozen=True):
    """An event in the request's history, with the reason. A claim covers the steps from `step` to
    `last_step`. `since_ns`: time since the request's arrival. `facts`: the numbers in the text.
    """

    step: int
    last_step: int
    since_ns: int
    kind: str
    text: str
    facts: dict[str, Any] = {}


def why(folder: Path, request_id: str, findings: Findings | None = None) -> list[Claim]:
    """Return the history of the last request with this id, ordered by time. `findings`: see CheckedLog.
    Raises LogError for an unknown request, and `verify`'s errors.
    """
    queued: tuple[Record, ev.Queued] | None = None
    of_session = False  # Whether the request continues a session.
    refused: tuple[Record, ev.Finished] | None = None
    for record in CheckedLog(folder):
        event = record.event
        match event:
            case ev.Appended(request_id=name) if name == request_id:
                of_session = True
            case ev.Queued(request_id=name) if name == request_id:
                queued = record, event
            case ev.Finished(request_id=name, reason="rejected") if name == request_id:
                refused = record, event
    if queued is not None and (refused is None or refused[0].sequence < queued[0].sequence):
        whole = _whole(folder, queued[0]) if of_session else queued[1]
        log = CheckedLog(folder, findings=findings)
        return _Inquiry(log, queued[0], whole, host_difference(folder, log.started)).claims()
    if refused is None and request_id in CheckedLog(folder).first_state().requests:
        raise LogError(
            f"the beginning of the log in {folder} was deleted, and with it this request's arrival; see "
            "mmengine log show --request for the rest"
        )
    if refused is None:
        raise LogError(f"no request in {folder} has this id; mmengine log show {folder} lists the requests")
    record, finished = refused
    text = f"Rejected on arrival: {finished.detail}."
    return [Claim(record.step, record.step, 0, "end", text, {"reason": "rejected"})]


def _whole(folder: Path, queued: Record) -> ev.Queued:
    """Return the request's QUEUED event. For a session's request, the session's tokens come first."""
    for state, record in fold(CheckedLog(folder)):
        if record.sequence == queued.sequence and isinstance(record.event, ev.Queued):
            return sessions.with_session_prefix(state, record.event)
    raise LogError("the log changed while it was read; run the command again")


class _Inquiry:
    """Reads a log, and collects the claims about a single request."""

    def __init__(self, log: CheckedLog, queued: Record, request: ev.Queued, difference: Divergence | None):
        """Start at the log's beginning. `queued`: the record of the request's arrival. `request`: the
        arrival's event, with the session's tokens. `difference`: the first call that differs from the host's
        rules, or None.
        """
        self._log, self._queued = log, queued
        self._name = request.request_id
        self.state = log.first_state()
        self.view = View(self.state)
        with log.naming(queued):
            self._request = request_of(request)
            ahead = log.started.constants.media_ahead
            self._prefix = PrefixTrail(self.state, self._request, self._request.prompt_token_ids, ahead)
            self._media = MediaTrail(self.state, self._request)
        is_ours = log.started.decision_version == DECISION_VERSION and not log.started.host
        self._rules = Rules(self.view, is_ours)
        self._words = words_of(log.started, -1 if difference is None else difference.step)
        self._difference = difference
        self._expected: Expected = UNKNOWN  # The rules' decision in place of the last scheduling event.
        self._reasons: Reasons | None = None
        self._found: list[Claim] = []
        self._waits: list[Wait] = []
        self._is_live = False
        # For each session: the last LEASE_TAKEN record, and a remark on the decision to take the lease.
        self._taken: dict[str, tuple[Record, Note]] = {}

    def claims(self) -> list[Claim]:
        for record in self._log:
            with self._log.naming(record):
                self._log.check(self.state, record.event)
                if isinstance(record.event, ev.LeaseTaken):
                    self._taken[record.event.session_id] = record, self._rules.lease(record.event)
                if self._is_live or record.sequence == self._queued.sequence:
                    self._before(record)
                self._tell_difference(record)
                losing = self._prefix.loses(record.event) or self._media.loses(record.event)
                expected = self._rules.decision().event if losing else None
                evolve(self.state, record.event)
                self._prefix.after(self.state, record, expected)
                self._media.after(self.state, record, expected)
            if self._found and self._found[-1].kind == "end":
                break
        self._tell_waits()
        if self._is_live:
            where = "running" if self.state.requests[self._name].row >= 0 else "waiting"
            text = f"Still {where} at the end of the log."
            if (found := self._difference) is not None and found.field.endswith(PROGRESS):
                text += f" In the next call {found.derived}."
            self._claim(record, "open", text)
        return sorted(self._found, key=lambda claim: claim.since_ns)

    def _claim(self, record: Record, kind: str, text: str, **facts: Any) -> None:
        since = record.mono_ns - self._queued.mono_ns
        self._found.append(Claim(record.step, record.step, since, kind, self._words.claim(text), facts))

    def _tell_difference(self, record: Record) -> None:
        """Add a claim if `record` is the first decision that differs from the host's rules, and if this
        difference names the request.
        """
        found = self._difference
        if found is None or found.sequence != record.sequence or not self._is_live:
            return
        if self._name not in repr((found.logged, found.derived)):
            return
        text = f"The first decision unlike this build's rules: {found.field} {found.logged}, by the rules "
        text += f"{found.derived}" + (f"; {found.rule}." if found.rule else ".")
        self._claim(record, "rules", text, field=found.field)

    # Methods that turn records into claims

    def _before(self, record: Record) -> None:
        event = record.event
        if is_scheduling(self.state, event):
            self._expected = self._rules.decision()
            self._reasons = self._reasons or Reasons(self.view)
            if isinstance(event, ev.Preempted) and event.request_id == self._name:
                self._tell_waits()
                self._preempted(record, event, self._reasons.blocks_short())
            self._reasons.before(event)
        elif self._reasons is not None:
            self._note_wait(record)
        match event:
            case ev.Queued(request_id=name) if name == self._name:
                self._arrived(record, event)
            case ev.Admitted(request_id=name) if name == self._name:
                self._tell_waits()
                self._admitted(record, event)
            case ev.Scheduled():
                self._scheduled(record, event)
                self._encoded(record, None, event.encode)
            case ev.Encoded(request_id=name) if name == self._name:
                self._encoded_part(record, event)
            case ev.Preempted(request_id=name) if name == self._name and not is_scheduling(self.state, event):
                self._tell_waits()
                self._preempted(record, event, None)
            case ev.Recovered() if self._is_live:
                self._claim(record, "crash", "The process ended, and another process continued the log.")
            case ev.Failed() if self._was_in_step():
                self._claim(record, "failed step", f"A step with this request failed: {event.error}.")
            case ev.Cancelled(request_id=name) if name == self._name:
                self._claim(record, "cancelled", f"Cancelled ({event.reason}).", reason=event.reason)
            case ev.GrammarReady(request_id=name) if name == self._name:
                self._claim(record, "grammar", "Grammar compiled.")
            case ev.Fetched(request_id=name) if name == self._name:
                count = len(event.blocks) // 4
                text = f"{count} further blocks of the prefix are fetched from a store."
                self._claim(record, "fetch", text, blocks=count)
            case ev.Arrived(request_id=name) if name == self._name:
                count = len(event.digests) // 8
                self._claim(
                    record, "arrived", f"{count} blocks of the prefix arrived from the store.", blocks=count
                )
            case ev.Lost(request_id=name) if name == self._name:
                text = f"The store's blocks did not arrive ({event.reason}) and are computed instead."
                self._claim(record, "lost", text, reason=event.reason)
            case ev.Stalled(request_id=name) if name == self._name:
                self._claim(record, "stall", f"Reported as stalled: {event.kind}, {event.detail}.")
            case ev.Finished(request_id=name) if name == self._name:
                self._tell_waits()
                self._ended(record, event)

    def _was_in_step(self) -> bool:
        row = self.state.requests[self._name].row
        return row >= 0 and bool(self.state.in_flight[row] or self.state.scheduled[row])

    def _note_wait(self, record: Record) -> None:
        """Add a wait if the last decided step does not contain the request."""
        assert self._reasons is not None
        reasons, self._reasons = self._reasons, None
        req_state = self.state.requests.get(self._name)
        if isinstance(record.event, ev.Recovered):
            return  # The process ended before the step was decided.
        if req_state is None or req_state.row >= 0 and req_state.row in self.state.step_rows:
            return
        by_name = {reason.request_id: reason for reason in reasons.at_end()}
        reason = by_name[self._name]
        if reason.kind != GAVE_WAY:
            since = record.mono_ns - self._queued.mono_ns
            self._waits.append(Wait(self.state.step, since, reason, by_name.get(reason.other)))

    def _tell_waits(self) -> None:
        if self._waits:
            text, facts = describe_waits(self._waits, self._words)
            first, last = self._waits[0], self._waits[-1]
            self._found.append(Claim(first.step, last.step, first.since_ns, "wait", text, facts))
        self._waits.clear()

    def _arrived(self, record: Record, event: ev.Queued) -> None:
        self._is_live = True
        running, waiting = len(self.state.running), len(self.state.waiting)
        prompt = len(event.prompt) // 4
        media = sum(item.num_embeds for item in event.media)
        num_items = len(event.media)
        in_media = f", {media} of them for images or videos ({num_items})" if media else ""
        adapter = (
            f", for the adapter {event.adapter.name or event.adapter.digest.hex()[:12]}"
            if event.adapter
            else ""
        )
        text = self._words.arrival(prompt, in_media + adapter, running, waiting)
        self._claim(record, "arrival", text, prompt_tokens=prompt, running=running, waiting=waiting)
        session = self.state.sessions.of_request.get(self._name)
        if session is not None:
            self._claim_session(record, session)

    def _claim_session(self, record: Record, session: SessionState) -> None:
        name, kept = session.session_id, session.place.num_kept
        text = f"Continues {kept} tokens of session {name}"
        if gone := len(session.tokens) - kept:
            text += f"; the other {gone} were dropped, because the session would have become too long"
        facts = {"session": name, "kept": kept, "dropped": gone}
        self._claim(record, "session", f"{text}. The session held {len(session.leased)} blocks.", **facts)
        taken, (said, more) = self._taken.get(name, (None, AGREED))
        if taken is not None and isinstance(taken.event, ev.LeaseTaken):
            reason = taken.event.reason
            text = f"Step {taken.step} took all but {taken.event.num_kept} of the session's blocks"
            facts = {"step": taken.step, "reason": reason, **more}
            self._claim(record, "lease taken", f"{text} ({reason}).{said}", **facts)

    def _scheduled(self, record: Record, event: ev.Scheduled) -> None:
        """Add a claim if the step's token count for the request differs from the rules' count."""
        text, facts = self._rules.rows(self.state.requests[self._name].row, event, self._expected)
        if text:
            self._claim(record, "rules", text, **facts)

    def _admitted(self, record: Record, event: ev.Admitted) -> None:
        req_state = self.state.requests[self._name]
        cached = hit_tokens(self.state, event)
        said, more = self._rules.admission(event, self._expected)
        computed = cached if event.num_computed < 0 else event.num_computed
        text = self._words.admission(event, is_again=req_state.num_cached >= 0, num_computed=computed) + said
        self._claim(record, "start", text, row=event.row, tokens=event.num_tokens, **more)
        if event.swap_in:
            text = f"The KV of {req_state.num_swapped} tokens was swapped in from the host."
            self._claim(record, "swap in", text, tokens=req_state.num_swapped)
        elif event.num_computed >= 0 and not self.state.config.block_groups:
            text = f"Shares the prompt computed by {self._request.group}: {event.num_computed} tokens."
            self._claim(record, "group", text, tokens=event.num_computed)
        elif isinstance(event, ev.AdmittedWithState) and event.num_shared > cached:
            text = f"The prefix cache has blocks for {event.num_shared} tokens, but the last kept recurrent "
            text += f"state is after {cached}: the computation starts there."
            self._claim(record, "prefix cache", text, cached_tokens=cached, shared_tokens=event.num_shared)
        else:
            self._cached(record, cached, len(req_state.tokens))
        self._encoded(record, event.row, event.encode)

    def _cached(self, record: Record, cached: int, total: int) -> None:
        state, size, facts = self.state, self.state.block_size, {"cached_tokens": cached, "tokens": total}
        most = (total - 1) // size * size
        if not state.config.enable_prefix_caching:
            text = "Prefix caching is off."
        elif not most:
            text = f"Too short for the prefix cache: its {total} tokens fill no block of {size} tokens "
            text += "and leave one to compute."
        elif cached == most:
            text = f"All {cached} cacheable tokens were hits: {cached // size} blocks."
        elif state.num_groups > 1 and (found := self._prefix.length * size) > cached:
            text = f"The prefix cache has the first {found} tokens for layers that see all keys, but for "
            text += (
                f"layers with a window only the blocks before token {cached}: the computation starts there."
            )
            facts |= {"found_tokens": found}
        else:
            miss, more = describe_miss(self._prefix, self.state, cached // size, self._name)
            facts |= more
            text = f"{cached} of {total} tokens were in the prefix cache. "
            text += f"Block {cached // size} was missing: {miss}."
        self._claim(record, "prefix cache", text, **facts)

    def _encoded(self, record: Record, row: int | None, encode: tuple[tuple[bytes, int, int], ...]) -> None:
        """Add a claim for each of the request's media items in `encode`. `row`: the request's new row, or
        None for a running request.
        """
        row = self.state.requests[self._name].row if row is None else row
        for key, owner, index in encode if row >= 0 else ():
            if owner == row:
                item = self._request.media[index]
                text = f"Item {index} ({item.modality}, {item.num_embeds} embeddings) was encoded: "
                miss, facts = self._media.miss(key)
                self._claim(record, "encoder cache", f"{text}{miss}.", item=index, **facts)

    def _encoded_part(self, record: Record, event: ev.Encoded) -> None:
        """Add a claim if this event encodes the last part of a media item."""
        req_state, item = self.state.requests[self._name], self._request.media[event.index]
        work = req_state.media_work[event.index]
        if event.until >= work:
            text = (
                f"Item {event.index} ({item.modality}, {item.num_embeds} embeddings) was encoded in parts: "
            )
            text += f"{work} units of encoder work, {self.state.config.encoder_piece} per step."
            self._claim(record, "encoder cache", text, item=event.index, work=work)

    def _preempted(self, record: Record, event: ev.Preempted, blocks: tuple[int, int] | None) -> None:
        state = self.state
        facts: dict[str, Any] = {"mode": event.mode, "reason": event.reason}
        text = f"Preempted: {self._words.preemption(event.reason)}"
        if blocks is not None:
            needed, free = blocks
            facts |= {"needed": needed, "free": free}
            text += f" (running requests needed {needed} more, {free} free)"
        other = state.requests_by_row[event.for_row] if event.for_row >= 0 else None
        if other is not None and event.for_row != event.row:
            facts["for"] = other.request.request_id
            text += f", in favour of {facts['for']}"
        said, more = self._rules.preemption_outside(event)
        if blocks is not None:
            said, more = self._rules.preemption(event, self._expected)
        tokens = int(state.num_computed[event.row])
        fate = self._words.recomputed(tokens)
        if event.mode == "swap":
            fate = f"{tokens} computed tokens were copied to the host."
        text = f"{text}.{said} {fate}"
        self._claim(record, "preemption", text, tokens=tokens, **facts, **more)
        req_state = state.token_ids[event.row, : state.num_tokens[event.row]].copy()
        ahead = state.constants.media_ahead
        self._prefix = PrefixTrail(state, self._request, req_state, ahead, self._name)

    def _ended(self, record: Record, event: ev.Finished) -> None:
        req_state = self.state.requests[self._name]
        self._is_live = False
        num_tokens = (
            int(self.state.num_tokens[req_state.row]) if req_state.row >= 0 else len(req_state.tokens)
        )
        output = num_tokens - req_state.num_prompt
        limit = self._request.sampling.max_tokens
        how = {
            "length": "the prompt is computed, and max_tokens is 0"
            if not limit
            else f"max_tokens {limit} reached"
            if output >= limit
            else f"max_model_len {self.state.config.max_model_len} reached",
            "stop": f"the text ended ({event.detail})",
            "repetition": "the text repeated itself (repetition_detection)",
            "abort": f"cancelled ({event.detail})",
            "error": f"error: {event.detail}",
        }.get(event.reason, event.reason)
        said, more = self._rules.end(event)
        facts = {"reason": event.reason, "detail": event.detail, "output_tokens": output, **more}
        how = self._words.status(event.reason) + how
        self._claim(record, "end", f"Finished after {output} tokens: {how}.{said}", **facts)

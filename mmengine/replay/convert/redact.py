"""Redacts a log for publication: keeps its decisions and removes user content.

A keyed hash replaces each token. The hash depends on the token, all earlier tokens of the request, the
positions and hashes of media, the tenant's salt, and the adapter. So equal prefixes stay equal, and prefix
cache hits do not change. Equal tokens after different prefixes become different numbers, so word frequencies
are hidden. Keyed hashes also replace media hashes, salts, ids, adapters and fingerprints. Grammars, stop
strings, biases, seeds, logprobs, envelopes (server data) and error texts are dropped. Lengths, shapes, times
and settings are kept.

    state(i) = BLAKE2b(key, state(i - 1) | token i | runs of media that begin at i)
    token(i) = 31 bits of BLAKE2b(key, state(i - 1) | token i)

token(i) does not depend on media that begin at i. The reason is drafters with a KV cache. Their block keys
include the next block's first token, but not the media that begin at this token.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from mmengine.core.decide.stalls import find_stalls
from mmengine.core.fold import sessions
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.columns import LEFT
from mmengine.core.state.digest import checkpoint, differing_places
from mmengine.core.state.view import View
from mmengine.encoder_cache.cache import encoder_key
from mmengine.errors import InvalidRequest, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.convert.keyed_hashes import REDACTED, KeyedHashes
from mmengine.replay.findings import Findings
from mmengine.replay.host_rules import is_setting
from mmengine.request import Adapter, GrammarRequest, MediaItem, ThinkingBudget

MIN_KEY_BYTES = 16
COMMIT_RECORDS = 64
_MODALITIES = frozenset({"image", "video", "audio"})


@dataclass(slots=True)
class RedactReport:
    records: int = 0
    requests: int = 0
    tokens: int = 0


def redact(source: Path, target: Path, key: bytes, findings: Findings | None = None) -> RedactReport:
    """Write a copy of the log in `source`, without user content, to `target`.

    The copy has the source's decisions. If the source verifies, the copy verifies too. A state digest that is
    wrong in the source is also wrong in the copy. The copy ends with the first decision that the state cannot
    take. `key`: at least 16 unguessable bytes, which are not stored. With the same key, equal values in
    several logs get equal hashes. `findings`: see CheckedLog.

    Raises LogError for a folder that cannot be written, and for a log without its beginning. Also raises
    `verify`'s errors.
    """
    if len(key) < MIN_KEY_BYTES:
        raise InvalidRequest(f"the key has {len(key)} bytes; at least {MIN_KEY_BYTES} are required")
    log = CheckedLog(source, findings=findings)
    if log.begins_after >= 0 or log.first is None:
        raise LogError(f"the beginning of the log in {source} was deleted, and with it the prompts to redact")
    redactor, began = _Redactor(log, key), log.first.mono_ns
    writer = LogWriter(target, wall_ns=lambda: 0)
    try:
        for record in log:
            event: ev.Event | None = None
            with log.naming(record):
                event = redactor.redacted(record.event)
                redactor.fold(record.event, event)
            if event is None:
                break
            writer.append(event, record.step, max(0, record.mono_ns - began))
            if record.sequence % COMMIT_RECORDS == 0 and not writer.commit():
                raise LogError(f"{target} cannot be written: {writer.stalled}")
    finally:
        writer.close()
    return redactor.report


class _Redactor:
    """Redacts events in order, and has the states of both logs."""

    def __init__(self, log: CheckedLog, key: bytes):
        self._hashes = KeyedHashes(key)
        self._log = log
        self._original, self._state = log.first_state(), log.first_state()
        # Maps the new id of each live request to the request's hash state.
        self._chains: dict[str, bytes] = {}
        self._keys: dict[bytes, bytes] = {}  # Maps the key of an encoder output to its redacted key.
        self.report = RedactReport()

    def fold(self, original: ev.Event, redacted: ev.Event) -> None:
        """Apply an event to the original log's state, and its redacted event to the redacted log's state."""
        self.report.records += 1
        self._log.apply(self._original, original)
        evolve(self._state, redacted)

    def redacted(self, event: ev.Event) -> ev.Event:
        hashes, replace = self._hashes, msgspec.structs.replace
        match event:
            case ev.Started():
                return self._started(event)
            case ev.Queued():
                return self._queued(event)
            case ev.Executed():
                return self._executed(event)
            case ev.Drafted():
                return self._drafted(event)
            case ev.Scheduled() | ev.Admitted():
                event = replace(
                    event,
                    encode=tuple((self._key_of(key), row, index) for key, row, index in event.encode),
                    evict=tuple(map(self._key_of, event.evict)),
                )
                if isinstance(event, ev.AdmittedWithAdapter):
                    event = replace(event, adapters_out=tuple(map(self._digest_of, event.adapters_out)))
            case ev.Evicted():
                keys, used = map(self._key_of, event.keys), map(self._key_of, event.used)
                return replace(event, keys=tuple(keys), used=tuple(used))
            case ev.Encoded():
                event = replace(event, evict=tuple(map(self._key_of, event.evict)))
            case ev.Preempted():
                event = replace(event, mode=hashes.text(event.mode), reason=hashes.text(event.reason))
            case ev.Failed():
                return replace(event, error=hashes.text(event.error))
            case ev.GrammarFailed():
                event = replace(event, detail=hashes.text(event.detail))
            case ev.SessionOpened():
                return replace(
                    event,
                    session_id=hashes.name(event.session_id),
                    cache_salt=hashes.salt(event.cache_salt),
                    envelope=b"",
                )
            case ev.Appended() | ev.Leased() | ev.LeaseTaken() | ev.SessionClosed():
                event = replace(event, session_id=hashes.name(event.session_id))
            case ev.Offered():
                event = replace(
                    event, items=tuple((index, self._digests(came)) for index, came in event.items)
                )
            case ev.Arrived():
                event = replace(event, digests=self._digests(event.digests))
            case ev.Lost():
                event = replace(event, reason=hashes.text(event.reason))
            case ev.AdapterLoaded():
                return ev.AdapterLoaded(self._adapter(event.adapter), REDACTED if event.source else "")
            case ev.AdapterUnloaded():
                return ev.AdapterUnloaded(hashes.name(event.name))
            case ev.Cancelled():
                event = replace(event, reason=hashes.text(event.reason))
            case ev.Finished():
                return self._finished(event)
            case ev.Checkpoint():
                return self._checkpoint(event)
            case ev.Stalled():
                return self._stalled(event)
            case ev.Recovered():
                return self._recovered(event)
            case ev.Noted():
                return ev.Noted(hashes.text(event.kind), REDACTED if event.detail else "")
        if hasattr(event, "request_id"):
            event = replace(event, request_id=hashes.name(event.request_id))
        return event

    def _digests(self, digests: bytes) -> bytes:
        """Hash a store's digests, 8 bytes each, so that equal digests stay equal."""
        each = (digests[place : place + 8] for place in range(0, len(digests), 8))
        return b"".join(self._hashes.of(b"kv", one, 8) for one in each)

    def _fingerprints(self, event: ev.Started) -> dict[str, str]:
        hashes = self._hashes.prints(event.fingerprints)
        if not event.host:
            return hashes
        kept = {name: value for name, value in event.fingerprints.items() if is_setting(name, value)}
        return {**hashes, **kept}

    def _started(self, event: ev.Started) -> ev.Started:
        config = {**event.config, "eos_token_ids": ()}
        if config.get("block_store_path"):
            config["block_store_path"] = REDACTED
        return msgspec.structs.replace(event, config=config, fingerprints=self._fingerprints(event))

    def _queued(self, event: ev.Queued) -> ev.Queued:
        hashes, name = self._hashes, self._hashes.name(event.request_id)
        whole = sessions.with_session_prefix(self._original, event)
        salt, before = hashes.salt(whole.cache_salt), len(whole.prompt) - len(event.prompt)
        media, marks = tuple(map(self._item, whole.media)), {}
        adapter = event.adapter and self._adapter(event.adapter)
        visual = (b"", b"")
        if event.adapter and adapter and adapter.visual:
            visual = event.adapter.digest, adapter.digest
        for old, new in zip(whole.media, media, strict=True):
            key = encoder_key(old.mm_hash, whole.cache_salt, visual[0])
            self._keys[key] = encoder_key(new.mm_hash, salt, visual[1])
            first = 0
            for start, length in old.runs:
                marks[start] = new.mm_hash + first.to_bytes(8, "little")
                first += length
        tokens = np.frombuffer(whole.prompt + event.outputs, np.int32)
        root = salt.encode() + (adapter.digest if adapter else b"")
        numbers, self._chains[name] = hashes.chain(root, tokens, len(tokens), marks)
        self._forget_keys()
        self.report.requests += 1
        self.report.tokens += len(tokens) - before // 4
        sampling = msgspec.structs.replace(
            event.sampling,
            stop=(),
            stop_token_ids=(),
            logit_bias={},
            seed=None,
            logprobs=None,
            prompt_logprobs=None,
            suppress_tokens=(),
            bad_words_ids=(),
            sequence_bias=(),
        )
        return msgspec.structs.replace(
            event,
            request_id=name,
            prompt=numbers[before // 4 : len(whole.prompt) // 4].tobytes(),
            sampling=sampling,
            media=tuple(map(self._item, event.media)),
            cache_salt=hashes.salt(event.cache_salt),
            grammar=_form(event.grammar),
            grammar_slot=ev.NO_SLOT,
            group=hashes.name(event.group),
            envelope=b"",
            thinking=event.thinking and ThinkingBudget(event.thinking.tokens, True, (), (0,)),
            outputs=numbers[len(whole.prompt) // 4 :].tobytes(),
            adapter=adapter,
        )

    def _adapter(self, adapter: Adapter) -> Adapter:
        """Hash an adapter's data, so that equal adapters stay equal."""
        return Adapter(
            self._digest_of(adapter.digest),
            adapter.num_bytes,
            adapter.visual,
            self._hashes.name(adapter.name),
        )

    def _digest_of(self, digest: bytes) -> bytes:
        return self._hashes.of(b"adapter", digest)

    def _item(self, item: MediaItem) -> MediaItem:
        modality = item.modality if item.modality in _MODALITIES else REDACTED
        return MediaItem(
            self._hashes.of(b"media", item.mm_hash), modality, item.runs, item.grid, item.interval
        )

    def _key_of(self, key: bytes) -> bytes:
        return self._keys[key] if key in self._keys else self._hashes.of(b"key", key)

    def _forget_keys(self) -> None:
        """Drop keys of encoder outputs that are neither cached nor needed by a live request."""
        live = self._original.requests.values()
        needed = len(self._original.encoder.entries) + sum(len(req_state.media_keys) for req_state in live)
        if len(self._keys) > 2 * needed + 4096:
            keep = {key for req_state in live for key in req_state.media_keys} | set(
                self._original.encoder.entries
            )
            # The newest keys include those of the current request.
            newest = dict(list(self._keys.items())[-2048:])
            self._keys = {key: new for key, new in self._keys.items() if key in keep} | newest

    def _executed(self, event: ev.Executed) -> ev.Executed:
        """Redact a step's result. Failed rows and rows without a request get zeros."""
        state, sampled = self._state, self._state.sampled_rows().tolist()
        tokens, drafts = np.frombuffer(event.token_ids, np.int32), np.frombuffer(event.drafts, np.int32)
        counts, num_drafts = _ints(event.counts, len(sampled), 1), _ints(event.num_drafts, len(sampled), 0)
        broken = {index for index, _ in event.errors}
        new_tokens, new_drafts = np.zeros_like(tokens), np.zeros_like(drafts)
        at = draft_at = 0
        for index, (row, count, ahead) in enumerate(zip(sampled, counts, num_drafts, strict=True)):
            own, own_drafts = slice(at, at + count), slice(draft_at, draft_at + ahead)
            at, draft_at = at + count, draft_at + ahead
            if index in broken or state.ended[row] == LEFT:
                continue
            name = state.requests_by_row[row].request.request_id
            run = np.concatenate((tokens[own], drafts[own_drafts]))
            keep = min(count, int(state.max_total[row] - state.num_tokens[row]))
            numbers, self._chains[name] = self._hashes.chain(self._chains[name], run, keep)
            new_tokens[own], new_drafts[own_drafts] = numbers[:count], numbers[count:]
        self.report.tokens += len(tokens)
        return msgspec.structs.replace(
            event,
            token_ids=new_tokens.tobytes(),
            drafts=new_drafts.tobytes(),
            stops=tuple((index, self._hashes.text(kind)) for index, kind in event.stops),
            errors=tuple((index, self._hashes.text(what)) for index, what in event.errors),
            logprobs=(),
            prompt_logprobs=(),
            pooled=tuple((row, digest and self._digest_of(digest), b"") for row, digest, _ in event.pooled),
        )

    def _drafted(self, event: ev.Drafted) -> ev.Drafted:
        drafts, parts, at = np.frombuffer(event.drafts, np.int32), [], 0
        rows, counts = np.frombuffer(event.rows, np.int32), np.frombuffer(event.num_drafts, np.int32)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            name = self._state.requests_by_row[row].request.request_id
            parts.append(self._hashes.chain(self._chains[name], drafts[at : at + count], 0)[0])
            at += count
        return msgspec.structs.replace(event, drafts=b"".join(part.tobytes() for part in parts))

    def _finished(self, event: ev.Finished) -> ev.Finished:
        name, detail = self._hashes.name(event.request_id), event.detail
        self._chains.pop(name, None)
        full = f"{self._state.config.max_waiting} requests wait already (max_waiting)"
        kept = detail if detail == full else self._hashes.text(detail)
        return ev.Finished(name, self._hashes.text(event.reason), kept, event.code)

    def _checkpoint(self, event: ev.Checkpoint) -> ev.Checkpoint:
        """Redact a checkpoint. A wrong digest stays wrong, in the same columns and requests."""
        ours, theirs = checkpoint(self._state), checkpoint(self._original)
        if event == theirs:
            return ours
        return ev.Checkpoint(
            bytes(byte ^ 0xFF for byte in ours.digest) if event.digest != theirs.digest else ours.digest,
            _parted(ours.columns, differing_places(event.columns, theirs.columns)),
            _parted(ours.requests, differing_places(event.requests, theirs.requests)),
        )

    def _stalled(self, event: ev.Stalled) -> ev.Stalled:
        """Return a stall report whose text is generated from the redacted state."""
        name = self._hashes.name(event.request_id)
        for stall in find_stalls(View(self._state)):
            if (stall.kind, stall.request_id) == (event.kind, name):
                return stall
        return ev.Stalled(self._hashes.text(event.kind), name, REDACTED)

    def _recovered(self, event: ev.Recovered) -> ev.Recovered:
        hashes = self._hashes
        return msgspec.structs.replace(
            event,
            mode=event.mode if event.mode in ("strict", "tail", "salvage") else REDACTED,
            cuts=tuple(("", offset, num_bytes) for _, offset, num_bytes in event.cuts),
            lost=tuple((hashes.name(name), hashes.text(why)) for name, why in event.lost),
            fingerprints=hashes.prints(event.fingerprints),
        )


def _parted(sums: bytes, places: list[int]) -> bytes:
    """Return a copy of the 4-byte checksums `sums`, with wrong values at the indices `places`."""
    values = np.frombuffer(sums, np.uint32).copy()
    values[[place for place in places if place < len(values)]] ^= 0xFFFFFFFF
    return values.tobytes()


def _ints(column: bytes | None, count: int, each: int) -> list[int]:
    return [each] * count if column is None else np.frombuffer(column, np.int32).tolist()


def _form(grammar: GrammarRequest | None) -> GrammarRequest | None:
    """Return a grammar request without the grammar's text, which no decision reads."""
    return None if grammar is None else GrammarRequest("", REDACTED, on_truncation=grammar.on_truncation)

"""Slots for grammars that many requests share, so that a log stores each such grammar only once.

A QUEUED event may name a slot. If the event also contains a grammar's source, the source is stored in the
slot. Otherwise the request uses the grammar that is already in the slot. The slots' contents depend only on
the events in the log, so `mmengine log verify` derives each event's slot again.
"""

import hashlib

import msgspec

from mmengine.events.vocabulary import NO_SLOT, Queued

MAX_SLOTS = 32
SHORTEST = 256  # minimum length in characters; a slot for a shorter grammar would save nothing
LONGEST = 2**20  # maximum length in characters, which limits the size of all slots together


class GrammarSlots:
    """One log's slots, ordered by their last use. The most recently used slot is the last one."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[str, str]] = {}  # slot -> (kind, source)
        self._digests: dict[int, bytes] = {}
        self._slot_of: dict[tuple[str, str], int] = {}

    def whole(self, queued: Queued) -> Queued:
        """Return QUEUED with its grammar's source and without a slot number. Raises ValueError if the
        event refers to an empty slot.
        """
        grammar = queued.grammar
        if queued.grammar_slot == NO_SLOT:
            return queued
        if grammar is not None and not grammar.source:
            if queued.grammar_slot not in self._slots:
                raise ValueError(f"it asks for the grammar in slot {queued.grammar_slot}, which is empty")
            kind, source = self._slots[queued.grammar_slot]
            grammar = msgspec.structs.replace(grammar, kind=kind, source=source)
        return msgspec.structs.replace(queued, grammar=grammar, grammar_slot=NO_SLOT)

    def written(self, queued: Queued) -> Queued:
        """Return QUEUED as it must be written to the log, with a slot number if a slot saves space.

        In a replay, `queued` may already have a slot number. Raises ValueError as `whole` does.
        """
        queued = self.whole(queued)
        grammar = queued.grammar
        if grammar is None:
            return queued
        if not SHORTEST <= len(grammar.source) <= LONGEST:
            return queued
        named = self.named(queued)
        if named is not queued:
            return named
        slot = len(self._slots) if len(self._slots) < MAX_SLOTS else next(iter(self._slots))
        return msgspec.structs.replace(queued, grammar_slot=slot)

    def named(self, queued: Queued) -> Queued:
        """Return QUEUED with a slot number in place of the grammar's source. If no slot contains the grammar,
        the event is returned unchanged.
        """
        grammar = queued.grammar
        slot = None if grammar is None else self._slot_of.get((grammar.kind, grammar.source))
        if slot is None or grammar is None:
            return queued
        grammar = msgspec.structs.replace(grammar, kind="", source="")
        return msgspec.structs.replace(queued, grammar=grammar, grammar_slot=slot)

    def keep(self, queued: Queued) -> None:
        """Store the event's grammar in its slot, or mark the slot as most recently used. Raises
        ValueError if the slot number is out of range, or if the grammar is missing or too long.
        """
        slot, grammar = queued.grammar_slot, queued.grammar
        if slot == NO_SLOT:
            return
        if grammar is None or not 0 <= slot < MAX_SLOTS:
            raise ValueError(f"it names the grammar slot {slot}, which does not exist")
        if grammar.source:
            self._put(slot, grammar.kind, grammar.source)
        else:
            self._slots[slot] = self._slots.pop(slot)

    def _put(self, slot: int, kind: str, source: str) -> None:
        if len(source) > LONGEST:
            raise ValueError(f"a slot has a grammar of {len(source)} characters; the limit is {LONGEST}")
        if slot in self._slots:
            self._slot_of.pop(self._slots.pop(slot), None)
        self._slots[slot] = kind, source
        self._slot_of[kind, source] = slot
        self._digests[slot] = hashlib.blake2b(f"{kind}\0{source}".encode(), digest_size=16).digest()

    def saved(self) -> tuple[tuple[int, str, str], ...]:
        return tuple((slot, kind, source) for slot, (kind, source) in self._slots.items())

    def restore(self, saved: tuple[tuple[int, str, str], ...]) -> None:
        for slot, kind, source in saved:
            if not 0 <= slot < MAX_SLOTS:
                raise ValueError(f"there is no slot {slot} for a grammar")
            self._put(slot, kind, source)

    def digest(self) -> bytes:
        return b"".join(slot.to_bytes(1, "little") + self._digests[slot] for slot in self._slots)

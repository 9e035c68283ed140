"""Runs a simulated engine with random faults, as `chaos.py` does, but with requests in sessions.

python -m tests.core.session_chaos 1000 2000
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from mmengine.core.engine import EngineCore
from mmengine.errors import InvalidRequest, MMEngineError, QueueFull, SessionBusy
from mmengine.events import vocabulary as ev
from mmengine.request import PREFILL, MediaItem
from tests.core import chaos
from tests.core.chaos import Chaos, Clock, Plan, Stalling, Unreliable
from tests.core.workloads import small_config, small_request


class Grown:
    """The expected contents of a session: the tokens and media of its completed requests."""

    def __init__(self, salt: str) -> None:
        self.salt, self.tokens, self.media = salt, np.zeros(0, np.int32), ()


class SessionChaos(Chaos):
    def __init__(self, seed: int, folder: Path, *, show: bool = False):
        self.folder, self.plan, self.clock = folder, Plan(seed, show), Clock()
        self.rng = self.plan.rng
        config = small_config(self.rng)
        while config.compat:
            config = small_config(self.rng)
        blocks = config.num_blocks + self.rng.choice([0, 4, 20])
        limits = {"max_sessions": 3, "session_blocks": self.rng.choice([0, 0, 1, 3])}
        limits |= {"whole_prompt": False}  # A session's prompt may be too long for a step.
        self.config = msgspec.structs.replace(config, num_blocks=blocks, **limits)
        self.plan.tell(f"seed {seed}: {self.config.as_dict()}")
        executor = Unreliable(self.plan, self.config, self.clock)
        self.sink = Stalling(self.plan, folder)
        self.core = EngineCore(self.config, executor, sink=self.sink, clock=self.clock)
        self.live, self.ended, self.compiling, self.last = {}, [], [], None
        self.grown: dict[str, Grown] = {}
        self.asked: dict[str, tuple[str, Grown]] = {}  # request id -> (session id, the session's contents)

    def arrive(self) -> None:
        drawn = self.rng.random()
        if drawn < 0.4:
            super().arrive()
            return
        session_id = f"s{self.rng.randrange(4)}"
        try:
            if session_id not in self.core.state.sessions.all and session_id not in self.core.inbox.opening:
                idle = self.rng.choice([0, 0, 400])
                salt = self.rng.choice(["", "tenant"])
                self.core.sessions.open(ev.SessionOpened(session_id, salt, idle))
                self.grown[session_id] = Grown(salt)
            elif drawn < 0.45:
                self.core.sessions.close(session_id, "closed")
            else:
                self.append(session_id)
        except (QueueFull, SessionBusy):
            self.plan.met("refused")
        except InvalidRequest:
            assert session_id in self.core.inbox.closing
        except MMEngineError:
            assert self.core.stalled

    def append(self, session_id: str) -> None:
        name = f"r{self.rng.randrange(8)}"
        if name in self.live:
            return
        grown = self.grown[session_id]
        kept = len(grown.tokens)
        if self.rng.random() < 0.15:
            kept = self.rng.randrange(kept + 1)
            kept = min([kept, *(item.start for item in grown.media if item.start < kept < item.end)])
        room = self.config.max_model_len - 1 - kept
        if room < 1:
            kept, room = 0, self.config.max_model_len - 1
        fresh = small_request(self.rng, name, self.config)
        own = fresh.prompt_token_ids[: self.rng.randint(1, min(room, 24))]
        media = [item for item in grown.media if item.end <= kept]
        for item in fresh.media:
            if item.end <= len(own):
                runs = tuple((start + kept, length) for start, length in item.runs)
                media.append(MediaItem(item.mm_hash, item.modality, runs, item.grid))
        request = replace(
            fresh,
            prompt_token_ids=np.concatenate((grown.tokens[:kept], own)),
            media=tuple(media),
            cache_salt=grown.salt,
            sampling=PREFILL if self.rng.random() < 0.5 else fresh.sampling,
        )
        self.core.sessions.append(session_id, request, is_anchor=self.rng.random() < 0.5)
        self.live[name] = (request, [])
        self.asked[name] = (session_id, grown)

    def step(self) -> None:
        before = dict(self.live)
        super().step()
        for name, (request, tokens) in before.items():
            if name in self.live or name not in self.asked:
                continue
            reason = next(end for ended, got, end in reversed(self.ended) if got is tokens)
            _, grown = self.asked.pop(name)
            if reason in ("stop", "length"):
                grown.tokens = np.concatenate((request.prompt_token_ids, np.array(tokens, np.int32)))
                grown.media = request.media
        busy = {session_id for session_id, _ in self.asked.values()}
        for session_id, session in self.core.state.sessions.all.items():
            if session_id not in busy:
                assert np.array_equal(session.tokens, self.grown[session_id].tokens), session_id
                assert session.media == self.grown[session_id].media

    def check(self) -> None:
        """Check all answers as Chaos does, and that prefill-only requests have no tokens."""
        assert not self.live
        prefills = [each for each in self.ended if each[0].is_prefill]
        assert all(got == [] for _, got, _ in prefills)
        self.ended = [each for each in self.ended if not each[0].is_prefill]
        self.check_tokens()
        self.ended += prefills
        self.check_log()


def check_seed(seed: int, folder: Path, *, show: bool = False):
    run = SessionChaos(seed, folder, show=show)
    try:
        run.run()
        run.check()
    except BaseException as error:
        error.add_note(f"see it again: python -m tests.core.session_chaos {seed} {seed + 1} --show")
        raise
    counts = run.plan.counts
    counts["lease taken"] += run.core.stats().num_leases_taken
    counts["prefill"] += sum(request.is_prefill for request, _, _ in run.ended)
    return counts


def main() -> None:
    first, end = map(int, sys.argv[1:3])
    total = chaos.Counter()
    for seed in range(first, end):
        folder = Path(tempfile.mkdtemp())
        try:
            total += check_seed(seed, folder / "log", show="--show" in sys.argv)
        finally:
            shutil.rmtree(folder)
    print(f"{end - first} seeds hold", dict(total))


if __name__ == "__main__":
    sys.exit(main())

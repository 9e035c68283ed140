"""Minimizes a failing log: first removes requests, and then makes values smaller, as long as the failure
stays the same.

A candidate is the log's script with something removed or made smaller. The minimizer runs the candidate in
memory with this build. A candidate is accepted if its failure has the same signature as the log's failure. A
signature is the failure's kind and its text without numbers and names.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from mmengine.errors import ConfigError, LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.minimize import shrink
from mmengine.replay.minimize.deadline import Deadline, OutOfTime
from mmengine.replay.minimize.failures import Failure, enough_steps, is_playable
from mmengine.replay.rerun.script import Script
from mmengine.request import MediaItem

# A function that returns a script's failure within a number of steps.
Probe = Callable[[Script, int], Failure | None]
# With at most this many requests, each merge is tried with 0 to block_size - 1 additional tokens.
FEW = 6
# The time reserved for a running replay and for writing the result, as a multiple of the best script's replay
# time.
REPRODUCED_IN = 4
SPARE_SECONDS = 0.5
MAX_ROUNDS = 8  # Maximum number of rounds. The minimizer stops after a round that makes nothing smaller.


@dataclass(frozen=True, slots=True)
class Progress:
    """The minimizer's progress. `num_steps`: the step of the failure, or -1 if unknown. `tried`: the number
    of candidates so far.
    """

    phase: str
    tried: int
    num_requests: int
    num_tokens: int
    num_steps: int


class NothingFailed(LogError):
    """Raised if this build runs the log's requests without the failure."""


class Minimizer:
    """Searches for the smallest script with the original failure. `best`: the smallest script so far.
    `failure`: the failure of `best`.

    `probe` returns a script's failure. Candidates are tried while enough time remains before `deadline` to
    write the result. Raises NothingFailed if the whole script does not fail, and OutOfTime if the first
    replay takes too long.
    """

    def __init__(
        self,
        script: Script,
        probe: Probe,
        *,
        deadline: Deadline | None = None,
        progress: Callable[[Progress], None] = lambda progress: None,
    ):
        self._probe, self._progress = probe, progress
        self._deadline = deadline or Deadline()
        self._deadline.doing = "serving its requests for the first time"
        self._phase, self.tried = "looking for the failure", 0
        self.best = script
        self.is_cut_short = False
        # Script digest -> failure, or None if the script does not fail or fails with another signature.
        self._found: dict[bytes, Failure | None] = {}
        self._tell()
        begin = self._deadline.passed()
        failure = probe(script, enough_steps(script))
        self._best_seconds = self._deadline.passed() - begin
        if failure is None:
            raise NothingFailed(
                "this build served the log's requests again and nothing failed; another build may have "
                "written the log (name it with --against), or this kind does not detect the failure"
            )
        self.failure = failure
        self._deadline.doing = "writing the result"
        self._tell()

    def minimize(self, *, settings: bool = False) -> Script:
        """Shrink the script until nothing becomes smaller, and return it. `settings`: whether to shrink the
        settings afterwards.
        """
        if self.failure.step >= 0:
            self._phase = "dropping later events"
            self._try(shrink.keep_until(self.best, self.failure.step))
        self._rounds(self._everything)
        if settings:
            self._rounds(self._settings_too)
        return self.best

    def _rounds(self, shrink_once: Callable[[], None]) -> None:
        for _ in range(MAX_ROUNDS):
            before = self._size()
            shrink_once()
            if self._size() == before:
                break

    def _everything(self) -> None:
        self._requests()
        self._other_events()
        self._pressure()
        self._merges()
        self._ages()
        self._values()

    def _settings_too(self) -> None:
        self._settings()
        self._everything()

    def _try(self, script: Script) -> bool:
        """Return whether the script has the log's failure. If so, store the script as the best script."""
        if self._is_over():
            return False
        digest = shrink.digest(script)
        if digest not in self._found:
            self._found[digest] = self._ask(script) if is_playable(script) else None
        failure = self._found[digest]
        if failure is None:
            return False
        self.best, self.failure = script, failure
        return True

    def _ask(self, script: Script) -> Failure | None:
        """Replay a candidate. Return the failure if the signature equals the log's, otherwise None."""
        self.tried += 1
        most = 2 * self.failure.step + 64 if self.failure.step >= 0 else 2**62
        begin = self._deadline.passed()
        try:
            failure = self._probe(script, most)
        except OutOfTime:
            self.is_cut_short = True
            return None
        if failure is None or failure.signature != self.failure.signature:
            failure = None
        else:
            self._best_seconds = self._deadline.passed() - begin
        self._tell()
        return failure

    def _is_over(self) -> bool:
        """Return whether the remaining time is needed to write the result."""
        if self._deadline.left() < REPRODUCED_IN * self._best_seconds + SPARE_SECONDS:
            self.is_cut_short = True
        return self.is_cut_short

    def _requests(self) -> None:
        self._phase = "leaving out requests"
        whole = self.best
        present = {*self.failure.present}
        names = [event.request_id for event in whole.requests]
        if present and self._try(shrink.keep_requests(whole, present)):
            names = [name for name in names if name in present]
        recent = len(names) // 2
        while recent and self._try(shrink.keep_requests(whole, names[-recent:])):
            names, recent = names[-recent:], recent // 2
        whole = self.best
        shrink.fewest(names, lambda some: self._try(shrink.keep_requests(whole, some)))

    def _other_events(self) -> None:
        """Remove events other than arrivals: cancels, grammars, resets, and failed steps."""
        self._phase = "leaving out other events"
        whole = self.best
        others = [each for each in whole.observations if not isinstance(each.event, ev.Queued)]
        shrink.fewest(others, lambda some: self._try(shrink.keep_events(whole, some)))
        whole = self.best
        steps = list(whole.failed_steps)
        shrink.fewest(
            steps,
            lambda some: self._try(replace(whole, failed_steps={s: whole.failed_steps[s] for s in some})),
        )

    def _pressure(self) -> None:
        """Replace the requests by a few long requests that fill the pool.

        The first prompt is tried with 0 to block_size - 1 additional tokens. Its length changes the order in
        which requests need their next blocks.
        """
        self._phase = "filling the pool with fewer requests"
        whole, names = self.best, [event.request_id for event in self.best.requests]
        counts = [count for count in (2, 3, 4) if count < len(names)]
        groups = [names[len(names) - count - back :][:count] for count in counts for back in (0, 1)]
        for more in range(whole.config.block_size):
            if any(self._try(shrink.fill_pool(whole, group, more)) for group in groups):
                return

    def _merges(self) -> None:
        """Replace two requests by a single long request that holds as much memory as both. If there are at
        most FEW requests, 0 to block_size - 1 additional tokens are tried, as in `_pressure`.
        """
        self._phase = "merging requests"
        before = 0
        while before != len(self.best.requests):
            before = len(self.best.requests)
            for more in range(self.best.config.block_size if before <= FEW else 1):
                for name in [event.request_id for event in reversed(self.best.requests)]:
                    others = [event.request_id for event in self.best.requests if event.request_id != name]
                    any(self._try(shrink.merge_requests(self.best, name, into, more)) for into in others)

    def _ages(self) -> None:
        """Move answer tokens to the prompts. A long prompt takes as much memory as a long answer, but in
        fewer steps.
        """
        self._phase = "turning answers into prompts"
        whole = self.best
        most = max((event.sampling.max_tokens for event in whole.requests), default=1) - 1
        shrink.smallest(0, most, lambda kept: self._try(shrink.move_answers_to_prompts(whole, most - kept)))

    def _values(self) -> None:
        names = [event.request_id for event in self.best.requests]
        self._phase = "making values plain"
        self._try(shrink.plain_tokens(self.best, names))
        self._phase = "letting all arrive at once"
        at_once = self.best
        for name in names:
            at_once = shrink.move_arrival(at_once, name, 0)
        self._try(at_once)
        for name in names:
            self._arrival(name)
            self._answer(name)
            self._media(name)
            self._prompt(name)
            self._fields(name)

    def _arrival(self, name: str) -> None:
        self._phase = "arrivals"
        whole = self.best
        step = next(o.step for o in whole.observations if getattr(o.event, "request_id", "") == name)
        shrink.smallest(0, step, lambda step: self._try(shrink.move_arrival(whole, name, step)))

    def _answer(self, name: str) -> None:
        self._phase = "answers"
        whole = self.best
        most = self._queued(name).sampling.max_tokens
        shrink.smallest(1, most, lambda count: self._try(shrink.shorten_answer(whole, name, count)))
        whole, answer = self.best, self.best.answers[name]
        if answer.stop:
            most = len(answer.tokens)
            shrink.smallest(1, most, lambda count: self._try(shrink.shorten_stop(whole, name, count)))

    def _media(self, name: str) -> None:
        self._phase = "media"
        for index in reversed(range(len(self._queued(name).media))):
            if self._try(shrink.drop_media(self.best, name, index)):
                continue
            whole, item = self.best, self._queued(name).media[index]
            shrink.smallest(
                1,
                item.runs[0][1] if len(item.runs) == 1 else item.runs[0][1] + 1,
                partial(self._try_media_size, whole, item),
            )

    def _try_media_size(self, whole: Script, item: MediaItem, size: int) -> bool:
        return size <= item.runs[0][1] and self._try(shrink.resize_media(whole, item.mm_hash, size))

    def _prompt(self, name: str) -> None:
        self._phase = "prompts"
        for start, end in shrink.text_ranges(self._queued(name)):
            whole = self.best
            shrink.smallest(
                0,
                end - start,
                partial(self._try_text, whole, name, (start, end)),
            )

    def _try_text(self, whole: Script, name: str, text: tuple[int, int], kept: int) -> bool:
        """Return whether the script still fails if the prompt's range `text` (start, end) is cut to `kept`
        tokens.
        """
        start, end = text
        return self._try(shrink.drop_text(whole, name, start + kept, end - start - kept))

    def _fields(self, name: str) -> None:
        self._phase = "making values plain"
        self._try(shrink.plain_tokens(self.best, [name]))
        for fields in shrink.plain_fields(self._queued(name)):
            if self._try(shrink.set_fields(self.best, name, fields)) and len(fields) > 1:
                break

    def _settings(self) -> None:
        self._phase = "settings"
        for name in shrink.SIZES:
            whole = self.best
            shrink.smallest(
                0,
                getattr(whole.config, name),
                partial(self._try_setting, whole, name),
            )

    def _try_setting(self, whole: Script, name: str, value: int) -> bool:
        config = msgspec.structs.replace(whole.config, **{name: value})
        try:
            config.check_resolved()
        except ConfigError:
            return False
        return self._try(replace(whole, config=config))

    def _queued(self, name: str) -> ev.Queued:
        return next(event for event in self.best.requests if event.request_id == name)

    def _size(self) -> tuple:
        """Return a tuple that measures the script's size."""
        requests = self.best.requests
        limits = sum(event.sampling.max_tokens for event in requests)
        config = tuple(getattr(self.best.config, name) for name in shrink.SIZES)
        observations = self.best.observations
        steps = sum(each.step for each in observations)
        return len(observations), self._num_tokens(), limits, steps, config

    def _num_tokens(self) -> int:
        return sum(len(event.prompt) // 4 for event in self.best.requests)

    def _tell(self) -> None:
        step = self.failure.step if hasattr(self, "failure") else -1
        self._progress(Progress(self._phase, self.tried, len(self.best.requests), self._num_tokens(), step))

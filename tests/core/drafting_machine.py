"""Simulates step times and accepted drafts of a machine with drafters, for tests of goodput."""

import random

import numpy as np

from mmengine.core.state.acceptance import DRAFTERS
from mmengine.core.state.goodput import Goodput

MOST = 7


class Drafter:
    """A simulated drafter. In a step it drafts for a row with probability `has_some`, and then makes at most
    `most` drafts. A draft is accepted with probability `chance`. Drafting takes `fixed_us` per step and
    `draft_us` per draft.
    """

    def __init__(self, chance, fixed_us=0.0, draft_us=0.0, most=MOST, has_some=1.0):
        self.chance, self.fixed_us, self.draft_us = chance, fixed_us, draft_us
        self.most, self.has_some = most, has_some


class Machine:
    """A machine whose step takes `step_us`, `row_us` per row and `token_us` per verified draft.

    `policy`: "goodput", "none", or an index. An index activates all drafters up to this index. `noise`: each
    step takes longer by a random share between 0 and `noise`. With noise, one step in a hundred takes five
    times as long. `missed_us`: time to read a missed token. In each step without drafting, the drafters miss
    one token per row. The next step with drafting reads at most 2,048 missed tokens in total.
    """

    def __init__(self, policy, drafters, *, step_us=150, row_us=20, token_us=20, noise=0.0, missed_us=0):
        self.drafters, self.policy = drafters, policy
        self.step_us, self.row_us, self.token_us = step_us, row_us, token_us
        self.noise, self.missed_us, self.missed = noise, missed_us, 0
        self.rng = random.Random(7)
        self.goodput = Goodput(128, MOST)
        self.behind = {}  # (drafter, number of drafts) by row
        self.ns = self.tokens = self.steps = self.asked_steps = self.drafts = 0
        self.work_us = 0  # sum of the steps' times without the added noise

    def admit(self, *rows):
        for row in rows:
            self.goodput.admit(row)
            self.behind.pop(row, None)

    def answer(self, num_rows, length, reading_us):
        """Admit `num_rows` requests, compute their prompts in one step, and decode until each has `length`
        tokens. The prompts take 10 ms, plus `reading_us` if a drafter reads them. Returns whether a drafter
        read the prompts.
        """
        rows = np.arange(num_rows)
        self.admit(*rows.tolist())
        limits = self._limits(rows)
        is_read = bool(limits.any())
        took = 10_000 + (reading_us if is_read else 0) + self._make(rows, limits)
        self.ns, self.tokens = self.ns + int(1000 * took), self.tokens + num_rows
        self.work_us += took
        made = sum(count for _, count in self.behind.values())
        if not self.goodput.count_step(num_rows, made > 0, int(1000 * took)):
            reading_ns = 1000 * reading_us if is_read else 0
            self.goodput.record_step(rows, 0, num_rows, made, int(1000 * took), False, reading_ns=reading_ns)
        end = self.tokens + num_rows * (length - 1)
        while self.tokens < end:
            self.step(rows)
        self.tokens = end
        return is_read

    def run(self, num_rows, steps):
        """Decode `num_rows` rows for `steps` steps, and return the share of steps with drafting."""
        rows, before = np.arange(num_rows), (self.asked_steps, self.drafts)
        for _ in range(steps):
            self.step(rows)
        self.drafts_a_row = (self.drafts - before[1]) / (steps * num_rows)
        return (self.asked_steps - before[0]) / steps

    def step(self, rows):
        limits = self._limits(rows)
        drafted, drafters, counts = (np.zeros(len(rows), np.int32) for _ in range(3))
        for row in rows.tolist():
            number, count = self.behind.get(row, (0, 0))
            drafted[row], drafters[row], kept = count, number, 0
            while kept < count and self.rng.random() < self.drafters[number].chance:
                kept += 1
            counts[row] = kept + 1
        whole = self.step_us + self.row_us * len(rows) + self.token_us * int(drafted.sum())
        making = self._make(rows, limits)
        slower = 1 + self.rng.random() * self.noise
        if self.noise and self.rng.random() < 0.01:
            slower *= 5
        ns, made = int(1000 * slower * (whole + making)), sum(count for _, count in self.behind.values())
        self.ns, self.tokens, self.steps = self.ns + ns, self.tokens + int(counts.sum()), self.steps + 1
        self.drafts, self.work_us = self.drafts + int(drafted.sum()), self.work_us + whole + making
        goodput, drafts = self.goodput, int(drafted.sum())
        if not goodput.count_step(len(rows), bool(drafts or made), ns):
            if drafts:
                goodput.judge(rows, drafters, drafted, counts.tobytes())
            goodput.record_step(rows, drafts, int(counts.sum()), made, ns, True)

    def _limits(self, rows):
        """Return each drafter's draft limits for the rows, int32 [drafters, rows]."""
        limits = np.zeros((DRAFTERS, len(rows)), np.int32)
        room = self.goodput.draft_limits_of(rows)
        if self.policy == "goodput":
            limits[:] = MOST if room is None else room if len(room) else 0
        elif self.policy != "none":
            limits[: self.policy + 1] = MOST
        return limits

    def _make(self, rows, limits):
        """Make drafts for the rows, and return the time in µs."""
        self.behind, took = {}, 0.0
        level = [number for number in range(len(self.drafters)) if limits[number].any()]
        self.asked_steps += bool(level)
        missed, self.missed = self.missed, 0 if level else self.missed + len(rows)
        for number in level:
            drafter = self.drafters[number]
            took += drafter.fixed_us
            for row in rows.tolist():
                most = min(int(limits[number, row]), drafter.most)
                if row not in self.behind and most and self.rng.random() < drafter.has_some:
                    self.behind[row] = (number, most)
                    took += drafter.draft_us * most
        return took + (self.missed_us * min(missed, 2048) if level else 0)

    @property
    def ns_a_token(self):
        return self.ns / self.tokens

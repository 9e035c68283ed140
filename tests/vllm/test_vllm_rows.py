"""Tests how the recorder finds the rows of a step and of a model runner's output."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine_vllm.columns import int32_bytes, int64_bytes, intp_array, intp_of
from mmengine_vllm.contents import PseudoIds, TokenIds
from mmengine_vllm.entries import Step
from mmengine_vllm.results import tokens_of
from mmengine_vllm.rows import Rows, StepRows, find_row
from mmengine_vllm.runner_order import MOST_LEFT, PART, RunnerOrder


def test_a_row_is_found_only_at_its_own_place():
    # `find_row` must not match bytes that belong to two adjacent numbers in the column.
    rng = random.Random(5)
    for _ in range(200):
        rows = rng.sample(range(1100), rng.randint(0, 60))
        column = int32_bytes(rows)
        for row in (*rows, 256, 65536, 0):
            assert find_row(column, row) == (rows.index(row) if row in rows else -1)


class Batch:
    """Random steps, in which requests start, end, are preempted, resume, or are not scheduled."""

    def __init__(self, seed):
        self.rng, self.rows = random.Random(seed), Rows(90)
        self.step_rows, self.running, self.resting, self.count = StepRows(self.rows), [], [], 0
        self.order, self.number = [], 0

    def step(self):
        """Return a step. Its `column` lists the running rows' numbers (from `StepRows`), and then the new
        rows' numbers.
        """
        for name in self.rng.sample(self.running, min(len(self.running), self.rng.choice((0, 0, 1, 3)))):
            self.running.remove(name)
            self.rows.take(name, [])
            if self.rng.random() < 0.5:
                self.resting.append(name)
        missing = self.rng.choice(self.running) if self.running and self.rng.random() < 0.1 else ""
        running = [name for name in self.running if name != missing]
        column, _ = self.step_rows.column(running)
        assert column == self.rows.rows_of(running)
        new = []
        for _ in range(min(self.rng.choice((0, 0, 1, 2)), 90 - len(self.rows))):
            if self.resting and self.rng.random() < 0.5:
                new.append(self.resting.pop())
            else:
                new.append(f"r{self.count}")
                self.count += 1
        rows = [self.rows.give(name) for name in new]
        self.running += new
        ids = running + new
        column += int32_bytes(rows)
        self.step_rows.decided(ids, column)
        self.number += 1
        return Step(self.number, None, ids, column, len(new), 0, 0)

    def result(self, step):
        """Return the step's output in the order that vLLM's persistent batch would have."""
        for name in [name for name in self.order if name not in step.ids]:
            place, last = self.order.index(name), self.order.pop()
            if last != name:
                self.order[place] = last
        self.order += [name for name in step.ids if name not in self.order]
        names = self.order.copy()
        tokens = [[1000 * self.number + int(name[1:])] for name in names]
        if self.rng.random() < 0.1:  # a prompt is only partly prefilled, so its request gets no token
            tokens[self.rng.randrange(len(tokens))] = []
        index = {name: place for place, name in enumerate(names)}
        return SimpleNamespace(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)


@pytest.mark.parametrize("lag", [0, 1], ids=["synchronous", "asynchronous"])
def test_tokens_reach_the_rows_of_their_requests(lag):
    for seed in range(6):
        batch, order, flying = Batch(seed), RunnerOrder(), []
        for _ in range(400):
            step = batch.step()
            if not step.ids:
                continue
            flying.append((step, batch.result(step)))
            if len(flying) <= lag:
                continue
            step, result = flying.pop(0)
            got = tokens_of(step, result, has_drafts=False)
            order.arrived(step)
            rows = intp_of(got.rows)
            tokens = np.frombuffer(got.tokens, np.int64)
            by_runner = None if got.names is None else intp_of(order.column(step, got.names))
            found = TokenIds().one_each(rows, tokens, by_runner)
            lists = [result.sampled_token_ids[result.req_id_to_index[name]] for name in step.ids]
            assert found.tolist() == [token for tokens in lists for token in tokens]
            kept = [row for row, tokens in zip(intp_of(step.rows).tolist(), lists, strict=True) if tokens]
            assert rows.tolist() == kept


def test_names_of_requests_that_left_are_forgotten():
    order = RunnerOrder()
    for number in range(2 * MOST_LEFT):
        name = f"r{number}"
        step = Step(number, None, [name, "stays"], int32_bytes((number % 7, 8)), 2, 0, 0)
        order.arrived(step)
        assert intp_of(order.column(step, ["stays", name])).tolist() == [8, number % 7]
    assert len(order._row_of) <= MOST_LEFT + 5


def test_a_list_of_names_may_change_in_place():
    order, names = RunnerOrder(), ["a", "b", "c"]
    step = Step(0, None, names.copy(), int32_bytes((5, 6, 7)), 3, 0, 0)
    order.arrived(step)
    assert intp_of(order.column(step, names)).tolist() == [5, 6, 7]
    names.reverse()
    assert intp_of(order.column(step, names)).tolist() == [7, 6, 5]


def test_the_column_follows_the_number_of_names():
    """`column` compares names in chunks of PART. The counts below are multiples of PART and other numbers."""
    order, names = RunnerOrder(), [f"r{number}" for number in range(3 * PART)]
    step = Step(0, None, names, int32_bytes(range(3 * PART)), 3 * PART, 0, 0)
    order.arrived(step)
    for count in (PART, 3 * PART, PART + 1, 1, 2 * PART, 0, 2 * PART - 1):
        assert intp_of(order.column(step, names[-count:] if count else [])).tolist() == [
            *range(3 * PART - count, 3 * PART)
        ]


def test_pseudo_ids_do_not_depend_on_the_order_of_the_rows():
    rows, order, tokens = intp_array([3, 0, 2]), intp_array([2, 3, 0]), np.array([7, 8, 9])
    by_step, by_runner = (PseudoIds(4, 9, b"key") for _ in range(2))
    for contents in (by_step, by_runner):
        for row in range(4):
            contents.admit(row, contents.begin(int64_bytes([row]), "")[1])
    expected = by_step.one_each(rows, np.array([8, 9, 7]))
    assert by_runner.one_each(rows, tokens, order).tolist() == expected.tolist()
    assert by_runner.sums.tolist() == by_step.sums.tolist()

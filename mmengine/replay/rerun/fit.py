"""A cost model for a step's duration. The model is fitted to the durations in a log.

A step's duration is modelled as a sum of amounts times prices, for the amounts in PARTS. "step" has the
amount 1, "attended token" counts the rows' KV lengths, and "attended pair" counts (query, key) pairs.
"sampled position" counts positions with logits, drafts included. The prices are non-negative and minimise the
relative errors, with Huber weights against outliers. The fit uses iteratively reweighted least squares with
Lawson and Hanson's active sets.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmengine.core.executor import StepPlan

PARTS = ("step", "token", "row", "attended token", "attended pair", "sampled position", "embedding")
# Kinds of steps, each with its own distribution of errors.
KINDS = ("decode", "prompt", "encoder")
FOLDS = 5
HUBER = 1.345  # Above this number of standard deviations, an error counts linearly.
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors (fractions) for steps that were held out from the fit. `total`: the error in the sum
    over all steps.
    """

    num_steps: int
    median: float
    p90: float
    total: float


class StepWork(NamedTuple):
    """A step's work. `amounts`: float64, in the order of PARTS. `kind`: an index into KINDS."""

    amounts: np.ndarray
    kind: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class FittedCost:
    """The fitted prices in ns, float64. `prices`: in the order of PARTS. `host_prices`: the host's price per
    step and price per row.
    """

    prices: np.ndarray
    host_prices: np.ndarray

    def device_ns(self, work: StepWork) -> float:
        return float(work.amounts @ self.prices)

    def host_ns(self, num_rows: int) -> float:
        return float(self.host_prices[0] + self.host_prices[1] * num_rows)


def work_of_plan(plan: StepPlan, num_embeds: int) -> StepWork:
    """Return the work of a planned step."""
    drafts = np.zeros(len(plan.rows), np.int64) if plan.num_drafts is None else plan.num_drafts
    return work_of(plan.num_scheduled, plan.num_computed, drafts, plan.sample, num_embeds)


def work_of(
    num_scheduled: np.ndarray,
    num_computed: np.ndarray,
    num_drafts: np.ndarray,
    sample: np.ndarray,
    num_embeds: int,
) -> StepWork:
    """Return a step's work. The arrays have an entry for each row in the step. `num_computed`: the row's
    computed tokens before the step. `sample`: the indices of rows that sample a token.
    """
    scheduled, computed = num_scheduled.astype(np.int64), num_computed.astype(np.int64)
    pairs = scheduled * computed + scheduled * (scheduled + 1) // 2
    tokens, rows = int(scheduled.sum()), len(scheduled)
    sampled = len(sample) + int(num_drafts[sample].sum())
    lengths = int(computed.sum()) + tokens
    amounts = np.array([1, tokens, rows, lengths, int(pairs.sum()), sampled, num_embeds], np.float64)
    is_prompt = bool((scheduled > 1 + num_drafts).any())
    return StepWork(amounts, 2 if num_embeds > 0 else int(is_prompt), rows)


def fit(work: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """Return the prices, float64 [p], for n steps. `work` [n, p]: the amounts of the steps. `time_ns` [n]:
    the durations, which must be positive.
    """
    scale = np.maximum(work.max(axis=0), 1.0)
    relative, ones = work / scale / time_ns[:, None], np.ones(len(work))
    weights = ones
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        prices = non_negative(relative * root[:, None], root)
        error = np.abs(relative @ prices - 1.0)
        spread = max(1.4826 * float(np.median(error)), 1e-9)
        weights = np.minimum(1.0, HUBER * spread / np.maximum(error, 1e-12))
    return prices / scale


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimises |matrix x - target|. The algorithm is from Lawson and Hanson, Solving
    Least Squares Problems, 23.10.
    """
    count = matrix.shape[1]
    x, active = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count + 3):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if active.all() or gradient[best] <= 1e-10 * len(target):
            break
        active[best] = True
        while True:
            free = np.zeros(count)
            free[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            below = active & (free <= 0)
            if not below.any():
                break
            with np.errstate(divide="ignore", invalid="ignore"):
                reach = np.where(below, x / (x - free), np.inf)
            x = x + min(1.0, float(np.nanmin(reach))) * (free - x)
            dropped = active & (x <= 1e-12)
            if not dropped.any():
                dropped = below
            active &= ~dropped
            x[~active] = 0.0
        x = free
    return x


def held_out_error(work: np.ndarray, time_ns: np.ndarray) -> FitError:
    """Return the errors of a cross-validation. The steps are cut into FOLDS consecutive parts, and each part
    is predicted with prices that are fitted to the other parts.
    """
    predicted = np.zeros(len(work))
    for part in np.array_split(np.arange(len(work)), FOLDS):
        rest = np.ones(len(work), bool)
        rest[part] = False
        predicted[part] = work[part] @ fit(work[rest], time_ns[rest])
    error = np.abs(predicted - time_ns) / time_ns
    total = float(predicted.sum() / time_ns.sum() - 1.0)
    return FitError(len(work), float(np.median(error)), float(np.quantile(error, 0.9)), total)

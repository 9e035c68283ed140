"""Tests a draft head that pauses for some steps and drafts again later. During a pause, the head keeps the
auxiliary states for later, or sleeps and skips the steps.
"""

import random
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmengine.runtime.drafting.head import deferred, drafter
from tests.spec_decode.draft_control import Granting
from tests.spec_decode.equality import Asked, answers, assert_same, mixed
from tests.spec_decode.test_eagle3_batches import SEVEN, Heard, asked_about


@contextmanager
def bounds(tokens, steps, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "MOST_TOKENS", tokens)
        patch.setattr(drafter, "MOST_STEPS", steps)
        patch.setattr(deferred, "AT_ONCE", at_once)
        yield


class Watched(Heard):
    """Limits drafts to `most_of(step)`. Counts the steps that the head skips (`slept`) and the steps whose
    states the head gets (`awake`).
    """

    def __init__(self, most_of):
        super().__init__()
        self._most_of, self.slept, self.awake = most_of, 0, 0

    def __call__(self, executor):
        super().__call__(executor)
        Granting(executor, self._most_of)
        head = executor._runner._drafting.head
        prepare = head.prepare

        def prepared(plan):
            aux_hidden_states = prepare(plan)
            self.slept, self.awake = (
                self.slept + (aux_hidden_states is None),
                self.awake + (aux_hidden_states is not None),
            )
            return aux_hidden_states

        head.prepare = prepared


@pytest.mark.parametrize("at_once", [64, 1024])
@pytest.mark.parametrize("caching", [False, True])
def test_drafts_after_a_pause_equal_drafts_without(at_once, caching):
    """Two requests share each image. With prefix caching, the second request's drafts depend on the first
    request's deferred states for the shared blocks.
    """
    asked, through, paused = asked_about(8), Watched(lambda step: 7), Watched(lambda step: 7 * (step > 12))
    config = {**SEVEN, "enable_prefix_caching": caching}
    answers(asked, steer=through, **config)
    with bounds(2048, 256, at_once):
        answers(asked, steer=paused, **config)
    common = through.drafts.keys() & paused.drafts.keys()
    assert len(common) > 15 and paused.slept == 0
    assert {name for name, _ in paused.drafts} == set(asked.by_id)
    assert {key: paused.drafts[key] for key in common} == {key: through.drafts[key] for key in common}


def test_rows_from_before_a_sleep_get_no_drafts_and_new_rows_do():
    asked = asked_about(8)
    early = Asked(dict(list(asked.by_id.items())[:4]))
    heard = Watched(lambda step: 7 * (step > 20))
    with bounds(2048, 10, 1024):
        answers(early, steer=heard, **SEVEN)
    assert heard.slept > 20 and heard.awake == 10 and not heard.drafts
    heard, through = Watched(lambda step: 7 * (step > 20)), Heard()
    with bounds(2048, 10, 1024):
        answers(asked, steer=heard, **{**SEVEN, "max_num_seqs": 4, "enable_prefix_caching": False})
    answers(asked, steer=through, **SEVEN)
    assert {name for name, _ in heard.drafts} == {"r4", "r5", "r6", "r7"}
    common = through.drafts.keys() & heard.drafts.keys()
    assert len(common) > 15 and all(through.drafts[key] == heard.drafts[key] for key in common)


@pytest.fixture(scope="module")
def wanted():
    asked = mixed(12, seed=21, most_tokens=24)
    return asked, answers(asked, spec="none", max_model_len=112)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    most=st.lists(st.sampled_from([0, 0, 7]), min_size=2, max_size=30),
    bound=st.tuples(st.integers(4, 200), st.integers(1, 12), st.sampled_from([16, 64])),
    pool=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(9, 30),
            "max_num_seqs": st.integers(1, 9),
            "token_budget": st.integers(17, 60),
            "enable_prefix_caching": st.booleans(),
            "swap_blocks": st.sampled_from([0, 40]),
        }
    ),
    seed=st.integers(0, 99),
)
def test_no_schedule_of_sleep_changes_a_token(wanted, most, bound, pool, seed):
    asked, want = wanted
    sizes = {"spec": SEVEN["spec"], "num_draft_tokens": 7, "max_model_len": 112, **pool}
    with bounds(*bound):
        found = answers(
            asked,
            arrivals=random.Random(seed),
            steer=lambda executor: Granting(executor, lambda step: most[step % len(most)]),
            **sizes,
        )
    assert_same(found, want)
    assert found.drafting.failures == [0]

"""Tests a draft head in batches, with other drafters, shared prefix blocks and changing draft counts."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmengine.build
from mmengine.config import EngineConfig
from mmengine.events import vocabulary as ev
from mmengine.models.plugin import Prepared
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.timeline import fold
from mmengine.replay.verify import verify
from mmengine.request import SamplingParams
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine_shapes import draft_head_path
from tests.parity.parity_cases import load_processor
from tests.spec_decode.draft_control import Clock, Granting
from tests.spec_decode.equality import Asked, Scripted, answers, assert_same, mixed
from tests.spec_decode.test_draft_metrics import counted
from tests.spec_decode.test_eagle3_engine import prompts

HEAD = f"eagle3={draft_head_path()}"
SEVEN = {"spec": HEAD, "num_draft_tokens": 7, "max_model_len": 160, "num_blocks": 200}


class Heard:
    """Records a head's drafts, keyed by request id and text length."""

    def __init__(self):
        self.drafts, self.batches = {}, Counter()

    def __call__(self, executor):
        head = executor._runner._drafting.head
        admit, propose, names = head.admit, head.propose, {}

        def admitted(row, request, texts):
            names[row] = request.request_id
            return admit(row, request, texts)

        def proposed(rows, texts, most):
            found = propose(rows, texts, most)
            if found is not None:
                ends = np.cumsum(found.counts)
                for row, end, count in zip(rows.tolist(), ends.tolist(), found.counts.tolist()):
                    drafts = found.token_ids[end - count : end].tolist()
                    if drafts:
                        self.drafts[names[row], int(texts.lengths[row])] = drafts
                self.batches[len(rows)] += 1
            return found

        head.admit, head.propose = admitted, proposed


def asked_about(count):
    """Return prompts with images, videos and texts, and long greedy answers."""
    processor = load_processor()
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    return Asked(
        {
            f"r{number}": (Prompt.of(messages).prepare(processor), Options(sampling, f"r{number}"))
            for number, messages in enumerate(prompts(count))
        }
    )


def test_drafts_are_the_same_alone_and_in_a_batch():
    """Images and videos give the rows' drafts different rotary positions."""
    asked, alone, together = asked_about(8), Heard(), Heard()
    for name, one in asked.by_id.items():
        answers(Asked({name: one}), steer=alone, **SEVEN)
    found = answers(asked, steer=together, **SEVEN)
    assert alone.drafts.keys() == together.drafts.keys() and len(alone.drafts) > 60
    assert max(together.batches) == 8 and max(map(len, together.drafts.values())) == 7
    assert alone.drafts == together.drafts
    assert found.stats.drafts[0].accepted > 100


def test_a_prefix_with_another_next_token_is_no_head_cache_hit():
    """The head's KV for a block's last token depends on the next token."""
    rng = np.random.default_rng(3)
    shared, others = rng.integers(300, 1500, 32), rng.integers(300, 1500, (2, 9))
    asked = [Prepared(np.append(shared, each).astype(np.int32), (), "") for each in others]

    def drafts_and_hits(order, **config):
        heard, hits = Heard(), []
        with Engine(config=EngineConfig(draft_policy="all", **config), dtype="float32") as engine:
            if config["spec"] != "none":
                heard(engine.built.executor)
            for number in order:
                engine.submit_prepared(asked[number], Options(SamplingParams(max_tokens=30, ignore_eos=True)))
                while not engine.is_idle:
                    hits += [out.completion for out in engine.step() if out.completion is not None]
        heard.drafts = {length: drafts for (_, length), drafts in heard.drafts.items()}
        return heard.drafts, [hit.num_cached_tokens for hit in hits], hits[-1].token_ids

    _, hits, tokens = drafts_and_hits((0, 1), spec="none")
    assert hits == [0, 32]
    fresh, _, again = drafts_and_hits((1,), **SEVEN)
    heard, hits, found = drafts_and_hits((0, 1), **SEVEN)
    assert hits == [0, 16] and tokens == again == found
    assert fresh and heard.items() >= fresh.items()


class ForSome(Scripted):
    """A scripted drafter that has drafts for every third request only."""

    def __init__(self, truth, which):
        super().__init__(truth, which)
        self.name, self._which = f"every third from {which}", which

    def admit(self, row, request, texts):
        number = int(request.request_id.partition("/")[0][1:])
        return number % 3 == self._which and super().admit(row, request, texts)


def num_drafters(folder):
    """Return {number of drafters: number of steps that verified drafts from this many drafters}."""
    found = Counter()
    for state, record in fold(CheckedLog(folder)):
        if isinstance(record.event, ev.Executed):
            rows = state.sampled_rows()
            found[len(set(state.drafter[rows][state.scheduled_drafts[rows] > 0].tolist()))] += 1
    return found


@pytest.mark.parametrize("policy", ["all", "goodput"])
def test_rows_of_one_batch_are_drafted_for_by_different_drafters(policy, monkeypatch, tmp_path):
    """Each of two scripted drafters knows the answers to a third of the requests. The head drafts for rows
    without scripted drafts, and may continue scripted drafts.
    """
    asked = mixed(20, seed=4)
    want = answers(asked, spec="none")
    scripts = [ForSome(want.truth, which) for which in (0, 1)]
    made = mmengine.build.make_drafters
    monkeypatch.setattr(mmengine.build, "make_drafters", lambda *given: [*made(*given), *scripts])
    steer = Clock if policy == "goodput" else None
    pool = {"max_num_seqs": 9, "token_budget": 80, "num_blocks": 40, "draft_policy": policy}
    found = answers(asked, log=tmp_path / "log", steer=steer, spec=HEAD, **pool)
    assert_same(found, want)
    assert found.drafting.failures == [0, 0, 0] and verify(tmp_path / "log").ok
    by_drafter, together = counted(tmp_path / "log")[2], num_drafters(tmp_path / "log")
    assert found.stats.drafts == by_drafter
    if policy == "all":
        assert together[2] > 5 and together[3] > 5
        assert len(by_drafter) == 3 and all(each.accepted for each in by_drafter.values())


@pytest.fixture(scope="module")
def wanted():
    """Return requests of all kinds, and their answers without drafts."""
    asked = mixed(12, seed=15, most_tokens=24)
    return asked, answers(asked, spec="none", max_model_len=112)


MOST = st.lists(st.sampled_from([0, 7]) | st.integers(1, 6), min_size=1, max_size=30)
POOLS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 30),
        "max_num_seqs": st.integers(1, 9),
        "token_budget": st.integers(17, 60),
        "enable_prefix_caching": st.booleans(),
        "draft_policy": st.sampled_from(["all", "goodput"]),
        "swap_blocks": st.sampled_from([0, 40]),
    }
)


def check(wanted, pool, most, seed, folder):
    """Compare a run's answers with the wanted answers. In the run, step n verifies at most
    `most[n % len(most)]` drafts for each row.
    """
    asked, want = wanted

    def steer(executor):
        Clock(executor)
        Granting(executor, lambda step: most[step % len(most)])

    log = folder / f"{len(list(folder.iterdir()))}"
    sizes = {"spec": HEAD, "num_draft_tokens": 7, "max_model_len": 112, **pool}
    found = answers(asked, log=log, arrivals=random.Random(seed), steer=steer, **sizes)
    assert_same(found, want)
    assert found.drafting.failures == [0] and verify(log).ok


HERE = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=6, **HERE)
@given(pool=POOLS, most=MOST, seed=st.integers(0, 99))
def test_any_schedule_and_any_k_give_the_same_answers(wanted, pool, most, seed, tmp_path):
    check(wanted, pool, most, seed, tmp_path)


@pytest.mark.soak
@settings(max_examples=300, **HERE)
@given(pool=POOLS, most=MOST, seed=st.integers(0, 99))
def test_many_schedules_and_ks_give_the_same_answers(wanted, pool, most, seed, tmp_path):
    check(wanted, pool, most, seed, tmp_path)


def test_rows_without_a_seed_do_not_change_other_rows():
    """Only requests without a seed get different tokens in each run."""
    seeds = [0, None, 1, None, 2**62, None]

    def said(spec):
        with Engine(config=EngineConfig(spec=spec, draft_policy="all"), dtype="float32") as engine:
            names = [
                engine.submit("Describe a star.", temperature=1.5, seed=seed, max_tokens=24, ignore_eos=True)
                for seed in seeds
            ]
            found = {}
            while not engine.is_idle:
                for output in engine.step():
                    if output.completion is not None:
                        found[output.request_id] = tuple(output.completion.token_ids)
            return [found[name] for name in names]

    runs = [said(spec) for spec in ("none", "eagle3", "eagle3")]
    for place, seed in enumerate(seeds):
        assert len({run[place] for run in runs}) == (3 if seed is None else 1)
    assert all(len(set(run)) == len(seeds) for run in runs)

"""Tests that the engine's tokens equal transformers' `generate`, with any schedule. The runs use fp32, greedy
sampling and the included checkpoint. Each run's log is verified.
"""

import random

import numpy as np
import pytest
import torch
from parity_cases import Case, Runner, assert_verifies, load_reference, reference_inputs, reference_tokens

from mmengine.events.log import LogReader
from mmengine.events.vocabulary import Admitted, Preempted
from mmengine.request import SamplingParams
from mmengine_shapes.scenes import random_clip

SETTINGS = {
    "images are cut": {"token_budget": 48, "max_num_seqs": 16},
    "two steps in flight": {"max_in_flight": 2, "token_budget": 64, "max_num_seqs": 8},
    "small blocks, small encoder cache": {"block_size": 4, "num_blocks": 4097, "encoder_cache_size": 192},
}
# These settings only change the schedule, so a single attention backend is tested with them.
SCHEDULING = {
    "default": {},
    "a batch of 64": {"max_num_seqs": 64, "token_budget": 8192},
    "priority": {"policy": "priority", "token_budget": 64},
    "prefill first": {"policy": "prefill_first", "max_num_seqs": 8},
    "no prefix caching": {"enable_prefix_caching": False, "max_num_seqs": 8},
}


def test_every_request_kind_is_frequent(cases):
    kinds = [tuple(one.item.modality for one in case.prepared.media) for case in cases]
    assert len(cases) >= 60
    assert kinds.count(()) >= 10 and kinds.count(("image",)) >= 40 and kinds.count(("video",)) >= 5
    assert sum(len(kind) >= 2 for kind in kinds) >= 7


def test_the_answers_are_varied(wanted):
    assert len({tuple(tokens) for tokens in wanted}) > 30
    assert np.mean([len(set(tokens)) for tokens in wanted]) > 5


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_equal_generate(runner, cases, wanted, tmp_path, name):
    check_tokens(runner, cases, wanted, tmp_path, name)


@pytest.mark.parametrize("backend", ["kernels"], indirect=True)
@pytest.mark.parametrize("name", SCHEDULING)
def test_scheduling_changes_no_tokens(runner, cases, wanted, tmp_path, name):
    check_tokens(runner, cases, wanted, tmp_path, name)


def check_tokens(runner, cases, wanted, tmp_path, name):
    core = runner.engine(runner.config(**(SETTINGS | SCHEDULING)[name]), tmp_path / "log")
    arrivals = None if name == "a batch of 64" else random.Random(3)
    assert runner.run(core, cases, arrivals=arrivals) == wanted
    core.close()
    assert_verifies(tmp_path / "log")


def test_a_small_pool_preempts_and_changes_nothing(runner, cases, wanted, tmp_path):
    longest = max(len(case.prepared.prompt_token_ids) + case.max_tokens for case in cases)
    config = runner.config(max_model_len=longest + 1, block_size=1, num_blocks=longest + 2, max_num_seqs=32)
    core = runner.engine(config, tmp_path / "log")
    assert runner.run(core, cases * 2, tag="first") == wanted * 2
    if runner.has_kernels:
        assert runner.run(core, cases * 2, tag="second", arrivals=random.Random(4)) == wanted * 2
    assert core.stats().num_preemptions >= (50 if runner.has_kernels else 25)
    core.close()
    assert_verifies(tmp_path / "log")


def events_of(folder, kind):
    return [record.event for record in LogReader(folder) if isinstance(record.event, kind)]


def test_swapped_requests_continue_unchanged(runner, cases, wanted, tmp_path):
    longest = max(len(case.prepared.prompt_token_ids) + case.max_tokens for case in cases)
    config = runner.config(
        max_model_len=longest + 1,
        block_size=2,
        num_blocks=longest // 2 + 4,
        max_num_seqs=32,
        preempt_mode="swap",
        swap_blocks=4096,
    )
    core = runner.engine(config, tmp_path / "log")
    some = cases + cases[:22]
    assert runner.run(core, some) == wanted + wanted[:22]
    core.close()
    modes = [event.mode for event in events_of(tmp_path / "log", Preempted)]
    assert modes.count("swap") == len(modes) >= 20
    assert sum(event.swap_in for event in events_of(tmp_path / "log", Admitted)) >= 20
    assert_verifies(tmp_path / "log")


def test_four_answers_to_a_prompt_share_its_prefill(runner, cases, wanted, tmp_path):
    some = [case for case in cases[:12] for _ in range(4)]
    core = runner.engine(runner.config(max_num_seqs=96), tmp_path / "log")
    assert runner.run(core, some, copies=4) == [tokens for tokens in wanted[:12] for _ in range(4)]
    core.close()
    followers = [event for event in events_of(tmp_path / "log", Admitted) if event.num_computed > 0]
    assert len(followers) >= 24 and all(event.num_tokens == 1 for event in followers)
    assert_verifies(tmp_path / "log")


def test_four_sampled_answers_equal_four_runs(runner, cases):
    sampling = SamplingParams(temperature=2.5, seed=7)
    some = [case for case in cases[:6] for _ in range(4)]
    together = runner.run(runner.engine(runner.config()), some, copies=4, sampling=sampling)
    apart = runner.engine(runner.config(enable_prefix_caching=False, max_num_seqs=3, token_budget=16))
    assert runner.run(apart, some, copies=4, sampling=sampling, arrivals=random.Random(1)) == together
    assert len({tuple(tokens) for tokens in together}) > 12


def test_warm_prefixes_and_features_change_nothing(runner, cases, wanted, tmp_path):
    core = runner.engine(runner.config(), tmp_path / "log")
    assert runner.run(core, cases, tag="cold") == wanted
    cached = core.stats().num_cached_tokens
    assert runner.run(core, cases, tag="warm", arrivals=random.Random(5)) == wanted
    assert core.stats().num_cached_tokens - cached > 16 * len(cases) / 2, "most prompts hit"
    core.close()
    assert_verifies(tmp_path / "log")


def test_sixteen_questions_on_one_image_cost_one_vision_pass(runner, cases):
    shared = [case for case in cases if len(case.prepared.media) == 1]
    by_image: dict[bytes, list[Case]] = {}
    for case in shared:
        by_image.setdefault(case.prepared.media[0].item.mm_hash, []).append(case)
    most = max(by_image.values(), key=len)[:16]
    assert len(most) == 16
    core = runner.engine(runner.config())
    runner.run(core, most)
    assert core.stats().num_encoded_items == 1


def test_a_video_cut_at_every_position(runner):
    """With the CPU kernels, the test uses each chunk length. With all other backends, the test uses every
    fifth length.
    """
    frames = [np.asarray(frame) for frame in random_clip(random.Random(2), frames=6).frames()]
    content = [{"type": "video"}, {"type": "text", "text": "What happens in the video?"}]
    case = Case(runner.processor.prepare([{"role": "user", "content": content}], videos=[frames]), 4)
    wanted = reference_tokens(load_reference(), case)
    for length in range(1, len(case.prepared.prompt_token_ids), 1 if runner.has_kernels else 5):
        block_size = 16 if length >= 16 else 1
        config = runner.config(
            token_budget=length, max_num_seqs=1, block_size=block_size, enable_prefix_caching=False
        )
        assert runner.run(runner.engine(config), [case]) == [wanted], f"chunks of {length} tokens"


def test_bfloat16_differs_only_where_the_top_two_are_within_rounding(
    backend, cases, bfloat16_reference, capsys
):
    """Where tokens diverge, transformers' logits for the two tokens differ by at most 8 bf16 steps. Near 2^k,
    a bf16 step is 2^(k-7). The test prints each difference.
    """
    runner, (model, wanted) = Runner("bfloat16", backend), bfloat16_reference
    some = cases[: len(wanted)]
    got = runner.run(runner.engine(runner.config()), some)
    parted = []
    for case, tokens, expected in zip(some, got, wanted, strict=True):
        if tokens == expected:
            continue
        place = next(i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1])
        inputs = reference_inputs(case.prepared, torch.bfloat16)
        prefix = torch.tensor([expected[:place]], dtype=torch.long)
        inputs["input_ids"] = torch.cat((inputs["input_ids"], prefix), 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        types = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat((types, torch.zeros_like(prefix, dtype=types.dtype)), 1)
        with torch.inference_mode():
            logits = model(**inputs).logits[0, -1].float()
        margin = float(logits[expected[place]] - logits[tokens[place]])
        step = 2.0 ** (np.floor(np.log2(float(logits.abs().max()))) - 7)
        parted.append((place, margin, margin / step))
    with capsys.disabled():
        print(f"\nbf16: {len(some) - len(parted)} of {len(some)} requests give the same tokens")
        for place, margin, steps in parted:
            print(f"  diverges at token {place}: margin {margin:.4f}, {steps:.1f} bf16 steps")
    assert all(abs(steps) <= 8 for _, _, steps in parted)
    assert len(parted) <= len(some) // 4

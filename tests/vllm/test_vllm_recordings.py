"""Tests logs that were recorded in vLLM. make_recordings.py lists the commands. Only `images` was recorded
with a model.
"""

from pathlib import Path

import pytest

from mmengine.replay import verify
from tests.vllm.test_vllm_recorder import folded

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.mark.parametrize(
    "name, num_calls",
    [("images", 197), ("priority", 90), ("drafts", 90), ("asynchronous", 90), ("asynchronous_drafts", 89)]
    + [("block_groups", 89)],
)
def test_a_recording_verifies(name, num_calls, host="vllm 0.32.0"):
    report = verify(RECORDINGS / name)
    assert report.divergence is None and report.rederived
    assert (report.host, report.steps) == (host, num_calls)
    folded(RECORDINGS / name)


def test_an_asynchronous_recording_with_four_block_groups_verifies():
    test_a_recording_verifies("asynchronous_block_groups", 90, "vllm 0.33.0")


def test_tokens_that_a_grammar_rejects_still_complete_a_block():
    test_a_recording_verifies("rejected_tokens", 79, "vllm 0.33.0")

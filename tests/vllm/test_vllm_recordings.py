"""Reads logs of vLLM 0.32: `images` was recorded with a model, the others without (make_recordings.py)."""

from pathlib import Path

import pytest

from mmengine.replay import verify
from tests.vllm.test_vllm_recorder import folded

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.mark.parametrize(
    "name, num_calls",
    [("images", 197), ("priority", 90), ("drafts", 90), ("asynchronous", 90), ("asynchronous_drafts", 89)],
)
def test_a_recording_verifies(name, num_calls):
    report = verify(RECORDINGS / name)
    assert report.divergence is None and report.rederived
    assert (report.host, report.steps) == ("vllm 0.32.0", num_calls)
    folded(RECORDINGS / name)

"""Tests the error of `verify --with vllm` without vLLM, and the description of KV groups."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from mmengine.errors import LogError
from mmengine.replay import verify
from mmengine_vllm.kv_groups import described_groups, groups_of
from tests.vllm.test_vllm_recordings import RECORDINGS


@pytest.mark.skipif(importlib.util.find_spec("vllm.v1") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_names_the_environment():
    with pytest.raises(LogError, match="requires vLLM and mmengine_vllm in this environment"):
        verify(RECORDINGS / "drafts", own="vllm")


def test_kv_groups_survive_their_description():
    # `groups_of` reads back the text from `described_groups`.
    spec = type("SlidingWindowSpec", (), {"block_size": 16, "sliding_window": 64, "dtype": "torch.float32"})
    text = described_groups([SimpleNamespace(kv_cache_spec=spec())])
    assert groups_of(text) == [
        ("SlidingWindowSpec", {"block_size": 16, "dtype": "torch.float32", "sliding_window": 64})
    ]


@pytest.mark.parametrize(
    "groups",
    ["{", "[]", "[1]", json.dumps([["os.system", {}]]), json.dumps([["MambaSpec", {"__class__": 1}]])],
)
def test_other_kv_groups_are_refused(groups):
    with pytest.raises(LogError, match="KV group"):
        groups_of(groups)

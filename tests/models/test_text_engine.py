"""Tests that a text-only model generates transformers' greedy tokens, also with chunked prefill and
preemption.
"""

import numpy as np
import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.models.decoder.positions import text_positions
from mmengine.models.network import load_network
from mmengine.request import Request, SamplingParams
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.startup import sizing
from tests.models.text_reference import KINDS, NAMES, described, make_prompts, make_reference

NUM_NEW = 20
SETTINGS = {
    "as it comes": {},
    "in chunks": {"token_budget": 7, "max_num_seqs": 3, "block_size": 4},
    "with preemption": {"num_blocks": 12, "block_size": 16, "max_model_len": 128},
}


def generated(reference, ids):
    with torch.inference_mode():
        out = reference.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("kind", ["plain", "llama3", "norms of q and k", "all biases"])
def test_tokens_are_transformers(tmp_path, kind, attention):
    reference = make_reference(tmp_path, KINDS[kind], seed=6)
    prompts = make_prompts(7)
    wanted = [generated(reference, ids) for ids in prompts]
    assert len({token for tokens in wanted for token in tokens}) > 15, "the checkpoint repeats few tokens"
    model = load_network(tmp_path, described(tmp_path), NAMES, device="cpu", dtype="float32")
    placement = Placement(CpuDevice(), torch.float32, attention)
    for name, settings in SETTINGS.items():
        config = sizing.resolve(EngineConfig(**settings), model, None, placement, ())
        executor = TorchExecutor(model, lambda ids, media: text_positions(len(ids)), config, placement)
        core = EngineCore(config, executor)
        for number, ids in enumerate(prompts):
            asked = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
            core.submit(Request(str(number), ids.numpy().astype(np.int32), asked))
        found = [[] for _ in prompts]
        while core.has_work:
            for output in core.step():
                found[int(output.request_id)].extend(output.token_ids)
        assert found == wanted
        assert (core.state.num_preempted > 0) is (name == "with preemption")

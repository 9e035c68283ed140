"""Check the whole engine on a device, with heads of 128 values as in real models.

The model has random weights and decodes greedily. The reference for the logprobs is a float32 decoder with
torch's attention, which computes each request separately. Not yet run on a GPU.
"""

import numpy as np
import torch

from benchmarks.gpu.shapes import RandomWeights, random_model, wide_shape
from benchmarks.gpu.tokens import Verdict
from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.models.config import make_spec
from mmengine.models.decoder.text import TextDecoder
from mmengine.request import Request, SamplingParams
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.kv.pool import KVPool
from mmengine_qwen3_vl import plugin
from mmengine_qwen3_vl.config import ModelConfig

LONGEST, NUM_NEW = 512, 24  # tokens in a prompt, and in an answer
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # largest allowed difference of a logprob
Answer = tuple[np.ndarray, list[int], list[float]]  # a prompt, the following tokens, their logprobs


class Widened(RandomWeights):
    """The tested model's random weights, converted to float32."""

    def read(self, *names: str) -> torch.Tensor:
        return super().read(*names).float()


def compare_wide(device: str, dtype: torch.dtype, num_heads: int, count: int) -> tuple[Verdict, str]:
    """Run `count` prompts together, and compare their answers with the reference.

    The run includes chunked prefill, mixed steps, and graph replay if the attention backend supports graphs.
    Also returns the backend's name with the number of replayed steps.
    """
    shape = wide_shape(num_heads)
    answers, how = greedy_answers(shape, device, dtype, count)
    largest = max(gaps(shape, answers, device, dtype))
    said = f"logprobs at most {largest:.1e} apart (tolerance {ROUNDING[dtype]:.1e})"
    name = f"answers of {num_heads} heads of 128 on {device} by {how.partition(',')[0]}"
    return Verdict(name, said, largest <= ROUNDING[dtype]), how


def greedy_answers(
    shape: ModelConfig, device: str, dtype: torch.dtype, count: int
) -> tuple[list[Answer], str]:
    """Return the engine's answers, and the attention backend's name with the graph counts."""
    rng = np.random.default_rng(9)
    lengths = rng.integers(1, LONGEST, count)
    prompts = [rng.integers(3, shape.text.vocab_size, n, dtype=np.int32) for n in lengths]
    longest = LONGEST + NUM_NEW
    config = EngineConfig(
        max_num_seqs=count,
        token_budget=256,
        max_model_len=longest,
        num_blocks=count * -(-longest // 16) + 1,
        encoder_cache_size=1,  # there are no images
        max_in_flight=2,
    )
    network = random_model(shape, device, dtype)
    executor = TorchExecutor(network, plugin.positions, config, Placement(open_device(device), dtype))
    core = EngineCore(config, executor)
    sampling = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, logprobs=0, seed=0)
    found: dict[str, list[tuple[int, float]]] = {f"w{n}": [] for n in range(count)}
    for name, prompt in zip(found, prompts, strict=True):
        core.submit(Request(name, prompt, sampling))
    while core.has_work:
        for output in core.step():
            found[output.request_id] += [chosen for chosen, *_ in output.logprobs]
    how = f"{type(executor._runner._attention).__name__}, steps {executor.graph_counts.get('steps', {})}"
    core.close()
    answers = [tuple(map(list, zip(*one, strict=True))) for one in found.values()]
    return [(prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)], how


def gaps(shape: ModelConfig, answers: list[Answer], device: str, dtype: torch.dtype) -> list[float]:
    """Return each answer's largest logprob difference from the reference. The difference is infinite if
    tokens are missing or a logprob is NaN.
    """
    where, spec = torch.device(device), make_spec(shape)
    apart = []
    with torch.inference_mode():
        decoder = TextDecoder(shape.text, Widened(shape, where, dtype), where)
        for prompt, tokens, logprobs in answers:
            ids = np.concatenate((prompt, np.array(tokens[:-1], np.int32)))
            size = np.array([len(ids)], np.int32)
            blocks = 1 + np.arange(-(-len(ids) // 16), dtype=np.int32)[None]
            attention = TorchPagedAttention(
                spec, KVPool(spec, blocks.size + 1, 16, torch.float32, open_device(device))
            )
            attention.begin(AttentionMeta(size, size, 16 + np.arange(len(ids)), blocks))
            there = torch.from_numpy(ids).long().to(where)
            positions = torch.arange(len(ids), device=where).expand(3, -1).contiguous()
            hidden = decoder.forward(decoder.embed(there), None, positions, attention)
            wanted = decoder.logits(hidden[-len(tokens) :]).float().log_softmax(-1)
            wanted = wanted.gather(1, torch.tensor(tokens, device=where)[:, None])[:, 0].cpu()
            gap = float((wanted - torch.tensor(logprobs)).abs().max())
            apart.append(gap if gap == gap and len(tokens) == NUM_NEW else float("inf"))
    return apart

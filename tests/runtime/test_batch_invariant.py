"""batch_invariant: a request has the same bits alone and in any company, however its tokens are spread over
steps."""

import random
from dataclasses import replace

import msgspec
import pytest

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.native import library
from mmengine.serve.engine import Engine
from tests.spec_decode.equality import Asked, drawn_alike, mixed

ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "spec": "none"}
# Chunks of a token and of all of it, a pool in which requests give way, drafts, other blocks.
COMPANIES = (
    {"token_budget": 23, "block_size": 4, "num_blocks": 65, "admission_reserve": "none", "max_num_seqs": 20},
    {"long_prefill_token_threshold": 1, "spec": "none", "max_in_flight": 2},
    {"token_budget": 64, "num_blocks": 18, "swap_blocks": 17, "preempt_mode": "swap", "spec": "ngram"},
)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if library.load() is None:
        pytest.skip(f"no kernels here: {library.describe()}")


@pytest.fixture(scope="module")
def asked():
    """Requests that each tell the logprobs of four tokens a step."""
    found = mixed(12, seed=5, most_tokens=40).by_id
    for name, (prepared, options) in found.items():
        sampling = msgspec.structs.replace(options.sampling, logprobs=4)
        found[name] = prepared, replace(options, sampling=sampling)
    return Asked(found)


def bits(asked, dtype, *, arrivals=None, **settings):
    """Tokens and logprobs of every choice."""
    waiting, found = list(asked.by_id.values())[::-1], {}
    config = EngineConfig(max_model_len=256, **{"batch_invariant": True, **settings})
    with drawn_alike(), Engine(config=config, dtype=dtype) as engine:
        while waiting or not engine.is_idle:
            while waiting and (arrivals is None or arrivals.random() < 0.5):
                engine.submit_prepared(*waiting.pop())
            for output in engine.step():
                if output.completion is not None:
                    choices = output.completion.choices
                    found[output.request_id] = [(one.token_ids, one.logprobs) for one in choices]
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def alone(asked, dtype):
    return bits(asked, dtype, **ALONE)


@pytest.mark.parametrize("company", range(len(COMPANIES)))
def test_company_changes_no_bit(asked, dtype, alone, company):
    found = bits(asked, dtype, arrivals=random.Random(company), **COMPANIES[company])
    assert found == alone


def test_without_it_a_bit_may_change(asked):
    """Else the tests above would show nothing."""
    one, other = (bits(asked, "float32", batch_invariant=False, **each) for each in (ALONE, COMPANIES[0]))
    assert one != other


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attention": "torch"}, "needs the attention backend native, not torch"),
        ({"config": {"tensor_parallel": 2}}, "cannot go with tensor_parallel 2"),
        ({"config": {"kv_dtype": "fp8"}}, "cannot go with kv_dtype fp8"),
    ],
)
def test_what_cannot_hold_it_is_refused(settings, says):
    config = EngineConfig(batch_invariant=True, **settings.pop("config", {}))
    with pytest.raises(ConfigError, match=says):
        Engine(config=config, **settings)


def test_without_kernels_it_is_refused(hidden_compiler, tmp_path):
    with (
        hidden_compiler(tmp_path),
        pytest.raises(ConfigError, match="a GPU with Triton, or the CPU with its"),
    ):
        Engine(config=EngineConfig(batch_invariant=True))

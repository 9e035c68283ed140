"""Tests SmolLM2: tokens and log-probabilities equal transformers', answers follow JSON schemas, and the log
verifies.
"""

import json
from typing import NamedTuple

import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.native import library as native
from mmengine.native.linear import multiplies_float32
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from tests.gguf.fetched import SMOLLM2, fetched
from tests.llama.smollm2 import EVERY, chat, load_transformers, open_engine, prompts, scores, written_prompts

FEW = written_prompts()[::EVERY]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
NEAR = 1e-3  # Summing float32 in another order changes a log-probability by about 1e-5.
COLOUR = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}


@pytest.fixture(scope="module")
def network():
    return load_transformers()


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Return the answers of an engine (12 greedy, 3 sampled, 1 with a schema), and the path of its log."""
    log = tmp_path_factory.mktemp("smollm2") / "log"
    with open_engine(log) as engine:
        form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
        asked = chat("What colour is the sky? Answer as JSON with the key colour.")
        return {
            "greedy": engine.generate(map(chat, FEW), max_tokens=16, logprobs=0),
            "sampled": engine.generate(map(chat, FEW[:3]), max_tokens=16, logprobs=0, **SAMPLED),
            "form": engine.generate([asked], max_tokens=32, response_format=form),
            "log": log,
        }


class Judged(NamedTuple):
    """A comparison of answers with transformers' log-probabilities.

    `parted`: where each answer first deviates from transformers' likeliest token, as (prompt number, token
    index, log-probability lost). `difference`: the largest difference between the engine's and transformers'
    log-probabilities.
    """

    parted: list[tuple[int, int, float]]
    difference: float


def judged(network, answers):
    parted, difference = [], 0.0
    for number, answer in enumerate(answers):
        its = scores(network, answer.prompt_token_ids, answer.token_ids)
        chosen = its.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        margins = its.amax(-1) - chosen
        parted += [(number, int(place), float(margins[place])) for place in margins.nonzero()[:1, 0]]
        said = [entries[0] for entries in answer.choices[0].logprobs]
        assert [token for token, _ in said] == answer.token_ids
        own = torch.tensor([score for _, score in said])
        difference = max(difference, float((chosen - own).abs().max()))
    return Judged(parted, difference)


def test_there_are_200_different_prompts():
    assert len(FEW) == 12 and len(prompts(200)) == 200


def test_greedy_tokens_and_their_log_probabilities_are_transformers(network, few):
    """Each token is transformers' likeliest token after the preceding tokens. The answer therefore equals the
    answer from transformers' `generate`.
    """
    assert few["greedy"][0].text == "The capital of France is Paris."
    parted, difference = judged(network, few["greedy"])
    assert parted == [] and difference < 1e-4


def test_log_probabilities_of_sampled_answers_are_transformers(network, few):
    assert judged(network, few["sampled"]).difference < 1e-4
    pairs = zip(few["greedy"], few["sampled"], strict=False)
    assert any(greedy.token_ids != sampled.token_ids for greedy, sampled in pairs)


def test_the_answer_fits_the_form(few):
    (answer,) = few["form"]
    assert json.loads(answer.text) == {"colour": "blue"}


def test_the_log_verifies(few):
    report = verify(few["log"])
    assert report.ok and report.rederived and not report.unfinished


def test_the_default_dtype_answers_the_first_question(few):
    """The default dtype gives float32's answer to the README's first question. On CPUs without bfloat16
    instructions, the default dtype is float32, with the weights as stored.
    """
    library = native.load()
    if library is None:
        pytest.skip("there are no kernels")
    with Engine(
        fetched(SMOLLM2), device="cpu", config=EngineConfig(max_model_len=256, num_threads=1)
    ) as engine:
        assert engine.built.dtype == ("float32" if multiplies_float32(library) else "bfloat16")
        (answer,) = engine.generate([chat(FEW[0])], max_tokens=16)
    assert answer.token_ids == few["greedy"][0].token_ids


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_200_answers_equal_generate(network, capsys):
    asked = prompts(200)
    with open_engine() as engine:
        answers = engine.generate(map(chat, asked), max_tokens=32, logprobs=0)
        sampled = engine.generate(map(chat, asked), max_tokens=32, logprobs=0, **SAMPLED)
    theirs = [generated(network, answer.prompt_token_ids, 32) for answer in answers]
    differing = {i for i, answer in enumerate(answers) if theirs[i] != answer.token_ids}
    near, difference = judged(network, answers)
    with capsys.disabled():
        print(f"\n{len(asked) - len(differing)} of {len(asked)} answers are those of generate")
        for number, place, margin in near:
            print(f"  {asked[number][:50]!r} diverges at token {place}, by a log-probability of {margin:.6f}")
    assert differing <= {number for number, _, _ in near} and len(near) <= 2
    assert all(margin < NEAR for _, _, margin in near)
    assert difference < NEAR and judged(network, sampled).difference < NEAR


def generated(network, prompt_ids, count):
    """Return `count` greedy tokens from transformers' `generate`."""
    ids = torch.from_numpy(prompt_ids).long()[None]
    ends = {"eos_token_id": 2, "pad_token_id": 2}
    with torch.inference_mode():
        out = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **ends
        )
    return out[0, ids.shape[1] :].tolist()

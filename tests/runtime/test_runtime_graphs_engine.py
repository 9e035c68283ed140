"""Tests engines with fake CUDA graphs: answers equal those without graphs, and metrics count replays."""

from functools import partial

import pytest
from flashinfer_fake import fake_library
from PIL import Image
from repeater import Repeater, let_backends_capture

from mmengine import build
from mmengine.config import EngineConfig
from mmengine.gpu.vision_ops import VisionOps, attend_by_frames, rotate
from mmengine.models.vision import tower
from mmengine.runtime import runner as running
from mmengine.runtime.attention.flashinfer_paged import FlashInferAttention
from mmengine.runtime.drafting.head import drafter as drafting
from mmengine.runtime.executor import TorchExecutor
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from tests.spec_decode.equality import Asked, answers, assert_same, mixed

SMALL = {"max_num_seqs": 6, "token_budget": 96, "max_model_len": 400}


@pytest.fixture(scope="module")
def asked():
    return mixed(16, seed=5)


@pytest.fixture(scope="module")
def anew(asked):
    return answers(asked, spec="none", **SMALL)


@pytest.fixture
def recorder(monkeypatch):
    """Return a recorder. Every engine that is built later captures its steps with this recorder."""
    recorder = Repeater()
    monkeypatch.setattr(build, "TorchExecutor", partial(TorchExecutor, recorder=recorder))
    let_backends_capture(monkeypatch.setattr)
    return recorder


@pytest.mark.parametrize(
    "settings",
    [
        {"spec": "none"},
        {"spec": "none", "max_in_flight": 2},
        {"spec": "suffix", "num_draft_tokens": 3},
        {"spec": "eagle3"},
        {"spec": "grammar", "num_blocks": 48},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_answers_equal_launched_steps(asked, anew, recorder, settings):
    found = answers(asked, **{**SMALL, **settings})
    assert_same(found, anew)
    assert recorder.replayed > 50


def test_prompts_are_scored_as_in_steps_launched_anew(recorder):
    """A graph for steps with drafts also computes prompts with at most 1 + num_draft_tokens tokens."""
    prompts = [Prompt(text=text) for text in ("a b c", "d", "e f", "g h i")]
    asked = {"prompt_logprobs": 2, "max_tokens": 2, "temperature": 0.0}
    with Engine(config=EngineConfig(spec="suffix", num_draft_tokens=7, **SMALL)) as engine:
        found = engine.generate(prompts, **asked)
        assert recorder.replayed
    with Engine(config=EngineConfig(spec="none", **SMALL)) as engine:
        wanted = engine.generate(prompts, **asked)
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs]
            assert [each[1] for each in mine] == pytest.approx([each[1] for each in theirs], abs=1e-4)


@pytest.fixture
def packed(monkeypatch):
    """Compute attention over all frames in one call, as on a GPU. The encoder is then captured too."""
    monkeypatch.setattr(tower, "vision_ops", lambda *of: VisionOps(rotate, attend_by_frames))


@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 2, "encoder_cache_size": 64}])
def test_answers_about_images_and_videos_that_are_replayed(recorder, packed, monkeypatch, settings):
    everything = mixed(40, seed=5, most_tokens=16).by_id
    asked = Asked({name: one for name, one in everything.items() if one[0].media})
    assert asked.kinds()["image"] > 5 and asked.kinds()["video"] > 1
    settings = {**SMALL, "spec": "none", "encoder_budget": 64, "max_item_embeds": 64} | settings
    executors = []
    found = answers(asked, steer=executors.append, **settings)
    counts = executors[0].graph_counts
    steps, calls = counts["steps"], counts["encodings"]
    assert steps["replayed"] + calls["replayed"] == recorder.replayed > 20
    assert calls["replayed"] > 2
    monkeypatch.setattr(build, "TorchExecutor", TorchExecutor)
    assert_same(found, answers(asked, **settings))


@pytest.mark.parametrize("settings", [{"spec": "suffix", "num_draft_tokens": 3}, {"spec": "eagle3"}])
def test_answers_with_flashinfer(asked, anew, recorder, monkeypatch, settings):
    """The fake FlashInfer wrappers compute attention from the planned index lists."""

    def make_backend(name, spec, kv, **others):
        return FlashInferAttention(spec, kv, fake_library())

    for module in (running, drafting):
        monkeypatch.setattr(module, "make_backend", make_backend)
    found = answers(asked, **{**SMALL, **settings})
    assert_same(found, anew)
    assert recorder.replayed > 50
    head = found.drafting.head
    assert head is None or head.graphs.num_chains["replayed"] > 50


@pytest.mark.parametrize("settings", [{"spec": "none"}, {"spec": "eagle3", "num_draft_tokens": 3}])
def test_answers_with_triton(recorder, monkeypatch, kernel_device, settings):
    """Replay steps with the Triton attention kernels, which run in Triton's interpreter."""
    if kernel_device.type != "cpu":
        pytest.skip("this test runs the engine on a CPU, with Triton's interpreter")

    def generate(attention):
        config = EngineConfig(max_num_seqs=2, max_model_len=200, **settings)
        with Engine(config=config, dtype="float32", attention=attention) as engine:
            found = engine.generate(["Hello", "A red circle and"], max_tokens=5, ignore_eos=True)
            return [one.token_ids for one in found], engine.built.executor.graph_counts.get("steps", {})

    found, steps = generate("triton")
    assert steps["replayed"] > 2 and not steps["capture_failed"] and recorder.replayed
    assert found == generate("torch")[0]


def test_a_head_repeats_its_drafts(asked, recorder, monkeypatch):
    """An EAGLE-3 head reads the hidden states of replayed steps, and replays its own passes.

    It proposes as many drafts as without graphs, and as many are accepted.
    """
    found = answers(asked, spec="eagle3", **SMALL)
    chains = found.drafting.head.graphs.num_chains
    assert chains["replayed"] > 50 and not chains["capture_failed"]
    monkeypatch.setattr(build, "TorchExecutor", TorchExecutor)
    anew = answers(asked, spec="eagle3", **SMALL)
    assert found.stats.drafts == anew.stats.drafts and recorder.replayed
    assert found.stats.drafts[0].accepted > 50


def test_the_metrics_say_how_many_chains_were_replayed(recorder):
    with Engine(config=EngineConfig(max_num_seqs=2, max_model_len=200, spec="eagle3")) as engine:
        engine.generate(["Hello"], max_tokens=8, ignore_eos=True)
        text, chains = engine.metrics_text(), engine.built.executor.graph_counts["chains"]
    assert f'mmengine_graph_chains_total{{how="replayed"}} {float(chains["replayed"])}' in text
    assert 'mmengine_graph_chains_total{how="capture_failed"} 0.0' in text and chains["replayed"]


def test_the_metrics_say_how_many_steps_were_replayed(recorder):
    with Engine(config=EngineConfig(max_num_seqs=2, max_model_len=200, spec="none")) as engine:
        engine.generate(["Hello"], max_tokens=8, ignore_eos=True)
        text = engine.metrics_text()
    assert "graph_chains" not in text
    assert f'mmengine_graph_steps_total{{how="replayed"}} {float(recorder.replayed)}' in text
    assert 'mmengine_graph_steps_total{how="prompt"} 1.0' in text and recorder.replayed


def test_the_metrics_say_how_many_calls_of_the_encoder_were_replayed(recorder, packed):
    with Engine(config=EngineConfig(max_num_seqs=2, max_model_len=200, spec="none")) as engine:
        prompt = Prompt(
            text="<|vision_start|><|image_pad|><|vision_end|>What?", images=[Image.new("RGB", (64, 64))]
        )
        engine.generate([prompt], max_tokens=2, ignore_eos=True)
        text = engine.metrics_text()
    assert 'mmengine_graph_encodings_total{how="replayed"} 1.0' in text
    for why in ("patches", "segments", "capture_failed"):
        assert f'mmengine_graph_encodings_total{{how="{why}"}} 0.0' in text


def test_without_graphs_the_metrics_omit_them():
    with Engine(config=EngineConfig(max_model_len=200)) as engine:
        text = engine.metrics_text()
    assert "graph_steps" not in text and "graph_encodings" not in text

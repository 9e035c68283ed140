"""Tests that the included checkpoint's draft head is accurate, and that it drafts in the engine as in
training.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from mmengine.config import EngineConfig
from mmengine.request import SamplingParams
from mmengine.runtime.drafting.eagle3.loading import load_head
from mmengine.runtime.executor import ON_CPU
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.spec_decode.eagle3.config import Target as HeadTarget
from mmengine.spec_decode.eagle3.loading import open_head
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path, draft_head_path
from mmengine_shapes.training.head_batch import collate
from mmengine_shapes.training.head_data import prompt_of
from mmengine_shapes.training.head_export import read_hub, write_hub, write_speculators
from mmengine_shapes.training.head_simulate import acceptance, accepted_from, held_out_samples, passes_of
from mmengine_shapes.training.head_target import DenseAttention, Target
from mmengine_shapes.training.held_out import held_out_items


@pytest.fixture(scope="module")
def trained():
    return read_hub(draft_head_path())


@pytest.fixture(scope="module")
def target(trained):
    return Target(checkpoint_path(), trained[0].shape.levels)


@pytest.fixture(scope="module")
def samples(target):
    """Return {task: twelve held-out conversations with images of mixed sizes}."""
    drawn = held_out_samples(target, ("json", "describe", "direction"), 12, seed=7)
    return {task: [one for one in drawn if one.task == task] for task in ("json", "describe", "direction")}


def test_four_drafts_a_pass_pay_off(trained, samples):
    """A pass yields at most five tokens: four accepted drafts and the target's own token."""
    assert acceptance(*trained, samples["json"], 4) > 4.5
    assert acceptance(*trained, samples["describe"], 4) > 4.2


def test_swapped_layers_lower_acceptance(trained, samples):
    """With the auxiliary layers in reverse order, fewer drafts are accepted. So the head reads the hidden
    states, and does not draft from the tokens alone.
    """
    swapped = [
        type(one)(one.task, one.ids, one.num_prompt, one.positions, one.aux_hidden_states.flip(1))
        for one in samples["json"]
    ]
    assert acceptance(*trained, swapped, 4) < acceptance(*trained, samples["json"], 4) - 0.5


@pytest.fixture(scope="module", params=["hub", "speculators"])
def served(request, trained, tmp_path_factory):
    """Return the head as the engine loads it, from each of the two file layouts."""
    folder = draft_head_path()
    if request.param == "speculators":
        folder = tmp_path_factory.mktemp("speculators")
        write_speculators(*trained, folder)
    model = plugin.load_model(checkpoint_path(), device="cpu", dtype="float32")
    spec = model.spec
    opened = open_head(folder, HeadTarget(spec.hidden_size, spec.vocab_size, spec.num_layers))
    return load_head(opened, model, ON_CPU)


def chain(served, sample, row, count):
    """Return the logits of `count` drafts that begin at position `row`. For each draft, the engine's head
    runs again over all inputs, without a KV cache.
    """
    hidden = served.fuse(sample.aux_hidden_states[: row + 1].float().flatten(1))
    tokens, positions = sample.ids[1 : row + 2], sample.positions[:, : row + 1]
    found = []
    for _ in range(count):
        z, carry = served.forward(hidden, served.embed(tokens), positions, DenseAttention(1), 0)
        found.append(served.logits(z[-1:])[0])
        hidden = torch.cat((hidden, carry[-1:]))
        tokens = torch.cat((tokens, served.tokens(found[-1][None])))
        positions = torch.cat((positions, positions[:, -1:] + 1), 1)
    return torch.stack(found)


@pytest.mark.parametrize("task", ["json", "describe", "direction"])
def test_drafting_from_all_rows_equals_the_engines_head(trained, served, samples, task):
    # In training, the head drafts from all positions in one pass. The logits equal those of the engine's
    # head, which drafts from one position at a time.
    head, vocabulary = trained
    several = samples[task][:2]
    batch = collate(several)

    def token_of(step, logits):
        return batch.ids.gather(1, batch.rows + 1) if logits is None else vocabulary[logits.argmax(-1)]

    unrolled = torch.stack(head.unroll(batch, 4, token_of), 2)
    holds = accepted_from(head, vocabulary, several, 4)
    for number, sample in enumerate(several):
        for index in range(0, len(holds[number]), 7):
            row = sample.num_prompt - 1 + index
            logits = chain(served, sample, row, 4)
            torch.testing.assert_close(logits, unrolled[number, index], atol=1e-4, rtol=1e-4)
            drafts, truth = served.tokens(logits).tolist(), sample.ids[row + 2 : row + 6].tolist()
            same = [a == b for a, b in zip(drafts, truth, strict=False)] + [False]
            assert holds[number][index] == same.index(False)


def test_the_engine_loads_the_trained_head(trained, served):
    shape, config = trained[0].shape, served.config
    assert config.aux_layers == shape.levels and config.draft_vocab_size == shape.draft_vocab_size
    assert (config.fc_norm, config.norm_output) == (shape.fc_norm, shape.norm_output)
    assert torch.equal(served.embed(torch.arange(1536)), trained[0].embedding)


def engine_passes(task, number, seed):
    """Return the answers from an engine that drafts with the head, and each answer's number of passes after
    the first pass.
    """
    config = EngineConfig(
        spec=f"eagle3={draft_head_path()}", num_draft_tokens=4, num_threads=1, draft_policy="all"
    )
    answers, passes = [], []
    with Engine(checkpoint_path(), config=config) as engine:
        for item in held_out_items(task, number, None, seed):
            prepared = prompt_of(item).prepare(engine.processor)
            engine.submit_prepared(prepared, Options(SamplingParams(max_tokens=192)))
            with_tokens = 0
            while engine.has_work:
                for output in engine.step():
                    with_tokens += bool(output.token_ids)
                    if output.completion:
                        answers.append(output.completion.token_ids)
            passes.append(with_tokens - 1)
    return answers, passes


@pytest.mark.parametrize("task", ["json", "describe", "direction"])
def test_an_engine_takes_the_simulated_passes(trained, samples, task):
    # The engine needs as many passes as `passes_of` computes from the accepted drafts.
    answers, passes = engine_passes(task, 12, seed=7)
    assert answers == [one.ids[one.num_prompt :].tolist() for one in samples[task]]
    simulated = [
        passes_of(accepted, len(one.ids) - one.num_prompt)
        for one, accepted in zip(samples[task], accepted_from(*trained, samples[task], 4), strict=True)
    ]
    assert passes == [len(one) for one in simulated]


def test_passes_are_counted_as_in_an_engine():
    # The prompt's pass samples token 0. Tokens 1 to 4 are accepted drafts after token 0, and the target
    # samples token 5.
    assert passes_of([4, 9, 9, 9, 9, 0, 2, 9], num_answer=9) == [5, 1, 2]
    assert passes_of([0], num_answer=2) == [1]
    assert passes_of([0], num_answer=1) == []


def test_a_target_reads_the_same_alone_and_beside_others(target, samples):
    """In a padded batch, the target's likeliest token after each token is the answer's next token."""
    for group in samples.values():
        for sample in group:
            after = target.logits(sample.aux_hidden_states[sample.num_prompt - 1 : -1, -1].float()[None])[0]
            assert after.argmax(-1).tolist() == sample.ids[sample.num_prompt :].tolist()


def test_batch_rows_are_valid_draft_starts(samples):
    batch = collate(samples["json"][:2] + samples["direction"][:2])
    for number, sample in enumerate(samples["json"][:2] + samples["direction"][:2]):
        rows = batch.rows[number][batch.valid[number]].tolist()
        assert rows == list(range(sample.num_prompt - 1, len(sample.ids) - 2))


def test_the_exports_hold_the_same_head(trained, tmp_path):
    head, vocabulary = trained
    write_hub(head, vocabulary, tmp_path / "hub")
    write_speculators(head, vocabulary, tmp_path / "speculators")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "hub" / name).read_bytes() == (draft_head_path() / name).read_bytes()
    hub, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "speculators"))
    assert {name.replace("midlayer.", "layers.0.") for name in hub} == set(other) - {"embed_tokens.weight"}
    for name, value in hub.items():
        assert torch.equal(value, other[name.replace("midlayer.", "layers.0.")])
    config = json.loads((tmp_path / "speculators/config.json").read_text())
    assert config["transformer_layer_config"]["vocab_size"] == len(hub["t2d"])
    assert torch.equal(hub["t2d"].nonzero()[:, 0], vocabulary)

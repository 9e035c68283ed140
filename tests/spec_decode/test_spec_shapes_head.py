"""The head that drafts for the embedded checkpoint is good at it, and what trained it drafts as an engine
does: row by row."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mmengine_shapes import checkpoint_path, draft_head_path
from mmengine_shapes.training.head_batch import collate
from mmengine_shapes.training.head_export import read_hub, write_hub, write_speculators
from mmengine_shapes.training.head_simulate import acceptance, accepted_from, held_out_samples, passes_of
from mmengine_shapes.training.head_target import Target


@pytest.fixture(scope="module")
def trained():
    return read_hub(draft_head_path())


@pytest.fixture(scope="module")
def target(trained):
    return Target(checkpoint_path(), trained[0].shape.levels)


@pytest.fixture(scope="module")
def samples(target):
    """Twelve held-out conversations of each task, images of mixed sizes, by task."""
    drawn = held_out_samples(target, ("json", "describe", "direction"), 12, seed=7)
    return {task: [one for one in drawn if one.task == task] for task in ("json", "describe", "direction")}


def test_four_drafts_a_pass_are_worth_their_while(trained, samples):
    assert acceptance(*trained, samples["json"], 4) > 4.0
    assert acceptance(*trained, samples["describe"], 4) > 3.0


def test_taps_of_other_layers_are_worth_little(trained, samples):
    """What the drafts know of a picture comes from what the target read, not from the tokens alone."""
    swapped = [
        type(one)(one.task, one.ids, one.num_prompt, one.positions, one.taps.flip(1))
        for one in samples["json"]
    ]
    assert acceptance(*trained, swapped, 4) < acceptance(*trained, samples["json"], 4) - 0.5


def naive_drafts(head, vocabulary, sample, row, count):
    """Drafts begun at `row`, one decoder pass over all of the head's inputs a draft."""
    layer, config = head.midlayer, head.config
    hidden = head.fuse(sample.taps[: row + 1].float())
    tokens = sample.ids[1 : row + 2]
    positions = sample.positions[:, : row + 1]
    drafts = []
    for _ in range(count):
        embeds = layer.input_layernorm(head.embedding[tokens])
        mixed = torch.cat((embeds, layer.hidden_norm(hidden)), -1)
        heads = [
            getattr(layer.self_attn, name)(mixed).view(1, len(tokens), -1, config.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        q, k = (head._rotate(one, positions[:, None]) for one in heads[:2])
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), heads[2].transpose(1, 2), is_causal=True, enable_gqa=True
        )
        out = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2)[0])
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        normed = head.norm(out)[-1]
        drafts.append(int(vocabulary[head.lm_head(normed).argmax()]))
        carried = normed if head.shape.norm_output else out[-1]
        hidden = torch.cat((hidden, carried[None]))
        tokens = torch.cat((tokens, torch.tensor(drafts[-1:])))
        positions = torch.cat((positions, positions[:, -1:] + 1), 1)
    return drafts


@pytest.mark.parametrize("task", ["json", "describe", "direction"])
def test_drafting_from_all_rows_at_once_is_drafting_from_each(trained, samples, task):
    head, vocabulary = trained
    several = samples[task][:3]
    for sample, accepted in zip(several, accepted_from(head, vocabulary, several, 4), strict=True):
        for index in range(0, len(accepted), 5):
            row = sample.num_prompt - 1 + index
            drafts = naive_drafts(head, vocabulary, sample, row, 4)
            truth = sample.ids[row + 2 : row + 6].tolist()
            same = [a == b for a, b in zip(drafts, truth, strict=False)] + [False]
            assert accepted[index] == same.index(False), (task, index)


def test_passes_are_walked_as_an_engine_takes_them():
    # Token 0 comes with the prompt. From it 4 drafts hold: tokens 1 to 4, and 5 by the target itself.
    assert passes_of([4, 9, 9, 9, 9, 0, 2, 9], num_answer=9) == [5, 1, 2]
    assert passes_of([0], num_answer=2) == [1]
    assert passes_of([0], num_answer=1) == []


def test_a_target_reads_the_same_alone_and_beside_others(target, samples):
    """Padding of a batch changes nothing: the target's choice after each token is its own answer."""
    for group in samples.values():
        for sample in group:
            after = target.logits(sample.taps[sample.num_prompt - 1 : -1, -1].float()[None])[0]
            assert after.argmax(-1).tolist() == sample.ids[sample.num_prompt :].tolist()


def test_rows_of_a_batch_are_those_that_a_draft_can_begin_at(samples):
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

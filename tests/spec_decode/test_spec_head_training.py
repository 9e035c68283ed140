"""Tests the training of a draft head: the data are the target model's answers, and are reproducible."""

import argparse
from collections import Counter

import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine
from mmengine_shapes import checkpoint_path, draft_head_path
from mmengine_shapes.scenes import in_split
from mmengine_shapes.training import head_data, held_out
from mmengine_shapes.training.head_batch import collate
from mmengine_shapes.training.head_data import JSON_TASKS, LONG_TASKS, MIX, draw_items, regenerate
from mmengine_shapes.training.head_export import read_hub
from mmengine_shapes.training.head_model import HeadShape
from mmengine_shapes.training.head_start import start_head
from mmengine_shapes.training.head_target import Target
from mmengine_shapes.training.head_train import (
    Teacher,
    aux_rows,
    draft_vocabulary,
    kept_samples,
    loss_of,
    rate_at,
    train,
)
from mmengine_shapes.training.held_out import draw_item

LEVELS = (2, 4, 5)


@pytest.fixture(scope="module")
def target():
    return Target(checkpoint_path(), LEVELS)


@pytest.fixture(scope="module")
def conversations():
    with Engine(checkpoint_path(), config=EngineConfig(num_threads=1)) as engine:
        return list(regenerate(engine, draw_items(48, seed=3), seed=3))


@pytest.fixture(scope="module")
def samples(target, conversations):
    return aux_rows(target, conversations)


def test_the_same_seed_gives_the_same_conversations(conversations):
    with Engine(checkpoint_path(), config=EngineConfig(num_threads=1, max_num_seqs=3)) as engine:
        again = list(regenerate(engine, draw_items(48, seed=3), seed=3))
    assert [one.token_ids for one in again] == [one.token_ids for one in conversations]


def test_half_of_the_questions_ask_for_json_and_a_quarter_for_sentences():
    drawn = Counter(item.task for item in draw_items(400, seed=0))
    assert 0.42 < sum(drawn[task] for task in JSON_TASKS) / 400 < 0.58
    assert 0.18 < sum(drawn[task] for task in LONG_TASKS) / 400 < 0.32
    assert set(drawn) <= set(MIX)


def test_scenes_of_the_other_split_are_drawn_for_held_out_items_alone(monkeypatch):
    # All training scenes have layouts from the split "train".
    layouts, draw = [], held_out.random_scene

    def noted(*arguments):
        layouts.append(draw(*arguments))
        return layouts[-1]

    monkeypatch.setattr(held_out, "random_scene", noted)
    assert head_data.draw_item is draw_item
    list(draw_items(20, seed=1))
    assert layouts and all(in_split(scene.layout(), "train") for scene in layouts)


def test_labels_are_the_targets_later_tokens(target, samples):
    """In a greedy answer, the target's most likely token after each position is the answer's next token."""
    vocabulary = draft_vocabulary(samples, target.config.text.vocab_size, 512)
    batch = collate(samples[:8])
    last = batch.lengths[:, None] - 2
    places = (batch.rows[:, :1] + 1 + torch.arange(batch.rows.shape[1])).clamp(max=last)
    wanted, inside = Teacher(target, vocabulary).probabilities(batch, places)
    torch.testing.assert_close(wanted.sum(-1), torch.ones(places.shape))
    said = vocabulary[wanted.argmax(-1)] == batch.ids.gather(1, places + 1)
    assert (said & inside)[batch.valid].float().mean() > 0.9  # some answers were sampled


def test_the_trained_heads_loss_is_far_below_its_start(target, samples):
    trained, vocabulary = read_hub(draft_head_path())
    begun = start_head(target, trained.shape, vocabulary)
    teacher, batch = Teacher(target, vocabulary), collate(samples)
    with torch.no_grad():
        (first, _), (now, right) = loss_of(begun, teacher, batch), loss_of(trained, teacher, batch)
    assert now < 0.2 * first
    assert min(right) > 0.9


def test_a_few_steps_of_training_learn(target, samples, tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("mmengine_shapes.training.head_train.BATCH", 8)
    samples = [one for one in samples if len(one.ids) < 90][:16]
    vocabulary = draft_vocabulary(samples, target.config.text.vocab_size, 256)
    head = start_head(target, HeadShape(LEVELS, 256, 96, fc_norm=False, norm_output=False), vocabulary)
    teacher, batch = Teacher(target, vocabulary), collate(samples)
    options = argparse.Namespace(steps=12, rate=3e-3, seed=0, folder=tmp_path)
    with torch.no_grad():
        before, _ = loss_of(head, teacher, batch)
    train(head, teacher, samples, samples[:4], vocabulary, options)
    with torch.no_grad():
        after, _ = loss_of(head, teacher, batch)
    assert after < 0.6 * before
    assert (tmp_path / "head.pt").exists() and "held out" in capsys.readouterr().out


def test_samples_are_taken_from_the_file_that_keeps_them(target, tmp_path, monkeypatch):
    # The second call reads the samples from the file, without `collect`.
    first = kept_samples(tmp_path / "samples.pt", target, 5, seed=2)
    monkeypatch.delattr("mmengine_shapes.training.head_train.collect")
    second = kept_samples(tmp_path / "samples.pt", target, 5, seed=2)
    assert [one.task for one in first] == [one.task for one in second]
    assert all(
        torch.equal(a.aux_hidden_states, b.aux_hidden_states) for a, b in zip(first, second, strict=True)
    )


def test_the_rate_warms_up_and_falls():
    rates = [rate_at(step, 1000) for step in range(1000)]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == 1.0 and rates[0] < 0.1 and rates[-1] < 0.02

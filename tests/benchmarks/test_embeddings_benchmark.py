"""Tests the inputs of benchmarks/pooling/embeddings.py with a small model."""

import numpy as np
import pytest

from mmengine import Engine


def test_texts_have_their_lengths_and_the_model_embeds_them(module, tmp_path):
    models = module("pooling.models")
    folder = tmp_path / "text"
    models.make_text_model(folder, small=True)
    lengths = np.array([3, 17, 40])
    texts = models.random_texts(folder, lengths)
    with Engine(folder, dtype="bfloat16", num_blocks=64, max_model_len=128) as engine:
        assert [len(engine.processor.tokenizer.encode(text)) for text in texts] == lengths.tolist()
        plain, asked = engine.embed(texts), engine.embed(texts, prompt_name="query")
    assert plain.shape == (3, models.SMALL["hidden_size"])
    assert np.allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-3) and not np.allclose(plain, asked)


def test_a_sample_has_batches_of_the_sorted_texts(module):
    """Each batch contains neighbours from the texts sorted by length, in an order that depends only on the
    batch's number.
    """
    embeddings = module("pooling.embeddings")
    lengths = np.random.default_rng(0).permutation(np.arange(320))
    texts = [str(length) for length in lengths]
    turns = embeddings.sampled(texts, lengths, 2)
    assert [len(turn) for turn in turns.values()] == [embeddings.BATCH] * 2
    for turn, longest in zip(turns.values(), (319 - 2 * 32, 319 - 7 * 32), strict=True):
        assert sorted(map(int, turn)) == list(range(longest - 31, longest + 1))
    every = embeddings.sampled(texts, lengths, 10)
    assert every.keys() == set(range(10)) and all(every[number] == turn for number, turn in turns.items())


def test_a_later_run_measures_only_the_missing_turns(module, tmp_path, monkeypatch):
    embeddings = module("pooling.embeddings")
    measured = []

    class Side:
        def __init__(self, name, *_):
            self.name = name

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def embed(self, inputs, prompt):
            measured.append((self.name, len(inputs)))
            used = len(inputs) * (3.0 if self.name == embeddings.THEIRS else 1.5)
            return {"wall": used, "cpu": used}, np.ones((len(inputs), 1))

    monkeypatch.setattr(embeddings, "Side", Side)
    path, turns = tmp_path / "turns.jsonl", {0: ["a"] * 8, 2: ["b"] * 4}
    embeddings.Turns(path, None).measure("part", tmp_path, {2: turns[2]}, 1)
    measured.clear()
    found = embeddings.Turns(path, None).measure("part", tmp_path, turns, 1)
    assert [size for _, size in measured] == [1, 1, 8, 8]
    table, target = embeddings.summary(found)
    assert target.measured == 2.0 and table.rows[0][1] == "12"
    with pytest.raises(SystemExit, match="2 of 2 turns are left"):
        embeddings.Turns(None, 0).measure("part", tmp_path, turns, 1)
    with pytest.raises(SystemExit, match="other numbers of inputs"):
        embeddings.Turns(path, None).measure("part", tmp_path, {0: ["a"]}, 1)

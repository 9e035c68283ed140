"""Tests the inputs of benchmarks/pooling/embeddings.py with a small model. Times are not checked."""

import numpy as np

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
    embeddings = module("pooling.embeddings")
    lengths = np.random.default_rng(0).permutation(np.arange(320))
    texts = [str(length) for length in lengths]
    turns = embeddings.sampled(texts, lengths, 2)
    assert [len(turn) for turn in turns] == [embeddings.BATCH] * 2
    for turn, longest in zip(turns, (319 - 2 * 32, 319 - 7 * 32), strict=True):
        assert sorted(map(int, turn)) == list(range(longest - 31, longest + 1))

"""Tests sessions with a model that runs through transformers."""

from mmengine import Engine
from tests.any_model.catalogue import write
from tests.pictures import asked, noise

FRAMES = (noise(0, (60, 90)), noise(1, (60, 90)), noise(2, (60, 90)))
QUESTION = "What has changed?"


def test_frames_of_a_session_are_images_with_their_times(tmp_path):
    """A session's answer equals the answer to a prompt with the frames' times and images."""
    write("gemma3", tmp_path / "model")
    settings = {"model_impl": "transformers", "dtype": "float32", "max_model_len": 512, "block_size": 4}
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    parts = [part for n, frame in enumerate(FRAMES) for part in (f"<{n / 2:.1f} seconds>", frame)]
    with Engine(str(tmp_path / "model"), **settings) as engine:
        with engine.session() as session:
            appended = [session.frame(frame, n / 2) for n, frame in enumerate(FRAMES)]
            assert all(appended) and session.facts.num_media == 3
            answer = session.ask(QUESTION, **options)
        assert answer.num_cached_tokens > 3 * 4
        (wanted,) = engine.generate([asked(*parts, QUESTION)], **options)
    assert answer.prompt_token_ids.tolist() == wanted.prompt_token_ids.tolist()
    assert answer.token_ids == wanted.token_ids

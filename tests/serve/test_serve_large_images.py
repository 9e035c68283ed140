"""A large image is encoded in pieces over several steps. The answer does not change, and other requests run
meanwhile.
"""

import msgspec
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.native.library import describe, load
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from tests.log_copies import copied
from tests.pictures import data_url, looking

ASKED = Prompt([looking("How many shapes are in the image?", data_url(3, size=(448, 448)))])
WHOLE = 2**40  # an encoder_piece larger than any image needs


def answer(engine):
    """Return the answer tokens, and how many outputs a text request gets during the image's encoding."""
    engine.submit("Say something long.", max_tokens=60, ignore_eos=True, request_id="text")
    engine.step()
    engine.submit(ASKED, max_tokens=12, ignore_eos=True, request_id="large")
    gained, is_there, ids = 0, False, None
    while engine.has_work:
        for output in engine.step():
            is_there |= output.request_id == "large"
            gained += output.request_id == "text" and not is_there
            if output.completion is not None and output.request_id == "large":
                ids = output.completion.choices[0].token_ids
    return ids, gained


@pytest.fixture(scope="module")
def whole():
    with Engine(config=EngineConfig(encoder_piece=WHOLE)) as engine:
        return answer(engine)[0]


def config_of(piece):
    return EngineConfig(encoder_piece=piece, encoder_even_patches=256, checkpoint_interval=4)


def test_the_answer_is_that_of_the_whole_image(whole, tmp_path):
    if load() is None:
        pytest.skip(describe())
    with Engine(config=config_of(30), log=tmp_path / "log") as engine:
        ids, gained = answer(engine)
        assert engine.stats().num_encoded_items == 1
        assert not engine.built.executor._runner._parts.is_held
    events = [record.event for record in LogReader(tmp_path / "log")]
    parts = [event for event in events if isinstance(event, ev.Encoded)]
    assert len(parts) > 10 and gained >= len(parts)
    assert ids == whole
    report = verify(tmp_path / "log")
    assert report.ok and not report.unfinished, report.divergence


def test_a_resumed_log_encodes_the_item_again(whole, tmp_path):
    """Encoded pieces are lost with the process, but the answer stays the same."""
    if load() is None:
        pytest.skip(describe())
    with Engine(config=config_of(30), log=tmp_path / "log") as engine:
        engine.submit(ASKED, max_tokens=12, ignore_eos=True, request_id="large")
        for _ in range(6):
            engine.step()
        assert engine.built.core.state.part is not None
        copied(tmp_path / "log", tmp_path / "killed")
    with Engine(config=config_of(30), log=tmp_path / "killed", resume=Resume()) as engine:
        assert engine.requests.resume("large") is None
        outputs = [output for _ in range(200) if engine.has_work for output in engine.step()]
    assert outputs[-1].completion.choices[0].token_ids == whole
    report = verify(tmp_path / "killed")
    assert report.ok and not report.unfinished, report.divergence


def test_the_encoded_percentage_is_reported():
    with Engine(config=config_of(30)) as engine:
        engine.submit(ASKED, max_tokens=2, request_id="large")
        told = []
        while engine.has_work:
            engine.step()
            told.append(engine.requests.encoded_percent("large"))
        assert engine.requests.encoded_percent("large") is None
    percents = [each for each in told if each is not None]
    assert len(percents) > 10 and percents == sorted(set(percents)) and 0 < percents[0] < percents[-1] < 100
    assert told[-1] is None


def test_a_cancelled_request_drops_its_encoded_part():
    with Engine(config=config_of(30)) as engine:
        parts = engine.built.executor._runner._parts
        engine.submit(ASKED, max_tokens=4, request_id="large")
        engine.step(), engine.step(), engine.step()
        assert parts.is_held
        engine.cancel("large")
        while engine.has_work:
            engine.step()
        assert not parts.is_held


def test_a_part_that_fails_is_tried_again(whole, monkeypatch):
    with Engine(config=config_of(30)) as engine:
        parts, calls = engine.built.executor._runner._parts, []
        advance = parts.advance

        def failing(part, *given):
            calls.append(part.start)
            if len(calls) == 4:
                raise RuntimeError("planted")
            return advance(part, *given)

        monkeypatch.setattr(parts, "advance", failing)
        ids, _ = answer(engine)
    assert calls.count(0) == 2
    if load() is not None:
        assert ids == whole


def test_a_large_image_is_logged_before_its_encoding(caplog):
    """A large image is logged once, with the option that makes it smaller. A cached image is not logged."""
    told = []
    with Engine(config=msgspec.structs.replace(config_of(30), encoder_work_ns=10**9)) as engine:
        engine.on_large_media(told.append)
        with caplog.at_level("INFO", "mmengine.operators"):
            engine.submit(ASKED, max_tokens=2, request_id="large")
        (large,) = told
        assert (large.modality, large.tokens, large.seconds) == ("image", 64, 512)
        assert str(large) == (
            "the image takes 64 tokens, and the encoder about 9 minutes; --max-pixels makes it smaller"
        )
        assert str(large._replace(seconds=12.3)).count("about 12 seconds") == 1
        (record,) = [each.message for each in caplog.records if "large image" in each.message]
        assert "request_id='large' tokens=64 encoder_s=512" in record and "lowered_by='max_pixels'" in record
        while engine.has_work:
            engine.step()
        engine.submit(ASKED, max_tokens=2)
        engine.submit("Hello", max_tokens=2)
    assert len(told) == 1


def test_the_encoder_work_of_a_step_is_measured():
    with Engine() as engine:
        config = engine.config
        assert config.encoder_piece == 10**9 // config.encoder_work_ns and config.encoder_even_patches > 1


def test_encoder_piece_is_refused_for_an_encoder_that_cannot_pause(monkeypatch):
    monkeypatch.setattr("mmengine.models.network.measure_tower", lambda vision: None)
    with pytest.raises(ConfigError, match="encoder_piece 5 is not supported"):
        Engine(config=EngineConfig(encoder_piece=5))
    with Engine() as engine:
        assert engine.config.encoder_piece == 0

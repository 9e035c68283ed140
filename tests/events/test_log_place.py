"""Tests that the writer notices when its folder is removed, renamed or replaced."""

import os
import shutil

import pytest

from mmengine.errors import LogError
from mmengine.events import log_place
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from tests.events.logs import read_events, segments


@pytest.mark.parametrize("what", ["folder", "segment"])
def test_a_lost_folder_stalls_the_log_until_it_is_back(tmp_path, monkeypatch, what):
    monkeypatch.setattr(log_place, "LOOK_S", 0.0)
    folder, elsewhere = tmp_path / "log", tmp_path / "elsewhere"
    writer = LogWriter(folder)
    writer.append(ev.Failed("before"), 0, 0)
    assert writer.commit() and not writer.stalled
    moved = folder if what == "folder" else segments(folder)[0]
    moved.rename(elsewhere)
    assert "was removed, moved or unmounted" in writer.stalled and str(folder) in writer.stalled
    writer.append(ev.Failed("during"), 1, 0)
    assert not writer.commit(), "commit must fail, because the record would not be in `folder`"
    if what == "folder":
        folder.mkdir()
        (folder / "lock").touch()
        assert "lock is another file" in writer.stalled
        shutil.rmtree(folder)
    elsewhere.rename(moved)
    assert not writer.stalled and writer.commit()
    assert [event.error for event in read_events(folder)] == ["before", "during"]
    shutil.rmtree(folder)
    writer.append(ev.Failed("lost"), 2, 0)
    with pytest.raises(LogError, match="moved or unmounted.*its last 1 records are lost"):
        writer.close()


def test_the_folder_is_looked_at_rarely(tmp_path, monkeypatch):
    writer, looks, stat = LogWriter(tmp_path / "log"), [], os.stat
    monkeypatch.setattr(os, "stat", lambda *given: looks.append(given) or stat(*given))
    for step in range(100):
        writer.append(ev.Failed("one"), step, 0)
        assert writer.commit() and not writer.stalled
    assert len(looks) < 50
    writer.close()

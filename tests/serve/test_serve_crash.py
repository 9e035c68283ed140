"""Tests that a batch continues after its process dies before, in or after any write. Each request is answered
once, with the same tokens.

A batch writes the log, the answers, the media, the manifest and the snapshots.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mmengine.cli.batch import HAS_ERRORS, run_batch_file
from mmengine.errors import InvalidMedia
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.models.plugin import MediaInput, MediaSource, Prepared
from mmengine.replay.verify import verify
from mmengine.request import MediaItem
from mmengine.serve.batch.progress import AnswerFile
from mmengine.serve.engine.engine import Engine
from tests.forked import exit_code_of
from tests.serve import serve_fakes as fakes

DIED = 77


class Picturing(fakes.EchoProcessor):
    """A processor that turns a digit into an image with four placeholders and the digit as its patches."""

    def prepare_text(self, text, *, images=(), videos=(), media_options=None):
        if "bad" in text:
            raise InvalidMedia("image 1 is no image")
        tokens, media = [], []
        for letter in text:
            if letter.isdigit():
                item = MediaItem(letter.encode().ljust(32, b"\0"), "image", ((len(tokens), 4),), (1, 4, 4))
                media.append(self.restore(item, MediaSource(letter.encode() * 50, {})))
                tokens += [ord("#")] * 4
            else:
                tokens.append(ord(letter))
        return Prepared(np.array(tokens, np.int32), tuple(media), text)

    def restore(self, item, source):
        if source.data != item.mm_hash[:1] * 50:
            raise InvalidMedia("other pixels")
        return MediaInput(item, np.full((16, 8), source.data[0], np.uint8), source)


class Encoding(fakes.EchoExecutor):
    """An executor that cannot encode without pixels."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pixels = {}

    def attach(self, request_id, media):
        super().attach(request_id, media)
        self.pixels[request_id] = media

    def dispatch(self, plan):
        for item in plan.encode:
            assert self.pixels[item.request.request_id][item.index].patches[0, 0] == item.key[0]
        super().dispatch(plan)


def write_requests(folder):
    texts = ["hello", "2 is a number", "bad", "one 1 two 2", "again 1"]
    lines = [
        {"custom_id": f"q{k}", "messages": [{"role": "user", "content": text}], "max_tokens": 6}
        for k, text in enumerate(texts)
    ]
    lines[1]["n"] = 2
    folder.mkdir()
    (folder / "requests").write_text("\n".join([*map(json.dumps, lines), "no json"]))


def run_batch(folder, **settings):
    builder = fakes.builder(
        processor=Picturing(),
        executor_class=Encoding,
        **{"max_num_seqs": 2, "snapshot_bytes": 2500, "log_sync": "never", **settings},
    )

    def make_engine(resume):
        return Engine(builder=builder, log=folder / "log", resume=resume)

    return run_batch_file(folder / "requests", folder / "answers", folder / "log", make_engine)


def in_a_process(folder, death=-1, **settings):
    """Run the batch in a process that dies at point `death`, and return its exit code."""

    def run():
        points = Points(death)
        points.guard()
        code = run_batch(folder, **settings)
        (folder / "points").write_text(str(points.count))
        return code

    return exit_code_of(run)


class Points:
    """Counts the points where a process may die, and dies at a given point."""

    def __init__(self, death):
        self.count, self._death = 0, death

    def here(self):
        if self.count == self._death:
            os._exit(DIED)
        self.count += 1

    def guard(self):
        write, replace, rename, unlink, sync = os.write, os.replace, Path.rename, Path.unlink, os.fdatasync
        os.write = lambda fd, data: self._in_pieces(lambda part: write(fd, part), data)
        os.replace = self._around(replace)
        Path.rename = self._around(rename)
        Path.unlink = self._around(unlink)
        os.fdatasync = self._around(sync)
        answer = AnswerFile.write

        def whole_or_not(file, line, request_id):
            self.here()
            if self.count == self._death:
                answer(file, line[: len(line) // 2], "")
            self.here()
            answer(file, line, request_id)
            self.here()

        AnswerFile.write = whole_or_not

    def _in_pieces(self, write, data):
        self.here()
        if self.count == self._death:
            write(data[: len(data) // 2])
        self.here()
        written = write(data)
        self.here()
        return written

    def _around(self, call):
        def guarded(*args, **kwargs):
            self.here()
            result = call(*args, **kwargs)
            self.here()
            return result

        return guarded


def answers(folder):
    return sorted((folder / "answers").read_text().splitlines())


def strip(lines):
    found = [json.loads(line) for line in lines]
    for answer in found:
        answer.get("usage", {}).pop("cached_tokens", None)
    return found


def check(folder, expected):
    assert strip(answers(folder)) == expected
    report = verify(folder / "log")
    assert report.ok and not report.unfinished
    events = [record.event for record in LogReader(folder / "log")]
    ended = [event.request_id for event in events if isinstance(event, ev.Finished)]
    queued = [event.request_id for event in events if isinstance(event, ev.Queued)]
    assert sorted(queued) == sorted(ended) == sorted(set(ended))
    assert not list((folder / "log" / "media").glob("*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    write_requests(folder)
    assert in_a_process(folder) == HAS_ERRORS  # invalid JSON, and a bad request
    return strip(answers(folder)), int((folder / "points").read_text())


def die_and_go_on(tmp_path, undisturbed, deaths):
    expected, _ = undisturbed
    for death in deaths:
        folder = tmp_path / f"{death}"
        write_requests(folder)
        assert in_a_process(folder, death) == DIED
        assert in_a_process(folder) == HAS_ERRORS
        check(folder, expected)


def test_between_writes(tmp_path, undisturbed):
    die_and_go_on(tmp_path, undisturbed, range(0, undisturbed[1], 11))


@pytest.mark.soak
def test_between_any_two_writes(tmp_path, undisturbed):
    die_and_go_on(tmp_path, undisturbed, range(undisturbed[1]))


def test_processes_die_again_and_again(tmp_path, undisturbed):
    """Many processes in a row die after a short time."""
    folder, deaths = tmp_path / "run", 0
    write_requests(folder)
    while (code := in_a_process(folder, 9 + deaths % 17)) == DIED:
        deaths += 1
        assert deaths < 200
    assert code == HAS_ERRORS and deaths > 5
    check(folder, undisturbed[0])


def test_without_a_media_store_what_needs_pixels_again_ends_with_an_error(tmp_path, undisturbed):
    """Which requests are prepared at the process's death is random, so the test tries several points."""
    whole = {answer["custom_id"]: answer for answer in undisturbed[0]}
    lost: list[str] = []
    for death in range(25, 200, 6):
        folder = tmp_path / f"run{death}"
        write_requests(folder)
        assert in_a_process(folder, death, media_store_bytes=0) == DIED
        assert in_a_process(folder, media_store_bytes=0) == HAS_ERRORS
        found = {answer["custom_id"]: answer for answer in strip(answers(folder))}
        lost = [name for name in found if "the media store is disabled" in found[name].get("error", "")]
        assert set(lost) <= {"q1", "q3", "q4"}
        assert all(found[name] == whole[name] for name in found if name not in lost)
        if lost:
            break
    assert lost
    assert not (folder / "log" / "media").exists()

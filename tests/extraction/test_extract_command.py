"""Tests `mmengine extract` with the included checkpoint, and the commands on its how-to page."""

import csv
import json
import random
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from mmengine_shapes.questions import scene_json, scene_schema
from tests.cli.cli_process import call_cli, run_unsupervised
from tests.extraction import pdf_documents as pdf
from tests.project.doc_blocks import ROOT, blocks, commands

pytest.importorskip("pypdfium2")
PAGE = "docs/how-to/extract-documents.md"
QUESTION = ("--prompt", "Describe the image as JSON.", "--schema", "schema.json", "--dpi", "96")
SLOW = ("--set", "max_num_seqs=2", "--set", "token_budget=64", "--set", "snapshot_bytes=4000")
SEEDS = (0, 2, 3, 10, 12)  # Scenes that the included model reads without an error.
MARKUP = "<img src=x onerror=alert(1)>"
FORMULA = "=HYPERLINK(A1)"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def truth(seed):
    return json.loads(scene_json(pdf.scene(seed)))


def write_folder(folder):
    """Write pictures with hostile names, good and hostile PDF documents, and the schema."""
    documents = folder / "in"
    documents.mkdir()
    for seed, name in zip(SEEDS, (FORMULA, MARKUP, "c")):
        pdf.scene(seed).draw().save(documents / f"{name}.png")
    pdf.write_scenes(documents / "d.pdf", SEEDS[3:])
    pdf.write_encrypted(documents / "e.pdf")
    pdf.write_many_pages(documents / "f.pdf", 10_000)
    (documents / "g.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (folder / "schema.json").write_text(json.dumps(scene_schema(), indent=1))


@pytest.fixture
def unsupervised(monkeypatch):
    run_unsupervised(monkeypatch)


@pytest.fixture(scope="module")
def extracted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted")
    write_folder(folder)
    words = ("extract", "in", *QUESTION, "--per", "page", "--out", "a.jsonl", "--review", "a.html")
    result = call_cli(*words, cwd=folder)
    assert result.returncode == 1, result.stderr  # Three documents have errors.
    return folder, result


def test_each_page_is_a_row_and_each_bad_document_one_error(extracted):
    folder, result = extracted
    rows = lines_of(folder / "a.jsonl")
    found = [(row["document"].removeprefix("in/"), row["page"], row["status"]) for row in rows]
    good = [(f"{FORMULA}.png", 1), (f"{MARKUP}.png", 1), ("c.png", 1), ("d.pdf", 1), ("d.pdf", 2)]
    bad = [("e.pdf", None, "error"), ("f.pdf", None, "error"), ("g.png", 1, "error")]
    marked = {(name, page): "check" if row["check"] else "ok" for (name, page, _), row in zip(found, rows)}
    expected = [(*each, marked[each]) for each in good]
    assert sorted(found, key=str) == sorted([*expected, *bad], key=str)
    values = {(name, page): row["value"] for (name, page, _), row in zip(found, rows)}
    assert [values[each] for each in good] == [truth(seed) for seed in SEEDS]
    errors = {row["document"]: row["error"] for row in rows if row["error"]}
    assert "encrypted" in errors["in/e.pdf"] and "10,000 pages; the limit is 100" in errors["in/f.pdf"]
    (started,) = [
        each.event
        for each in LogReader(folder / "a.jsonl.work" / "log")
        if isinstance(each.event, ev.Started)
    ]
    assert started.config["media_decoding"] == "processes"
    assert "a.jsonl: 8 rows" in result.stdout and "3 error" in result.stdout


def test_the_review_page_has_the_pictures_and_no_markup_of_names(extracted):
    folder, _ = extracted
    page = (folder / "a.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 5 and "onerror=alert(1)>" not in page
    assert page.index("in/e.pdf") < page.index("in/c.png")


def test_another_table_is_written_from_the_same_work(extracted):
    folder, _ = extracted
    log = folder / "a.jsonl.work" / "log"
    before = {path: path.read_bytes() for path in log.glob("*.mmlog")}
    words = ("extract", "in", *QUESTION, "--per", "page", "--work", "a.jsonl.work")
    result = call_cli(*words, "--out", "b.csv", "--min-confidence", "1", cwd=folder)
    assert result.returncode == 1 and "loading" not in result.stderr
    assert {path: path.read_bytes() for path in log.glob("*.mmlog")} == before
    with (folder / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows].count("check") == 5
    assert (
        json.loads(next(row for row in rows if row["document"] == "in/c.png")["/objects"])
        == truth(SEEDS[2])["objects"]
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (("--out", "a.jsonl"), "with other values of per"),
        (("--out", "a.jsonl", "--per", "page", "--dtype", "float32"), "with other values of dtype"),
        (("--out", "a.xlsx"), "must end in one of"),
        (("--out", "in/c.png.jsonl", "--review", "schema.json"), "schema.json is an input"),
        (("--out", "a.csv", "--min-confidence", "nan"), "--min-confidence"),
        (("--out", "none/a.jsonl"), "there is no folder none"),
        (("--out", "c.jsonl", "--work", "in"), "is not the work folder of an extraction"),
    ],
)
def test_wrong_options_end_before_any_work(extracted, words, message):
    folder, _ = extracted
    result = call_cli("extract", "in", *QUESTION, *words, cwd=folder)
    assert result.returncode == 2 and message in result.stderr


@pytest.mark.usefixtures("unsupervised")
def test_boxes_are_drawn_and_in_the_rows(tmp_path, monkeypatch):
    pdf.scene(0).draw().save(tmp_path / "a.png")
    box = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1000}}
    box |= {"minItems": 4, "maxItems": 4}
    schema = {"type": "object", "properties": {"bbox_2d": box}, "required": ["bbox_2d"]}
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    words = ("extract", "a.png", *QUESTION, "--out", "a.jsonl", "--review", "a.html")
    result = call_cli(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (row,) = lines_of(tmp_path / "a.jsonl")
    found = row["boxes"]["/bbox_2d"]
    side = pdf.scene(0).draw().width
    left, top, right, bottom = (each * side / 1000 for each in row["value"]["bbox_2d"])
    expected = [min(left, right), min(top, bottom), max(left, right), max(top, bottom)]
    assert found["pixels"] == pytest.approx(expected)
    assert bool(found["problem"]) == (left > right or top > bottom)
    assert (tmp_path / "a.html").read_text().count("<rect ") == 1
    # boxes.jsonl is missing, as after a kill, so the next command computes only the boxes.
    (tmp_path / "a.jsonl.work" / "boxes.jsonl").unlink()
    closed, close = [], Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: (closed.append(engine), close(engine)))
    assert call_cli(*words, cwd=tmp_path).returncode == 0
    assert len(closed) == 1 and lines_of(tmp_path / "a.jsonl") == [row]


def test_a_pdf_document_needs_the_extra(extracted, monkeypatch):
    folder, _ = extracted
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    result = call_cli("extract", "in/d.pdf", *QUESTION, "--out", "d.csv", cwd=folder)
    assert result.returncode == 2 and "pip install '.[extract]'" in result.stderr
    assert not (folder / "d.csv.work").exists()


def test_a_folder_of_bad_documents_needs_no_model(tmp_path):
    write_folder(tmp_path)
    words = ("extract", "in/e.pdf", "in/f.pdf", *QUESTION, "--out", "a.csv")
    result = call_cli(*words, cwd=tmp_path)
    assert result.returncode == 1 and "loading" not in result.stderr
    assert "a.csv: 2 rows: 2 error" in result.stdout


def start(command, folder):
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_after_bytes(process, path, rng):
    """Kill the command soon after the file `path` has grown. Return whether the command was still running."""
    size, until = size_of(path), time.monotonic() + 60
    while process.poll() is None and size_of(path) == size and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(rng.random() * 0.02)
    process.kill()
    return process.wait() == -signal.SIGKILL


def size_of(path):
    return path.stat().st_size if path.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("seed, kills", [(1, 1), pytest.param(2, 6, marks=pytest.mark.soak)])
def test_a_killed_extraction_continues_with_the_same_rows(tmp_path, monkeypatch, seed, kills):
    """After kill -9, the table is the same as without a kill, and no answer is computed twice."""
    documents = tmp_path / "in"
    documents.mkdir()
    for number in range(8):
        pdf.scene(number).draw().save(documents / f"{number}.png")
    pdf.write_scenes(documents / "a.pdf", [8, 9])
    (tmp_path / "schema.json").write_text(json.dumps(scene_schema()))
    words = ["extract", "in", *QUESTION, *SLOW, "--per", "page", "--out"]
    with monkeypatch.context() as patch:
        run_unsupervised(patch)
        assert call_cli(*words, "whole.jsonl", cwd=tmp_path).returncode == 0
    work, rng, killed = tmp_path / "killed.jsonl.work", random.Random(seed), 0
    answers, table = work / "answers.jsonl", tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "mmengine.cli.main", *words, table.name]
    while killed < kills and not table.exists():
        killed += kill_after_bytes(start(command, tmp_path), answers, rng)
    assert killed and (kills > 1 or not table.exists())
    before, _, _ = answers.read_bytes().rpartition(b"\n")
    assert before and (
        kills > 1 or len(before.splitlines()) < 10
    )  # With several kills, the last kill may follow the last answer.
    assert call_cli(*words, "killed.jsonl", cwd=tmp_path).returncode == 0
    assert answers.read_bytes().startswith(before)
    assert rounded(tmp_path / "killed.jsonl") == rounded(tmp_path / "whole.jsonl")
    report = verify(work / "log")
    assert report.ok and not report.unfinished
    ended = [each.event.request_id for each in LogReader(work / "log") if isinstance(each.event, ev.Finished)]
    assert len(ended) == len(set(ended)) == 10


def rounded(path):
    """Return the rows with rounded probabilities, because the last bits depend on the batch."""
    return re.sub(r"\d\.\d+(e-\d+)?", lambda found: f"{float(found[0]):.3f}", path.read_text()).splitlines()


@pytest.mark.usefixtures("unsupervised")
def test_the_page_s_commands_print_the_page_s_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, draw, extract, score = [each for block in blocks(PAGE, "sh") for each in commands(block)]
    example = str(ROOT / "examples" / "drawn_documents.py")
    printed = []
    for command in (draw, extract, score):
        program, *words = shlex.split(command)
        if program == "mmengine":
            assert call_cli(*words).returncode == 0
            continue
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(example, run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0] == ["30 documents are in documents"]
    shown = [
        line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("| ") and " of " in line
    ]
    counts = [re.search(r"\d+ of \d+", line)[0] for line in printed[1]]
    assert [row.split("|")[2].strip() for row in shown] == counts

"""Tests the HTML report of a log: its numbers equal the log's, hostile text is never HTML, and a browser
shows the page.
"""

import base64
import gzip
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from mmengine.cli import main as cli
from mmengine.core.engine import EngineCore
from mmengine.events.log import LogWriter
from mmengine.replay import open_log, report, request_lines, step_lines
from mmengine.replay.report import write_report
from mmengine.replay.report.collect import COMMON, DECODE, PREFILL, slots_of
from mmengine.replay.report.page import SCRIPTS
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.replay.browser import Browser, chromium
from tests.replay.runs import busy_run
from tests.replay.step_reasons import reasons_of

needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no chromium here (Debian: apt-get install chromium)"
)

HOSTILE = "</script><img src=x onerror=document.title='owned'>\u202e\x1b[31m<!--"


def unpack(page):
    """Return the page's data as a dict: the head's fields, and the columns as arrays."""
    text = re.search(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]*)</script>', page)[1]
    raw = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(raw[:4], "little")
    data = json.loads(raw[4 : 4 + length])
    for name, place in data["columns"].items():
        data[name] = np.frombuffer(raw, place["type"], place["length"], 4 + length + place["offset"])
    return data


def state_at(data, lane, step):
    first, last = data["lane_segments"][lane : lane + 2]
    place = first + np.searchsorted(data["segment_step"][first:last], step, "right") - 1
    inside = data["lane_start"][lane] <= step < data["lane_end"][lane] and place >= first
    return (data["segment_state"][place], data["segment_reason"][place]) if inside else (-1, 0)


@pytest.fixture(scope="module", params=[{}, {"max_in_flight": 2}, {"swap_blocks": 8, "preempt_mode": "swap"}])
def shown(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    busy_run(folder / "log", 4, **request.param)
    write_report(folder / "log", folder / "page.html")
    return folder / "log", unpack((folder / "page.html").read_text())


def test_steps_equal_the_log(shown):
    log, data = shown
    lines = list(step_lines(log))
    for name, field in (
        ("rows", "num_rows"),
        ("tokens", "num_tokens"),
        ("admitted", "num_admitted"),
        ("running", "num_running"),
        ("waiting", "num_waiting"),
        ("free_blocks", "num_free_blocks"),
        ("encoder_used", "encoder_used"),
    ):
        assert data[f"step_{name}"].tolist() == [getattr(line, field) for line in lines], name
    assert np.allclose(data["step_device_ms"], [line.device_ms for line in lines])
    assert data["step_failed"].tolist() == [bool(line.failed) for line in lines]


def test_requests_equal_the_log(shown):
    log, data = shown
    lines = request_lines(log)
    assert data["ids"] == [line.request_id for line in lines]
    assert data["lane_prompt"].tolist() == [line.num_prompt_tokens for line in lines]
    assert data["lane_answer"].tolist() == [line.num_output_tokens for line in lines]
    assert data["lane_preemptions"].tolist() == [line.num_preemptions for line in lines]
    ends = [f"{line.finish_reason}: {line.detail}" if line.detail else line.finish_reason for line in lines]
    assert data["ends"] == ends


def test_batches_and_reasons_equal_the_log(shown):
    log, data = shown
    chunks = {}
    for step, lane, tokens in zip(data["chunk_step"], data["chunk_lane"], data["chunk_tokens"], strict=True):
        chunks[int(step), int(lane)] = int(tokens)
    names = {}
    for step in open_log(log).steps():
        names |= {
            req_state.request.request_id: req_state.arrival for req_state in step.state.requests.values()
        }
        waits = {names[reason.request_id]: reason.kind for reason in reasons_of(step)}
        state, number = step.state, step.number
        batch = {state.requests_by_row[row].arrival: int(state.scheduled[row]) for row in state.step_rows}
        for lane in range(len(data["ids"])):
            shown, reason = state_at(data, lane, number)
            assert (shown in (PREFILL, DECODE)) == (lane in batch), (number, lane)
            if lane in batch:
                assert chunks.get((number, lane), 1) == batch[lane]
            elif lane in waits and number % 16 == 0:
                kind = data["reasons"][reason or data["step_common_reason"][number]]
                assert kind == waits[lane] or {kind, waits[lane]} <= COMMON, (number, lane)


def test_lanes_of_a_slot_do_not_overlap():
    # A slot is a line of the chart. Requests that overlap in time are drawn in different slots.
    rng = np.random.default_rng(1)
    start = np.sort(rng.integers(0, 500, 300))
    end = start + rng.integers(0, 60, 300)
    slots = slots_of(start, end)
    taken = np.zeros((slots.max() + 1, 600), int)
    for slot, first, last in zip(slots, start, end, strict=True):
        taken[slot, first : max(last, first + 1)] += 1
    assert taken.max() == 1
    assert slots.max() + 1 == taken.sum(axis=0).max(), "as few lines as possible"


def hostile_log(folder):
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
    core.submit(request(HOSTILE, 9))
    core.submit(request("plain", 5))
    core.cancel("plain", HOSTILE)
    while core.has_work:
        core.step()
    core.close()


def test_log_text_is_never_html(tmp_path):
    hostile_log(tmp_path / "log")
    write_report(tmp_path / "log", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "onerror" not in page and HOSTILE in unpack(page)["ids"]
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r"https?://|src=|@import|url\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_the_command(tmp_path, monkeypatch, capsys):
    busy_run(tmp_path / "log", 1, num_requests=5)
    page = tmp_path / "page.html"
    monkeypatch.setattr(
        "sys.argv", ["mmengine", "log", "report", str(tmp_path / "log"), "-o", str(page), "--json"]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == len(list(step_lines(tmp_path / "log"))) and said["bytes"] == page.stat().st_size


@needs_chromium
def test_a_browser_shows_a_hostile_log_as_text(tmp_path):
    hostile_log(tmp_path / "log")
    write_report(tmp_path / "log", tmp_path / "page.html")
    browser = Browser()
    try:
        browser.open(tmp_path / "page.html")
        assert browser.run("document.title") == "log · mmengine log"
        assert HOSTILE[:20] in browser.run("document.getElementById('panel').textContent")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert not browser.errors
        blocked = "fetch('http://127.0.0.1:9/').then(() => 'went out', () => 'kept in')"
        assert browser.run(blocked) == "kept in"
        assert any("Content Security Policy" in error for error in browser.errors)
    finally:
        browser.close()


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_can_scrub_zoom_and_search(tmp_path, dark):
    busy_run(tmp_path / "log", 4)
    write_report(tmp_path / "log", tmp_path / "page.html")
    lines = list(step_lines(tmp_path / "log"))
    browser = Browser(dark=dark)
    try:
        browser.open(tmp_path / "page.html")
        assert browser.run("document.documentElement.classList.contains('dark')") == dark
        for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
            browser.key(key)
            browser.wait(f"mmengineReport.view.step === {step}")
            assert browser.run("document.querySelector('#panel h2').textContent") == f"Step {step}"
            batch = browser.run(f"mmengineReport.stepAt({step}).batch.length")
            assert batch == lines[step].num_rows
        browser.run("document.getElementById('slider').value = 9")
        browser.run("document.getElementById('slider').dispatchEvent(new Event('input'))")
        browser.wait("mmengineReport.view.step === 9")
        whole = browser.run("mmengineReport.view.last - mmengineReport.view.first")
        browser.mouse("mouseWheel", 500, 300, deltaX=0, deltaY=-600)
        browser.wait(f"mmengineReport.view.last - mmengineReport.view.first < {whole / 2}")
        first = browser.run("mmengineReport.view.first")
        browser.mouse("mousePressed", 500, 300, button="left", clickCount=1)
        browser.mouse("mouseMoved", 450, 300, button="left", buttons=1)
        browser.mouse("mouseReleased", 450, 300, button="left", clickCount=1)
        browser.wait(f"mmengineReport.view.first > {first}")
        browser.key("/")
        browser.wait("document.activeElement.id === 'query'")
        browser.call("Input.insertText", text="r1")
        browser.run("document.getElementById('search').requestSubmit()")
        browser.wait("mmengineReport.data.ids[mmengineReport.view.lane] === 'r1'")
        browser.key("0")
        browser.wait("mmengineReport.view.first === 0")
        x, y = browser.run(
            "(() => { const { view, data } = mmengineReport, box = document.getElementById('lanes')"
            ".getBoundingClientRect(); return [box.x + view.x(data.lane_start[3] + 0.5), "
            "box.y + (data.lane_slot[3] + 0.4 - view.top) * view.slotHeight]; })()"
        )
        browser.click(x, y)
        browser.wait("mmengineReport.view.lane === 3")
        assert "r3" in browser.run("document.getElementById('panel').textContent")
        browser.run("mmengineReport.draw()")
        colours = browser.run(
            "new Set(new Uint32Array(document.getElementById('lanes').getContext('2d')"
            ".getImageData(0, 0, 900, 400).data.buffer)).size"
        )
        assert colours > 4, "lanes are drawn in the colours of their states"
        assert not browser.errors
    finally:
        browser.close()


def test_a_wheel_contains_the_page():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["mmengine.replay.report"]
    folder = Path(report.__file__).parent
    packed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert packed == {path.name for path in folder.iterdir() if path.suffix not in (".py", "")}
    assert {*SCRIPTS, "page.html", "page.css"} == packed


@needs_chromium
def test_a_tap_on_a_telephone_shows_the_panel(tmp_path):
    busy_run(tmp_path / "log", 4)
    write_report(tmp_path / "log", tmp_path / "page.html")
    browser = Browser(width=390, height=844)
    display = "getComputedStyle(document.getElementById('panel')).display"
    try:
        browser.open(tmp_path / "page.html")
        assert browser.run("document.documentElement.scrollWidth") == 390 and browser.run(display) == "none"
        box = browser.run("Object.values(document.getElementById('lanes').getBoundingClientRect().toJSON())")
        browser.click(box[0] + box[2] / 2, box[1] + 15)
        browser.wait(f"{display} === 'block'")
        browser.run("document.querySelector('.close').click()")
        assert browser.run(display) == "none" and not browser.errors
    finally:
        browser.close()

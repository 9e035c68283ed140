"""Tests the debugger's HTML page for small logs. A command prints the same text in the page as in the
terminal. Texts from a log are escaped.
"""

import base64
import gzip
import json
import random
import re
from pathlib import Path

import msgspec
import pytest

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.commands.registry import COMMANDS
from mmengine.replay.debug.commands.session import Session
from mmengine.replay.debug.page import collect
from mmengine.replay.debug.page.write import write_debug_page
from mmengine.replay.findings import Findings
from tests.cli.cli_process import run_cli
from tests.events.logs import rewrite
from tests.replay.broken_builds import write_broken
from tests.replay.browser import Browser, chromium
from tests.replay.runs import busy_run

needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no chromium here (Debian: apt-get install chromium)"
)
HOSTILE = "</script><img src=x onerror=document.title='owned'>\u202e\x1b[31m<!--"
VLLM = Path(__file__).parents[1] / "vllm" / "recordings" / "faults" / "priority_victim"
SCRIPT = (
    "where", "goto start", "step", "s 3", "rs", "si 4", "rsi", "list 7", "info", "info queue", "info rows",
    "info blocks", "info blocks all", "info prefix", "info encoder", "info drafts", "info sessions",
    "info adapters", "goto event 60", "info requests", "info row 1", "info block 3", "info block 17",
    "info block 99999", "info row x", "info nothing", "break preempted", "c", "info breakpoints",
    "info queue", "decide", "watch block 3", "watch row 1", "c", "c", "rc", "disable 1", "rc", "enable 1",
    "delete 2", "c",
    "break free_blocks < 4 and waiting >= 1", "rc", "rc", "break row 0 tokens > 20", "c", "mark here", "diff",
    "goto 9", "diff here all", "diff 3 40 all", "last block 5", "last row 2", "last free_blocks",
    "print free_blocks",
    "print block 3", "goto r5", "next", "n", "rn", "request", "info request r5", "last request r5",
    "goto time 1.5", "goto 99999", "goto event 99999", "goto no-request", "break nothing < 3", "break step <",
    "break x", "watch 1 + 1", "print 1 + 1", "zzz", "in", "help break", "help", "help fields", "difference",
    "delete", "goto end", "where", "rc", "break reason ~ blocks", "c", "b finished if request ~ r1", "c",
    "info findings", "print time_ms", "print step",
)  # fmt: skip


def told(session, line):
    blocks, error = session.try_run(line)
    return json.loads(msgspec.json.encode(blocks)), bool(error)


def plain(answer):
    """Return an answer in which the rows of `difference` tables are sorted, because their order may vary."""
    blocks, failed = answer
    for block in blocks:
        if block.get("title") == "difference":
            block["rows"] = sorted(block["rows"])
    return blocks, failed


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    busy_run(folder / "busy", 4, num_requests=14, mixed=True)
    write_broken(folder / "over_budget", "over_budget")
    found = {"busy": folder / "busy", "over_budget": folder / "over_budget", "vllm": VLLM}
    for name, log in found.items():
        write_debug_page(log, folder / f"{name}.html", Findings())
    return found, {name: folder / f"{name}.html" for name in found}


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


def open_page(browser, page):
    browser.call("Page.navigate", url=page.resolve().as_uri())
    browser.wait("Boolean(window.mmengineDebugger) && document.body.dataset.view !== undefined")


@needs_chromium
@pytest.mark.parametrize("name", ["busy", "over_budget", "vllm"])
def test_the_page_prints_what_the_terminal_prints(browser, logs, name):
    open_page(browser, logs[1][name])
    session = Session(open_debugger(logs[0][name], Findings()))
    for line in ("goto end", "goto start"):  # The page has read the whole log, so the session must too.
        session.run(line)
    got = browser.run(f"mmengineDebugger.answers({json.dumps(SCRIPT)})")
    for line, answer in zip(SCRIPT, got, strict=True):
        expected = plain(told(session, line))
        shown = plain((answer["blocks"], bool(answer["error"])))
        assert shown == expected, (line, answer, expected)
    assert not browser.errors


@needs_chromium
def test_random_commands_agree(browser, logs):
    open_page(browser, logs[1]["busy"])
    session = Session(open_debugger(logs[0]["busy"], Findings()))
    for line in ("goto end", "goto start"):
        session.run(line)
    rng = random.Random(7)
    words = [line for line in SCRIPT if not line.startswith(("help", "delete"))]
    lines = [rng.choice(words) for _ in range(150)]
    got = browser.run(f"mmengineDebugger.answers({json.dumps(lines)})")
    for line, answer in zip(lines, got, strict=True):
        assert plain((answer["blocks"], bool(answer["error"]))) == plain(told(session, line)), line


@needs_chromium
def test_hostile_texts_are_shown_as_texts(browser, logs, tmp_path):
    folder = rewrite(map(_hostile, LogReader(logs[0]["busy"])), tmp_path / HOSTILE.replace("/", "_")[:40])
    page = tmp_path / "page.html"
    write_debug_page(folder, page, Findings())
    open_page(browser, page)
    assert "owned" not in page.read_text() and "<img" not in page.read_text()
    browser.run(f"mmengineDebugger.run({json.dumps('break queued ' + HOSTILE)})")
    for line in ("goto event 3", "list 30", "info requests", "goto end", "rs", "info rows", "info blocks"):
        browser.run(f"mmengineDebugger.run({json.dumps(line)})")
    for name in ("constructor", "__proto__", "toString"):
        for line in (f"goto {name}", f"info request {name}", f"watch request {name}", f"next {name}", name):
            browser.run(f"mmengineDebugger.run({json.dumps(line)})")
    shown = browser.run("document.body.innerText")
    assert "onerror=document.title='owned'" in shown and browser.run("document.images.length") == 0
    assert "owned" not in browser.run("document.title")[:6]
    assert not browser.errors, "no script of the log ran, and no error was raised"


def _hostile(record):
    event = record.event
    name = getattr(event, "request_id", "")
    if name in ("r1", "r2"):
        event = msgspec.structs.replace(event, request_id=HOSTILE if name == "r1" else "constructor")
    if isinstance(event, ev.Failed):
        event = msgspec.structs.replace(event, error=HOSTILE)
    return msgspec.structs.replace(record, event=event)


@needs_chromium
@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1440, 900, False), (1440, 900, True), (390, 844, False)]
)
def test_it_is_used_with_the_keyboard(logs, width, height, dark):
    browser = Browser(width=width, height=height, dark=dark)
    try:
        open_page(browser, logs[1]["busy"])
        assert browser.run("document.documentElement.scrollWidth") <= width
        for count, key in enumerate("ssSi", 1):
            browser.key(key)
            browser.wait(f"Number(document.body.dataset.done) === {count}")
        assert "step 0, record 3" in browser.run("document.getElementById('place').textContent")
        browser.key("b")
        browser.call("Input.insertText", text="preempted")
        browser.call(
            "Input.dispatchKeyEvent", type="rawKeyDown", key="Enter", windowsVirtualKeyCode=13, text="\r"
        )
        browser.call("Input.dispatchKeyEvent", type="char", key="Enter", text="\r")
        browser.wait("Number(document.body.dataset.done) === 5")
        browser.key("Escape")
        browser.key("c")
        browser.wait("Number(document.body.dataset.done) === 6")
        assert "Preempted" in browser.run("document.getElementById('place').textContent")
        assert "no free blocks" in browser.run("document.querySelector('#records .here').textContent")
        browser.key("3")
        browser.wait("document.body.dataset.view === 'rows'")
        assert "since step" in browser.run("document.getElementById('shown').textContent")
        folder = Path(__file__).parents[2] / "build" / "browser"
        folder.mkdir(parents=True, exist_ok=True)
        browser.screenshot(folder / f"debugger_{width}{'_dark' * dark}.png")
        assert browser.run("document.documentElement.scrollWidth") <= width and not browser.errors
    finally:
        browser.close()


def test_the_page_is_one_file_for_small_logs(logs, tmp_path, monkeypatch):
    # The command runs in a new process, to test that writing the page imports the commands' modules.
    done = run_cli("log", "report", str(VLLM), "--debug", "-o", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    packed = re.search('<script id="data" type="text/plain">(.*?)</script>', text)
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert [name for name, *_ in data["commands"]] == list(COMMANDS)
    assert "http://" not in text and "https://" not in text and "src=" not in text
    assert "default-src 'none'; script-src 'sha256-" in text and "unsafe" not in text
    monkeypatch.setattr(collect, "MAX_RECORDS", 20)
    with pytest.raises(LogError, match="more than 20 records, .* --web"):
        write_debug_page(logs[0]["busy"], tmp_path / "none.html")

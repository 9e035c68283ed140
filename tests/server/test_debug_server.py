"""Tests `mmengine log debug --web`. Only the page at the server's secret address can run commands. No command
runs Python code.
"""

import http.client
import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import uvicorn

from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.commands.session import Session
from mmengine.server.debug.app import MAX_BODY_BYTES, DebugApp
from mmengine.server.debug.serve import _Server
from tests.cli.cli_process import call_cli
from tests.replay.browser import Browser, chromium
from tests.replay.runs import busy_run


@contextmanager
def serving(log, *more):
    """Run the command, and yield the page's (port, path)."""
    command = [sys.executable, "-m", "mmengine.cli.main", "log", "debug", str(log), *map(str, more), "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stdout.readline, "")
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:(\d+)(/\S+/)", line) for line in lines)))
        yield int(found[1]), found[2]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        process.stdout.close()


def ask(port, path, method="GET", body=None, **headers):
    """Return (status, headers, text). Underscores in the names of `headers` become hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def run(port, path, *lines, **headers):
    body = json.dumps({"lines": lines})
    return ask(port, f"{path}run", "POST", body, content_type="application/json", **headers)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("debug_server")
    busy_run(folder / "log", 4, num_requests=14)
    busy_run(folder / "other", 4, num_requests=14, num_blocks=20)
    return folder / "log", folder / "other"


@pytest.fixture(scope="module")
def server(logs):
    with serving(*logs) as found:
        yield found


def test_commands_run_in_one_session(server):
    port, path = server
    status, _, text = run(port, path, "goto 5", "where", "info rows", "zzz")
    goto, where, rows, wrong = json.loads(text)
    assert status == 200 and goto["blocks"][0]["lines"][1:] == where["blocks"][0]["lines"]
    assert where["blocks"][0]["lines"][0].startswith("step 5, record ")
    assert rows["blocks"][0]["title"] == "rows" and "no command 'zzz'" in wrong["error"]
    _, _, text = run(port, path, "where", "difference", "both where")
    again, difference, _ = json.loads(text)
    assert again == where and difference["blocks"][0]["title"] == "first difference"


def test_commands_run_before_the_page_is_served(logs):
    with serving(logs[0], "--ex", "goto 6", "--ex", "break preempted") as (port, path):
        where, stops = json.loads(run(port, path, "where", "info breakpoints")[2])
    assert where["blocks"][0]["lines"][0].startswith("step 6, record ")
    assert "event = Preempted" in str(stops["blocks"])


def test_ctrl_c_ends_a_running_command(logs):
    """Ctrl-C interrupts a command, because a command may take minutes for a long log."""
    session = Session(open_debugger(logs[0]), open_debugger(logs[1]))
    app = DebugApp(session, "log", 1)
    server = _Server(uvicorn.Config(app), app)
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    for line in ("goto end", "other goto end"):
        assert app._answers([line])[0].error == "interrupted at record 0"


def test_no_page_is_served_if_a_command_fails(logs):
    done = call_cli("log", "debug", logs[0], "--web", "--ex", "goto 99999")
    assert done.returncode == 1 and "step 99999 has no decisions" in done.stderr
    assert "127.0.0.1" not in done.stdout


def test_only_the_filter_language_is_accepted(server):
    for line in (
        "print __import__('os')",
        "break __import__('os').getpid()",
        "watch 1 + 1",
        "last view.step",
    ):
        (answer,) = json.loads(run(*server, line)[2])
        assert answer["error"] and not answer["blocks"], line


def test_other_hosts_origins_and_addresses_are_refused(server):
    port, path = server
    own = f"127.0.0.1:{port}"
    assert ask(port, path)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"{own}.evil.example", ""):
        assert ask(port, path, Host=host)[0] == 421, host
    for origin in ("http://evil.example", "null", f"https://{own}", f"http://{own}0"):
        assert run(port, path, "where", Origin=origin)[0] == 403, origin
    assert run(port, path, "where", Origin=f"http://{own}")[0] == 200
    for other in ("/", "/run", "/page.js", path[:-2] + "/", path[:-1], f"{path}../x", f"{path}nothing"):
        assert ask(port, other)[0] == 404, other
    assert ask(port, "/run", "POST", '{"lines": ["where"]}', content_type="application/json")[0] == 404


@pytest.mark.parametrize("name", ["Host", "Origin"])
def test_a_second_host_or_origin_is_refused(server, name):
    port, path = server
    for values in ((f"127.0.0.1:{port}", "evil.example"), ("evil.example", f"127.0.0.1:{port}")):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.putrequest("GET", path, skip_host=name == "Host")
        for value in values:
            connection.putheader(name, value if name == "Host" else f"http://{value}")
        connection.endheaders()
        assert connection.getresponse().status == {"Host": 421, "Origin": 403}[name]
        connection.close()


def test_bad_bodies_are_refused(server):
    port, path = server
    kind = {"content_type": "application/json"}
    assert ask(port, f"{path}run", "POST", '{"lines": ["where"]}', content_type="text/plain")[0] == 415
    for body in ("", "{}", '{"lines": 3}', '{"lines": [1]}', '{"lines": [], "x": 1}', "\0" * 9):
        assert ask(port, f"{path}run", "POST", body, **kind)[0] == 400, body
    assert run(port, path, *["where"] * 17)[0] == 400
    assert run(port, path, "x" * MAX_BODY_BYTES)[0] == 413
    (answer,) = json.loads(run(port, path, "x" * 5000)[2])
    assert "the limit is 4000" in answer["error"]
    assert ask(port, f"{path}run", "GET")[0] == 404 and ask(port, path, "DELETE")[0] == 404


def test_the_page_may_load_only_its_own_scripts(server):
    _, headers, page = ask(*server)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and headers["referrer-policy"] == "no-referrer"
    assert re.findall(r"<script[^>]*>", page) == ['<script src="page.js">'] and "<style" not in page
    assert " on" not in re.sub(r">[^<]*<", "><", page)


@pytest.mark.skipif(chromium() is None, reason="no chromium here (Debian: apt-get install chromium)")
def test_the_page_works_in_a_browser(logs, server):
    port, path = server
    browser = Browser(width=1200, height=800)
    try:
        browser.call("Page.navigate", url=f"http://127.0.0.1:{port}{path}")
        browser.wait("Boolean(window.mmengineDebugger) && document.body.dataset.view !== undefined")
        browser.run("mmengineDebugger.run('goto start')")
        for key in "ss":
            browser.key(key)
        browser.wait("Number(document.body.dataset.done) === 3")
        assert "step 1, record" in browser.run("document.getElementById('place').textContent")
        browser.run("mmengineDebugger.run('difference')")
        assert "first difference" in browser.run("document.getElementById('said').textContent")
        assert not browser.errors
    finally:
        browser.close()

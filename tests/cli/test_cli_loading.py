"""Tests the progress reports during loading and prefill: lines, or a bar in a terminal."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmengine import Engine
from mmengine.cli import loading
from mmengine.cli.loading import IMAGE, LINE_EVERY_S, PROMPT
from mmengine.config import EngineConfig
from mmengine.models.progress import report_weights, weights_reported_to


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_are_printed_at_intervals(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with loading.loading("a model") as progress:
        for part in range(5):
            progress(part * 10**9, 4 * 10**9)
            now[0] += LINE_EVERY_S / 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "mmengine: loading a model",
        "mmengine: 2,000 of 4,000 MB of weights are read",
        "mmengine: 4,000 of 4,000 MB of weights are read",
        "mmengine: loaded in 25.0 s",
    ]


def test_the_last_line_names_the_choices_for_the_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loading, "resident_text", lambda: "; 4.90 GB resident")
    built = SimpleNamespace(
        folder=tmp_path,
        device="cpu",
        dtype="bfloat16",
        spec=SimpleNamespace(weights_held=""),
        config=EngineConfig(num_blocks=2442, max_model_len=39_056),
        kv_bytes=4_481_000_000,
        free_bytes=13_800_000_000,
        num_threads=2,
    )
    with loading.loading("a model") as progress:
        progress(4_255_140_000, 4_255_140_000)
        progress(20_000_000, 20_000_000)  # The weights of a draft head.
        progress.loaded(built)
    last = capsys.readouterr().err.splitlines()[1]
    assert last.endswith(
        " s: 4.26 GB of weights; KV pool of 39,056 tokens (2,442 blocks, 4.48 GB when full); "
        "max_model_len 39,056; 2 threads; 13.80 GB of memory free; 4.90 GB resident"
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_resident_memory_is_this_process_s():
    held = bytearray(64 * 2**20)
    held[:: 2**12] = b"1" * (2**14)
    amount, unit, word = loading.resident_text().removeprefix("; ").split()
    size = float(amount) * {"GB": 1e9, "MB": 1e6}[unit]
    assert word == "resident" and len(held) < size < 2**36


def test_quick_loading_prints_nothing(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for seconds, said in ((LINE_EVERY_S - 1, 0), (LINE_EVERY_S, 2)):
        with loading.loading("a model", quiet=True) as progress:
            progress(1, 2)
            now[0] += seconds
            progress(2, 2)
        assert len(capsys.readouterr().err.splitlines()) == said


def test_an_engine_reports_sizes_and_prompt_progress():
    with Engine(config=EngineConfig(token_budget=16, max_num_seqs=4, spec="none")) as engine:
        assert engine.built.kv_bytes == engine.built.executor._runner._kv.blocks.nbytes
        assert engine.built.free_bytes > 0
        request_id = engine.submit(
            "one two three four five six seven " * 8, max_tokens=8, n=2, ignore_eos=True
        )
        (whole,) = {len(engine.requests.prepared(request_id).prompt_token_ids)}
        told = []
        while engine.has_work:
            told.append(engine.requests.prompt_tokens(request_id))
            engine.step()
    computed = [done for done, of in told if of == 2 * whole]
    assert computed[0] == 0 and computed == sorted(computed) and len(set(computed)) > 3
    assert max(computed) == 2 * whole


def test_a_terminal_has_a_bar_that_goes_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="broken"), loading.loading("a model") as progress:
        progress(1 * 10**9, 4 * 10**9)
        bar = progress._bar
        progress(2 * 10**9, 4 * 10**9)
        raise ValueError("broken")
    assert bar.finished is False and not bar.live.is_started
    assert bar.tasks[0].completed == 2 * 10**9 and "GB" in terminal.getvalue()


def test_a_prompt_bar_shows_a_large_image(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with loading.prompt_bar() as bar:
        seen = []
        for stage, done, whole in ((PROMPT, 4, 900), (IMAGE, 30, 100), (IMAGE, 60, 100), (PROMPT, 500, 900)):
            bar.stage = stage
            bar(done, whole)
            (task,) = bar._bar.tasks
            seen.append((task.description, task.completed, task.total))
    assert seen == [("prompt", 4, 900), ("image, %", 30, 100), ("image, %", 60, 100), ("prompt", 500, 900)]


def test_an_engine_reports_weight_loading():
    told = []
    with weights_reported_to(lambda *some: told.append(some)), Engine():
        pass
    whole = max(whole for _, whole in told)  # The model's size. The draft head is smaller.
    read = [num_bytes for num_bytes, of in told if of == whole]
    assert len(read) > 10 and read == sorted(read) and 0.9 < read[-1] / whole <= 1
    count = len(told)
    report_weights(1, 2)  # No listener is registered now.
    assert len(told) == count

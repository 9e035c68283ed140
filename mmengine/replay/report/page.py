"""Builds a single HTML file from the page's scripts and styles, and from a log's compressed columns.

A log is untrusted. Only the compressed data contains texts from the log, and the scripts show them as text,
never as HTML. The content security policy allows only the page's own scripts and styles, identified by hash.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.errors import LogError
from mmengine.events.codec import Record
from mmengine.replay.findings import Findings
from mmengine.replay.report.collect import STATES, Collector, collect, slots_of
from mmengine.version import __version__

SCRIPTS = ("data.js", "view.js", "lanes.js", "tracks.js", "panel.js", "input.js", "main.js")


def write_report(
    folder: Path,
    out: Path,
    progress: Callable[[Record], None] = lambda record: None,
    findings: Findings | None = None,
) -> tuple[int, int]:
    """Write the page. Return the number of steps and the number of requests on the page. `findings`: collects
    the log's decisions that break a rule. Raises LogError if the log contains no decided step. Also raises
    `verify`'s errors.
    """
    collected = collect(folder, progress, findings)
    num_steps, num_lanes = len(collected.steps["rows"]), len(collected.lanes.ids)
    if not num_steps or not num_lanes:
        raise LogError(f"the log in {folder} contains no step")
    out.write_text(page(_packed(collected, folder.name)), encoding="utf-8")
    return num_steps, num_lanes


def page(data: str) -> str:
    """Return the page's HTML. `data` (base64) is embedded in the page."""
    here = files("mmengine.replay.report")
    style = (here / "page.css").read_text(encoding="utf-8")
    code = "\n".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{code}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    html = (here / "page.html").read_text(encoding="utf-8")
    for name, text in (("POLICY", policy), ("STYLE", style), ("SCRIPT", script), ("DATA", data)):
        html = html.replace(f"<!--{name}-->", text) if name != "POLICY" else html.replace("{POLICY}", text)
    return html


def hash_of(text: str) -> str:
    """Return a text's hash in the format that a content security policy requires."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(collected: Collector, name: str) -> str:
    """Return gzip data in base64: the length of the head (int32), the head (JSON), and the columns (aligned
    to 8 bytes).
    """
    head, columns = _head(collected, name), _columns(collected)
    places, offset = {}, 0
    for key, column in columns.items():
        places[key] = {"type": column.dtype.name, "offset": offset, "length": len(column)}
        offset += -(-column.nbytes // 8) * 8
    text = json.dumps({**head, "columns": places}).encode()
    text += b" " * (-(len(text) + 4) % 8)
    body = b"".join(column.tobytes() + b"\0" * (-column.nbytes % 8) for column in columns.values())
    return base64.b64encode(gzip.compress(len(text).to_bytes(4, "little") + text + body, 6, mtime=0)).decode()


def _head(collected: Collector, name: str) -> dict[str, Any]:
    config = collected.log.config
    return {
        "name": name,
        "version": __version__,
        "states": STATES,
        "reasons": collected.reasons,
        "first_step": collected.first_step,
        "ids": collected.lanes.ids,
        "ends": collected.lanes.ends,
        "notes": collected.notes,
        "fingerprints": collected.log.started.fingerprints,
        "config": config.as_dict(),
        "torn": collected.log.torn is not None,
    }


def _columns(collected: Collector) -> dict[str, np.ndarray]:
    """Return the page's data by name: one array for each field, int32 or float64. Step numbers are relative
    to the log's first step. Segments are sorted by lane.
    """
    first, lanes = collected.first_step, collected.lanes
    num_steps = len(collected.steps["rows"])
    steps = {name: np.array(values, np.int64) for name, values in collected.steps.items()}
    time_ns, device_ns = steps.pop("time_ns"), steps.pop("device_ns")
    columns = {f"step_{name}": values.clip(-(2**31), 2**31 - 1) for name, values in steps.items()}
    columns["step_failed"] = np.zeros(num_steps, np.int32)
    columns["step_failed"][collected.failed] = 1
    lane = {name: np.array(values, np.int32) for name, values in lanes.columns.items()}
    lane["start"] = np.clip(lane["start"] - first, 0, num_steps)
    lane["end"] = np.where(lane["end"] < 0, num_steps, np.clip(lane["end"] - first, 0, num_steps))
    columns |= {f"lane_{name}": values for name, values in lane.items()}
    columns["lane_slot"] = slots_of(lane["start"], lane["end"])
    segments = {name: np.array(values, np.int32) for name, values in lanes.segments.items()}
    order = np.argsort(segments["lane"], kind="stable")
    columns |= {f"segment_{name}": values[order] for name, values in segments.items() if name != "lane"}
    columns["segment_step"] = np.clip(columns["segment_step"] - first, 0, num_steps)
    counts = np.bincount(segments["lane"], minlength=len(lanes.ids))
    columns["lane_segments"] = np.concatenate(([0], np.cumsum(counts)))
    chunks = np.concatenate(collected.chunks or [np.zeros((0, 3), np.int32)])
    chunks[:, 0] -= first
    columns |= {f"chunk_{name}": chunks[:, i] for i, name in enumerate(("step", "lane", "tokens"))}
    columns = {name: np.ascontiguousarray(values, np.int32) for name, values in columns.items()}
    columns["step_time_ms"] = (time_ns - time_ns[0]) / 1e6
    columns["step_device_ms"] = device_ns / 1e6
    return columns

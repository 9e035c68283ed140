"""Builds the debugger's page, and writes a page that contains a small log."""

import base64
import gzip
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.page.collect import PageData, encoded
from mmengine.replay.findings import Findings
from mmengine.replay.report.page import hash_of

HERE = "mmengine.replay.debug.page"
OWN_LOG = ("filters.js", "own_log.js", "own_commands.js")


def plain_page() -> tuple[str, str, str]:
    """Return three texts: the page, the script, and the style. To read a log, the script needs a backend: the
    files in OWN_LOG, or the debug server's remote.js. The page links to page.js and page.css.
    """
    page, script, style = (
        (files(HERE) / name).read_text("utf-8") for name in ("page.html", "ui.js", "page.css")
    )
    links = {
        "<!--POLICY-->\n": "",
        "<!--STYLE-->": '<link rel="stylesheet" href="page.css">',
        "<!--SCRIPT-->": '<script src="page.js"></script>',
    }
    for place, text in links.items():
        page = page.replace(place, text)
    return page, script, style


def write_debug_page(
    folder: Path,
    out: Path,
    findings: Findings | None = None,
    progress: Callable[[int], None] = lambda position: None,
) -> int:
    """Write a page that contains a small log, and return the log's number of records. `findings`: see
    CheckedLog in replay/checked_log.py. Raises LogError for a log that is too long, and `verify`'s errors.
    """
    collected = PageData(open_debugger(folder, findings))
    data = encoded(collected.collect(progress))
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    page, script, style = plain_page()
    parts = [(files(HERE) / name).read_text("utf-8") for name in OWN_LOG]
    script = "\n".join([script, *parts])
    script = f'(() => {{\n"use strict";\n{script}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    replaced = {
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="page.js"></script>': (
            f'<script id="data" type="text/plain">{packed}</script>\n<script>{script}</script>'
        ),
        '<meta charset="utf-8">': (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
        ),
    }
    for place, text in replaced.items():
        page = page.replace(place, text, 1)
    out.write_text(page, encoding="utf-8")
    return collected.num_records

"""Writes docs/reference/models.md from the rows of table.py."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HEAD = """# Architectures of transformers

mmengine serves an architecture in one of two ways. *Described* models have mmengine's own networks and
kernels ([models](../explanation/models.md)). All others run as transformers' modules on mmengine's paged
cache (`--model-impl transformers`), unless the plugin refuses them.

`make models` writes this page: it walks the generating architectures of the installed transformers, here
{version}. An architecture with a tiny random checkpoint runs through an engine in float32 on a CPU, and its
greedy tokens are compared with `generate`. Its log is verified.

* *equal*: all tokens are those of transformers, and the log verifies.
* *refused*: the model computes a prompt in one step, so the small token budget of this check refuses it.
* *in chunks*: at most 8 tokens in a step. *drafted*: suffix drafts.

{counts}
"""


class Row(NamedTuple):
    """An architecture's verdict. `cells`: what each check found; {} if no checkpoint was run."""

    architecture: str
    kind: str
    verdict: str
    reason: str
    cells: dict[str, str]


def write_page(path: Path, rows: Sequence[Row], checks: Sequence[str], version: str) -> None:
    """Write the page: rows that ran, then refused ones with their reason, then the others by name."""
    counts = Counter(row.verdict for row in rows)
    text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    lines = [HEAD.format(version=version, counts=f"{len(rows)} architectures: {text}."), "## Run\n"]
    lines += [f"| architecture | verdict | {' | '.join(checks)} |", "|---" * (len(checks) + 2) + "|"]
    for row in sorted((row for row in rows if row.cells), key=lambda row: row.architecture):
        cells = " | ".join(row.cells[check] for check in checks)
        lines.append(f"| {row.architecture} ({row.kind}) | {row.verdict} | {cells} |")
    lines += ["\n## Refused\n", "| architecture | reason |", "|---|---|"]
    for row in sorted(rows, key=lambda row: row.architecture):
        if row.verdict in ("refused", "broken") and not row.cells:
            lines.append(f"| {row.architecture} | {row.reason.replace('|', '/')} |")
    for verdict, title in (("described", "Described"), ("not run", "Not run")):
        names = sorted({row.architecture for row in rows if row.verdict == verdict})
        lines += [f"\n## {title}\n", ", ".join(names) or "None."]
        if verdict == "not run":
            lines.append("\nThe plugin does not refuse their classes; the checks at load decide.")
    path.write_text("\n".join(lines) + "\n")

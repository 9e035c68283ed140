"""Writes docs/reference/models.md from the rows of table.py."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.any_model.exceptions import BY_PARTS, NO_VIDEO, NOT_MIXED
from tests.any_model.rows import BROKEN, DESCRIBED, REFUSED, UNKNOWN, WORKS, Row

HEAD = """# Architectures of transformers

mmengine serves an architecture in one of two ways. *Described* models have mmengine's own networks and
kernels ([models](../explanation/models.md)). All others run as transformers' modules on mmengine's paged
cache (`--model-impl transformers`), unless the plugin `mmengine_transformers` refuses them.

`make models` writes this page: it walks the generating architectures of the installed transformers, here
{version}. {counts}
`mmengine model check NAME` says the same about a model of a hub, before its weights are downloaded.

## The plugin contract

Each row is a tiny random checkpoint with its tokenizer and processor. Engines in float32 on a CPU answer
prompts with and without images, and each column compares the answers with transformers' `generate`. Every log
must verify. `=`: equal. `-`: does not apply. `not run`: the last run of this row lacked the column. Anything
else is what happened instead.

| column | check |
|---|---|
| prompts | Token ids and pixel tensors equal the output of transformers' processor. |
| log-probabilities | The likeliest tokens' log-probabilities at each position of a prompt, to 2e-4. |
| log-probabilities in chunks | The same with 8 tokens in a step. |
| alone | One row at a time. |
| batched | All rows beside each other. |
| chunked | At most 8 tokens in a step, or one whole image where an image is not split. |
| cached | Each prompt comes twice; the second time it starts with cached blocks. |
| preempted | Rows are preempted and computed again. |
| drafted | Suffix drafts, of which some are accepted. |
| killed | The process gets SIGKILL in the middle; another one continues from the log. |
| decoding processes | The images are files, which a decoding process reads. |
| any order | Images at the start, at the end, side by side, swapped and twice. |
| too long | An image or a prompt above the token budget is refused, where it cannot be split. |
| bfloat16 | Each token is the likeliest of transformers' bfloat16 or float32 model, except for near ties. |

"""
VIDEOS = """
## Videos

The same checks for prompts with videos of 3 and 4 frames beside texts and images. Both sides get the same
frames with the same times. In the columns `videos killed` and `video decoding processes`, the videos are
files. In the column `video files`, the processor also chooses the frames.
"""
INTRO = {
    WORKS: (
        "Work, without a checkpoint of their own in the contract",
        "A random model with small sizes answers three texts in chunks, beside each other, with drafts. Its\n"
        "tokens equal the tokens of `generate`, and the log verifies.",
    ),
    REFUSED: ("Refused", "The plugin says so before weights are read, or after a probe at load."),
    BROKEN: ("Broken", "The plugin does not refuse these models, but their answers differ or fail."),
    UNKNOWN: (
        "Not checked",
        "transformers' default config gives no small model, or the model needs a processor for which the\n"
        "contract has no checkpoint. The plugin's checks at load decide.",
    ),
}


def write_page(
    path: Path, rows: Sequence[Row], checks: Sequence[str], video_checks: Sequence[str], version: str
) -> None:
    """Write the page: tables of the contract rows and of videos, then the other architectures by verdict."""
    ordered = sorted(set_of(rows), key=lambda row: (row.architecture, row.kind))
    counts = Counter(row.verdict for row in ordered)
    text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    lines = [HEAD.format(version=version, counts=f"{len(ordered)} rows: {text}.").rstrip() + "\n"]
    lines += _contract(ordered, checks)
    lines += _videos(ordered, video_checks)
    for verdict, (title, intro) in INTRO.items():
        lines += [f"\n## {title}\n", f"{intro}\n", *_others(ordered, verdict)]
    names = [row.architecture for row in ordered if row.verdict == DESCRIBED]
    lines += ["\n## Described\n", ", ".join(names)]
    path.write_text("\n".join(lines) + "\n")


def set_of(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to list. For an architecture with contract results (rows with `cells`), only these
    rows and a DESCRIBED row are listed.
    """
    ran = {row.architecture for row in rows if row.cells}
    return [row for row in rows if row.cells or row.verdict == DESCRIBED or row.architecture not in ran]


def _contract(rows: Sequence[Row], checks: Sequence[str]) -> Iterator[str]:
    yield from _table([row for row in rows if row.cells], checks)
    exceptions = [row for row in rows if row.cells and row.reason]
    if exceptions:
        yield "\nExceptions:\n"
        yield from (f"* {row.kind}: {row.reason}." for row in exceptions)


def _videos(rows: Sequence[Row], checks: Sequence[str]) -> Iterator[str]:
    yield VIDEOS
    yield from _table(
        [row for row in rows if any(row.cells.get(check, "-") != "-" for check in checks)], checks
    )
    refused = [(row.kind, NO_VIDEO[row.kind]) for row in rows if row.kind in NO_VIDEO]
    if refused:
        yield "\nVideos are refused:\n"
        yield from (f"* {kind}: {reason}." for kind, reason in refused)
    said = {
        "For prompts with both images and videos, only log-probabilities are compared, because the forward "
        "of transformers' model fails": BY_PARTS,
        "Prompts with both images and videos are not compared, because transformers' processor returns the "
        "pixels of only one kind": NOT_MIXED - BY_PARTS,
    }
    for text, kinds in said.items():
        if names := ", ".join(row.kind for row in rows if row.cells and row.kind in kinds):
            yield f"\n{text}: {names}."


def _table(rows: Sequence[Row], checks: Sequence[str]) -> Iterator[str]:
    yield f"| architecture | {' | '.join(checks)} |"
    yield "|---" * (len(checks) + 1) + "|"
    for row in rows:
        found = [row.cells.get(check, "not run") for check in checks]
        cells = ["=" if cell == "equal" else _plain(cell) for cell in found]
        yield f"| {row.architecture} ({row.kind}) | {' | '.join(cells)} |"


def _others(rows: Sequence[Row], verdict: str) -> Iterator[str]:
    found = [row for row in rows if row.verdict == verdict and not row.cells]
    if not found:
        yield "None."
    elif not any(row.reason for row in found):
        yield ", ".join(f"{row.architecture} ({row.kind})" for row in found)
    else:
        yield "| architecture | reason |"
        yield "|---|---|"
        yield from (f"| {row.architecture} ({row.kind}) | {_plain(row.reason)} |" for row in found)


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")

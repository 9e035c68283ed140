"""Writes an HTML page for a folder with several replicas' logs. The page shows the replicas, and each
request's path through them.

The page links to a report page for each log. Texts from logs are escaped, and the page's content security
policy allows no scripts.
"""

from html import escape
from pathlib import Path

from mmengine.errors import LogError
from mmengine.replay.queries.fleet import ReplicaPath, describe_path, logs_in, replica_paths
from mmengine.replay.report.page import write_report

MOST_SHOWN = 2_000  # Maximum number of requests on a page. Migrated requests come first.
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:75em}td,th{padding:.2em .8em;text-align:left;"
    "vertical-align:top;border-bottom:1px solid #ddd}ul{margin:0;padding-left:1em}.moved{background:#fff6df}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_fleet_report(folder: Path, out: Path) -> tuple[int, int]:
    """Write the pages. Return the number of logs and the number of answers. Raises LogError if no log
    contains a request.
    """
    logs = logs_in(folder)
    ways, broken = replica_paths(logs)
    if not ways:
        raise LogError(f"{folder} contains no log with a request")
    lives = "".join(_life(log, out, list(ways.values()), broken.get(log, "")) for log in logs)
    shown = sorted(ways.values(), key=lambda way: -len(way.hops))[:MOST_SHOWN]
    moved = sum(len(way.hops) > 1 for way in ways.values())
    computed, answered = (
        sum(counts) for counts in zip(*(_counts(way) for way in ways.values()), strict=True)
    )
    summary = (
        f"{len(logs)} replica logs, {len(ways)} answers, {moved} of them migrated; "
        f"{computed - answered} of {computed} tokens were computed twice."
    )
    left_out = f"<p>{len(ways) - len(shown)} more are not shown.</p>" if len(ways) > len(shown) else ""
    name = escape(folder.name)
    page = (
        '<!doctype html><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{name}</title><style>{_STYLE}</style><h1>{name}</h1><p>{summary}</p><h2>Replicas</h2>"
        f"<table><tr><th>log<th>answers<th>ended<th>unfinished<th></tr>{lives}</table>"
        "<h2>Requests</h2><table><tr><th>request<th>tokens<th>computed<th>path</tr>"
        f"{''.join(map(_row, shown))}</table>{left_out}"
    )
    out.write_text(page, encoding="utf-8")
    return len(logs), len(ways)


def _counts(way: ReplicaPath) -> tuple[int, int]:
    """Return how many answer tokens the replicas computed, in total and without repetitions."""
    return way.num_computed, way.num_tokens - way.hops[0].num_given


def _life(log: Path, out: Path, ways: list[ReplicaPath], why: str) -> str:
    hops = [hop for way in ways for hop in way.hops if hop.log == log.name]
    page, link = out.with_name(f"{out.stem}.{log.name}.html"), ""
    try:
        write_report(log, page)
        link = f'<a href="{escape(page.name, quote=True)}">steps</a>'
    except LogError as error:
        link = escape(why or str(error))
    ended = sum(bool(hop.end) for hop in hops)
    counts = f"<td>{len(hops)}<td>{ended}<td>{len(hops) - ended}"
    return f"<tr><td>{escape(log.name)}{counts}<td>{link}</tr>"


def _row(way: ReplicaPath) -> str:
    told = "".join(f"<li>{escape(sentence)}" for sentence in describe_path(way))
    kind = ' class="moved"' if len(way.hops) > 1 else ""
    computed, answered = _counts(way)
    return f"<tr{kind}><td>{escape(way.core_id)}<td>{way.num_tokens}<td>{computed}<td><ul>{told}</ul></tr>"

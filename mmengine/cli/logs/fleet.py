"""`mmengine log show`, `why` and `report` for a folder with the logs of several replicas."""

from pathlib import Path
from typing import TYPE_CHECKING

from mmengine.cli.logs.printing import clean, console, print_json, printable
from mmengine.errors import InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.queries.fleet import ReplicaPath


def is_fleet(folder: Path) -> bool:
    from mmengine.replay.queries.fleet import is_fleet  # Lazy, like all imports below, to show help quickly.

    return is_fleet(folder)


def refuse_step_views(folder: Path, others: bool) -> None:
    """Raise InvalidRequest if the user requested a view that needs a single log (`others`)."""
    if others:
        raise InvalidRequest(
            f"{folder} contains replicas' logs; to see steps, name one of them: {folder}/NAME"
        )


def show_requests(folder: Path, limit: int, json_output: bool) -> None:
    """Print a line for each choice (answer), with its path through the replicas' logs."""
    ways = list(_ways(folder).values())
    if json_output:
        for way in ways:
            print_json(_as_json(way))
        return
    from rich.table import Table

    table = Table("request", "went to", "tokens", "computed", "end")
    for way in ways[-limit:]:
        places = " → ".join(hop.log for hop in way.hops)
        counts = str(way.num_tokens), str(way.num_computed)
        table.add_row(clean(way.core_id), clean(places), *counts, clean(way.end or "unfinished"))
    out = console()
    out.print(table)
    moved = sum(len(way.hops) > 1 for way in ways)
    twice = sum(way.num_computed - way.num_tokens + way.hops[0].num_given for way in ways)
    out.print(
        f"{len(ways)} answers, {moved} of them migrated; {max(0, twice)} tokens were computed twice",
        markup=False,
    )


def print_path(folder: Path, request_id: str, json_output: bool) -> list[Path]:
    """Print the path of a request through the logs, and return the logs that contain it. Raises LogError if
    no log contains it.
    """
    from mmengine.replay.queries.fleet import describe_path
    from mmengine.replay.queries.request_names import matching_ids, no_request

    ways = _ways(folder)
    found = [ways[name] for name in matching_ids(ways, request_id)]
    if not found:
        raise no_request(folder, list(ways), request_id)
    for way in found:
        if json_output:
            print_json(_as_json(way))
            continue
        print(printable(way.core_id))
        for sentence in describe_path(way):
            print(f"  {printable(sentence, 1000)}")
    return [folder / name for name in dict.fromkeys(hop.log for way in found for hop in way.hops)]


def write_page(folder: Path, out: Path, json_output: bool) -> None:
    """Write a page for the fleet to `out`. Each log that has steps gets a page in the same folder."""
    from mmengine.replay.report.fleet_page import write_fleet_report

    num_logs, num_requests = write_fleet_report(folder, out)
    if json_output:
        print_json({"page": str(out), "logs": num_logs, "requests": num_requests})
    else:
        print(f"{out}: {num_requests} answers over {num_logs} logs, with a page for each log beside it")


def _ways(folder: Path) -> "dict[str, ReplicaPath]":
    import sys

    from mmengine.replay.queries.fleet import logs_in, replica_paths

    ways, broken = replica_paths(logs_in(folder))
    for log, why in broken.items():
        print(f"mmengine: {log.name} is left out: {printable(why)}", file=sys.stderr)
    return ways


def _as_json(way: "ReplicaPath") -> dict[str, object]:
    import msgspec

    counts = {"num_tokens": way.num_tokens, "num_computed": way.num_computed, "end": way.end}
    return {**msgspec.to_builtins(way), **counts}

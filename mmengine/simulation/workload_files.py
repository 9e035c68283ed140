"""Reads a workload from a file, and recognises the file's format."""

from dataclasses import replace
from pathlib import Path

import msgspec

from mmengine.errors import InvalidRequest
from mmengine.simulation.bounded_files import decode, existing, lines
from mmengine.simulation.scenario import read_requests, read_scenario
from mmengine.simulation.traces import read_azure, read_mooncake, read_servegen
from mmengine.simulation.workload import Workload

_TRACES = {"azure": read_azure, "mooncake": read_mooncake, "servegen": read_servegen}
FORMATS = ("auto", "scenario", *_TRACES)
# Maps a field to the only format that has this field.
_MARKS = {"hash_ids": "mooncake", "text_tokens": "servegen", "prompt": "scenario"}


def load_workload(path: Path, form: str = "auto", limit: int | None = None) -> Workload:
    """Read at most `limit` requests from a file. `form`: an entry in FORMATS; "auto" recognises the format
    from the file's name and first line. Raises InvalidRequest for an invalid file.
    """
    existing(path)
    if form == "auto":
        form = _guess(path)
    if form in _TRACES:
        workload = _TRACES[form](path, limit)
    elif path.suffix == ".json":
        workload = read_scenario(path)
        if limit is not None:
            workload = replace(workload, requests=workload.requests[:limit], expect=None)
    else:
        workload = read_requests(path, limit)
    if not workload.requests:
        raise InvalidRequest(f"{path} holds no request")
    return workload


def _guess(path: Path) -> str:
    names = path.suffixes
    if names[-1:] == [".json"]:
        return "scenario"
    if ".csv" in names[-2:]:
        return "azure"
    for _, line in lines(path, 1):
        first = decode(line, dict[str, msgspec.Raw], f"{path}, line 1")
        for mark, form in _MARKS.items():
            if mark in first:
                return form
    raise InvalidRequest(f"the format of {path} cannot be recognized; set it with --format")

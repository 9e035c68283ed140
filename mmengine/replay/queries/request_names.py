"""Finds requests in a log by an id that a client knows."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.call_ids import call_id
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.envelopes import OWNER, client_ids

MAX_NEAR = 5  # Maximum number of similar ids in an error message.
MAX_COMPARED = 100_000  # Maximum number of ids that are compared with an unknown id.
_PART = re.compile(r"(-\d+)?(/\d+)?")  # The index of a prompt in an API call, and the index of a choice.
_PREFIXES = (
    *("chatcmpl-", "cmpl-", "resp_", "msg_"),
    *("rs_", "fc_", "ctc_"),  # Items in a response.
    *("embd-", "pool-", "rerank-", "score-"),
)
_ITEM = re.compile(r"_\d+$")  # The index of an item in a response.
_CALL = re.compile(r"(call|toolu)_([0-9a-f]{24})")  # The id of a tool call.
_CHOICE = re.compile(r"(.*)/(\d{1,9})", re.DOTALL)
MAX_CALLS = 64  # Maximum number of tool calls per answer that are compared with an id.


def matching_ids(names: Iterable[str], given: str) -> list[str]:
    """Return the ids among `names` that belong to `given`: the id itself, or else the ids of its prompts and
    choices.

    `given` may have the prefix of an API (`chatcmpl-`, `resp_`, `embd-`, `batch_req_`). A server's ids begin
    with the hash of the API key, which may be missing in `given`. If `given` is a tool call's id, the result
    contains the request whose answer contains the call.
    """
    names = list(dict.fromkeys(names))
    for wanted in _meant(given):
        if wanted in names:
            return [wanted]
        found = [name for name in names if _belongs(name, wanted)]
        if found:
            return found
    if call := _CALL.fullmatch(given):
        return [name for name in names if _makes_call(name, f"call_{call[2]}")]
    return []


def find_requests(folder: Path, given: str) -> list[str]:
    """Return the ids in the log that belong to `given`, in arrival order. `given` may be any id that a client
    knows (see `client_ids`). If no request matches, raises LogError with similar ids. Also raises
    CheckedLog's errors.
    """
    log = CheckedLog(folder)
    requests = log.first_state().requests
    names = dict.fromkeys(requests)
    clients = {name: client_ids(name, each.request.envelope) for name, each in requests.items()}
    for record in log:
        match record.event:
            case ev.Queued(request_id=name, envelope=envelope):
                names[name] = None
                if ids := client_ids(name, envelope):
                    clients[name] = ids
            case ev.Appended(request_id=name):
                names[name] = None
            case ev.Finished(request_id=name, reason="rejected"):
                names[name] = None
    if found := matching_ids(names, given):
        return found
    if found := [name for name, ids in clients.items() if given in ids]:
        return found
    raise no_request(folder, [*names, *chain.from_iterable(clients.values())], given)


def no_request(folder: Path, names: list[str], given: str) -> LogError:
    """Return the error for an id that matches none of `names`."""
    if _CALL.fullmatch(given):
        return LogError(
            f"no request in {folder} has made this tool call; mmengine log show {folder} lists the requests"
        )
    near = _near(names[-MAX_COMPARED:], given)
    advice = f"similar ids: {', '.join(near)}; " if near else ""
    return LogError(
        f"no request in {folder} has this id; {advice}mmengine log show {folder} lists the requests"
    )


def _meant(given: str) -> list[str]:
    """Return the log's ids to which `given` may refer, without the hash of the API key."""
    found = [given]
    for prefix in _PREFIXES:
        if given.startswith(prefix):
            rest = given.removeprefix(prefix)
            # An item's id ends with its index in the response.
            found += [rest, _ITEM.sub("", rest)]
    if given.startswith("batch_req_"):
        found.append(f"batch_{given.removeprefix('batch_req_')}")
    return [name for name in dict.fromkeys(found) if name]


def _belongs(name: str, wanted: str) -> bool:
    """Return whether `name` is the id `wanted`, or the id of a prompt or a choice in the API call
    `wanted`. `name` may begin with the hash of an API key.
    """
    owner = OWNER.match(name)
    for own in (name, name[owner.end() :] if owner else name):
        if own.startswith(wanted) and _PART.fullmatch(own[len(wanted) :]):
            return True
    return False


def _makes_call(name: str, wanted: str) -> bool:
    """Return whether `wanted` is the id of a tool call in the answer to the request `name`. Only the first
    MAX_CALLS calls are compared.
    """
    owner = OWNER.match(name)
    own = name[owner.end() :] if owner else name
    answers = [(own, 0)]
    if choice := _CHOICE.fullmatch(own):
        answers.append((choice[1], int(choice[2])))
    return any(call_id(*answer, index) == wanted for answer in answers for index in range(MAX_CALLS))


def _near(names: list[str], given: str) -> list[str]:
    wanted = _meant(given)[-1][:256]
    part = [name for name in names if len(wanted) >= 4 and wanted in name]
    return list(dict.fromkeys([*part, *get_close_matches(wanted, names, MAX_NEAR, 0.7)]))[:MAX_NEAR]

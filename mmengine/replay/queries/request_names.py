"""Finds a log's requests by the ids that clients know."""

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

MAX_NEAR = 5  # near ids that an error lists
MAX_COMPARED = 100_000  # ids that are compared with an unknown id
_PART = re.compile(r"(-\d+)?(/\d+)?")  # the number of a call's prompt, and of a choice among `n`
_PREFIXES = (
    *("chatcmpl-", "cmpl-", "resp_", "msg_"),
    *("rs_", "fc_", "ctc_"),  # a response's items
    *("embd-", "pool-", "rerank-", "score-"),
)
_ITEM = re.compile(r"_\d+$")  # the number of a response's item
_CALL = re.compile(r"(call|toolu)_([0-9a-f]{24})")  # the id of a tool call
_CHOICE = re.compile(r"(.*)/(\d{1,9})", re.DOTALL)
MAX_CALLS = 64  # calls per answer that are compared with a tool call's id


def matching_ids(names: Iterable[str], given: str) -> list[str]:
    """Return the ids among `names` that belong to `given`: the id itself, or its choices' and prompts' ids.

    `given` may have an API's prefix (`chatcmpl-`, `resp_`, `embd-`, `batch_req_`), and may lack the API key's
    hash, which is the beginning of a server's ids. The id of a tool call belongs to the answer with the call.
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
    """Return the ids in the log that belong to `given`, in the order of arrival. `given` may be any id that
    a client knows (see `client_ids`). Raises LogError, with near ids, if there are none, and `verify`'s
    errors.
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
    """Return the error for an id that none of `names` matches."""
    if _CALL.fullmatch(given):
        return LogError(
            f"no request in {folder} has made this tool call; mmengine log show {folder} lists the requests"
        )
    near = _near(names[-MAX_COMPARED:], given)
    advice = f"near ids: {', '.join(near)}; " if near else ""
    return LogError(
        f"no request in {folder} has this id; {advice}mmengine log show {folder} lists the requests"
    )


def _meant(given: str) -> list[str]:
    """Return the ids that `given` may stand for, as the log has them without a key's hash."""
    found = [given]
    for prefix in _PREFIXES:
        if given.startswith(prefix):
            rest = given.removeprefix(prefix)
            found += [rest, _ITEM.sub("", rest)]  # an item of a response has its number at the end
    if given.startswith("batch_req_"):
        found.append(f"batch_{given.removeprefix('batch_req_')}")
    return [name for name in dict.fromkeys(found) if name]


def _belongs(name: str, wanted: str) -> bool:
    """Return whether `name` is `wanted`, after a key's hash, or one of its prompts or choices."""
    owner = OWNER.match(name)
    for own in (name, name[owner.end() :] if owner else name):
        if own.startswith(wanted) and _PART.fullmatch(own[len(wanted) :]):
            return True
    return False


def _makes_call(name: str, wanted: str) -> bool:
    """Return whether `wanted` is the id of one of the first MAX_CALLS calls in the answer to `name`."""
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

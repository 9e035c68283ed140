"""Lists as OpenAI's clients turn their pages: after=ID, limit=N, order=asc or desc."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from mmengine.errors import shown
from mmengine.server.asked import Json
from mmengine.server.errors import ApiError

_T = TypeVar("_T")


def page(
    request: Request,
    items: Sequence[_T],
    id_of: Callable[[_T], str],
    told: Callable[[_T], Json],
    *,
    most: int,
    by_itself: int,
) -> Json:
    """One page of items, which come the oldest first; `most` of one page, and how many where no limit is
    given. Raises ApiError."""
    asked = request.query_params
    limit = asked.get("limit") or str(by_itself)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise ApiError(400, f"limit must lie in 1 to {most}, not {shown(limit)}", "limit")
    order = asked.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, not {shown(order)}", "order")
    ids = [id_of(item) for item in items]
    if order == "desc":
        items, ids = items[::-1], ids[::-1]
    begin = 0
    if after := asked.get("after"):
        if after not in ids:
            raise ApiError(400, f"after, {shown(after)}, names nothing that is in this list", "after")
        begin = ids.index(after) + 1
    end = begin + int(limit)
    found = items[begin:end]
    return {
        "object": "list",
        "data": [told(item) for item in found],
        "first_id": id_of(found[0]) if found else None,
        "last_id": id_of(found[-1]) if found else None,
        "has_more": end < len(items),
    }

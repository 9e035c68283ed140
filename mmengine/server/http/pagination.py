"""Splits lists into pages. Clients select a page with OpenAI's query parameters: after=ID, limit=N, order=asc
or desc.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from mmengine.errors import ErrorCode, FieldPath, shown
from mmengine.server.http.errors import ApiError, Json

_T = TypeVar("_T")


def page(
    request: Request,
    items: Sequence[_T],
    id_of: Callable[[_T], str],
    to_json: Callable[[_T], Json],
    *,
    max_limit: int,
    default_limit: int,
    position_of: Callable[[str], int | None] | None = None,
) -> Json:
    """Return the page of `items` that the query selects. `items` are sorted from oldest to newest.

    `max_limit` and `default_limit` are numbers of items per page. `position_of` maps an id to a number that
    grows in creation order. The id may belong to a deleted item, so a client can continue after a deleted
    item. Raises ApiError.
    """
    query = request.query_params
    limit = query.get("limit") or str(default_limit)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= max_limit):
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"limit must be 1 to {max_limit}, not {shown(limit)}",
            FieldPath("limit"),
        )
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"order must be asc or desc, not {shown(order)}", FieldPath("order")
        )
    if position_of is None:
        position_of = {id_of(item): place for place, item in enumerate(items)}.get
    if after := query.get("after"):
        begin = position_of(after)
        if begin is None:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"after={shown(after)} is not an id in this list",
                FieldPath("after"),
            )
        places = [position_of(id_of(item)) or 0 for item in items]
        items = [
            item
            for item, place in zip(items, places, strict=True)
            if (place < begin if order == "desc" else place > begin)
        ]
    if order == "desc":
        items = items[::-1]
    found = items[: int(limit)]
    return {
        "object": "list",
        "data": [to_json(item) for item in found],
        "first_id": id_of(found[0]) if found else None,
        "last_id": id_of(found[-1]) if found else None,
        "has_more": len(found) < len(items),
    }

"""Lists as OpenAI's clients turn their pages: after=ID, limit=N, order=asc or desc."""

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
    told: Callable[[_T], Json],
    *,
    most: int,
    by_itself: int,
    place_of: Callable[[str], int | None] | None = None,
) -> Json:
    """One page of items, which come the oldest first; `most` of one page, and how many where no limit is
    given. `place_of`: a number by an id, larger for later ones, also of items that are gone. Raises
    ApiError."""
    asked = request.query_params
    limit = asked.get("limit") or str(by_itself)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"limit must lie in 1 to {most}, not {shown(limit)}", FieldPath("limit")
        )
    order = asked.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"order must be asc or desc, not {shown(order)}", FieldPath("order")
        )
    if place_of is None:
        place_of = {id_of(item): place for place, item in enumerate(items)}.get
    if after := asked.get("after"):
        begin = place_of(after)
        if begin is None:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"after, {shown(after)}, names nothing that is in this list",
                FieldPath("after"),
            )
        places = [place_of(id_of(item)) or 0 for item in items]
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
        "data": [told(item) for item in found],
        "first_id": id_of(found[0]) if found else None,
        "last_id": id_of(found[-1]) if found else None,
        "has_more": len(found) < len(items),
    }

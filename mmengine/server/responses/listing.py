"""Lists as OpenAI's API pages them."""

from collections.abc import Mapping, Sequence

import msgspec

from mmengine.errors import shown
from mmengine.server.asked import Json
from mmengine.server.errors import ApiError

MAX_LISTED = 100  # items of one page
_LISTED = 20


def page(items: Sequence[Json], asked: Mapping[str, str]) -> bytes:
    """What `asked` (limit, order, after) names of items, the oldest first, each of which has an id. Raises
    ApiError."""
    limit, order = asked.get("limit", str(_LISTED)), asked.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
        raise ApiError(400, f"limit must lie in 1 to {MAX_LISTED}, not {shown(limit)}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, not {shown(order)}", "order")
    found = list(items) if order == "asc" else list(items)[::-1]
    if (after := asked.get("after")) is not None:
        places = [place for place, item in enumerate(found) if item.get("id") == after]
        if not places:
            raise ApiError(400, f"there is no item {shown(after)} to list those behind", "after")
        found = found[places[0] + 1 :]
    some = found[: int(limit)]
    said = {
        "object": "list",
        "data": some,
        "first_id": some[0].get("id") if some else None,
        "last_id": some[-1].get("id") if some else None,
        "has_more": len(found) > len(some),
    }
    return msgspec.json.encode(said)

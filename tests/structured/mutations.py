"""Make slightly wrong schemas: parts of real schemas are dropped, duplicated, or replaced."""

import copy
import random
from typing import Any

ODD = (
    True,
    False,
    None,
    0,
    -1,
    1.5,
    2**70,
    "",
    "#",
    "#/properties",
    "(",
    "[a-z]{1,9999}",
    [],
    {},
    [{}],
    ["a"],
)
Place = tuple[Any, Any]  # (A dict or list, a key or index in it).


def places(schema: Any) -> list[Place]:
    found: list[Place] = []
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            waiting.append(each[key])
    return found


def mutated(schema: Any, others: list[Any], source: random.Random) -> Any:
    """Return a copy of `schema` with one to three changes. New parts come from the schema itself and from
    `others`.
    """
    schema = copy.deepcopy(schema)
    for _ in range(source.randint(1, 3)):
        found = places(schema)
        if not found:
            return schema
        inside, key = source.choice(found)
        kind = source.choice(["drop", "double", "odd", "other", "own", "key"])
        if kind == "drop":
            del inside[key]
        elif kind == "double" and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[key]))
        elif kind == "double":
            inside[f"{key}2"] = copy.deepcopy(inside[key])
        elif kind == "key" and isinstance(inside, dict):
            other, name = source.choice(places(source.choice(others)) or [(inside, key)])
            if isinstance(name, str):
                inside[name] = copy.deepcopy(other[name])
        elif kind == "odd":
            inside[key] = copy.deepcopy(source.choice(ODD))
        else:
            other, name = source.choice(found if kind == "own" else places(source.choice(others)) or found)
            inside[key] = copy.deepcopy(other[name])
    return schema

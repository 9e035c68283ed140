"""Draw random schemas with valid instances, for tests of generated texts.

`cases()` draws a Case: a schema with supported keywords, and a strategy for valid instances. An
instance's keys are in the schema's order. Each schema has a short valid text.
"""

from dataclasses import dataclass

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NAMES = ("id", "name", "größe", "价格", "a b", "it's", 'say "hi"', "x/y~z", "back\\slash", "items", "next")
PATTERNS = (
    ("^[a-z]{2,5}$", st.text("abcxyz", min_size=2, max_size=5)),
    ("^(red|green|blue)$", st.sampled_from(["red", "green", "blue"])),
    (r"^\d{4}-\d{2}$", st.from_regex(r"[0-9]{4}-[0-9]{2}", fullmatch=True)),
    ("-", st.sampled_from(["-", "a-b", "--"])),
    ('^[^"]{1,3}$', st.text("ab é", min_size=1, max_size=3)),
)
FORMATS = (
    ("date", st.dates().map(lambda day: day.isoformat())),
    ("time", st.sampled_from(["12:00:00Z", "23:59:59.5+01:00"])),
    ("date-time", st.sampled_from(["2024-02-29T12:00:00Z", "1999-12-31T23:59:59.25-08:00"])),
    ("uuid", st.uuids().map(str)),
    ("ipv4", st.ip_addresses(v=4).map(str)),
    ("ipv6", st.ip_addresses(v=6).map(str)),
    ("email", st.sampled_from(["a@b.de", "first.last+tag@mail.example.org"])),
    ("hostname", st.sampled_from(["localhost", "a-b.example.com"])),
    ("duration", st.sampled_from(["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P2W"])),
)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=6)


@dataclass(frozen=True)
class Case:
    schema: dict
    instances: SearchStrategy


@st.composite
def scalars(draw: st.DrawFn) -> Case:
    kind = draw(
        st.sampled_from(
            ["null", "boolean", "integer", "number", "string", "pattern", "format", "enum", "const"]
        )
    )
    if kind in ("null", "boolean"):
        return Case({"type": kind}, st.none() if kind == "null" else st.booleans())
    if kind == "integer":
        low, step = draw(st.integers(-1000, 1000)), draw(st.sampled_from([1, 1, 3, 10]))
        high = low + draw(st.integers(step, 500))
        schema = {"type": "integer", "minimum": low, "maximum": high}
        if step > 1:
            schema["multipleOf"] = step
        return Case(schema, st.integers(-(-low // step), high // step).map(lambda k: k * step))
    if kind == "number":
        low = draw(st.integers(-2000, 2000))
        high = low + draw(st.integers(1, 3000))
        schema = {"type": "number", "minimum": low / 100, "maximum": high / 100}
        return Case(schema, st.integers(low, high).map(lambda k: k / 100))
    if kind == "string":
        low = draw(st.integers(0, 3))
        high = low + draw(st.integers(0, 5))
        letters = st.characters(codec="utf-8", exclude_characters="\x7f")
        return Case(
            {"type": "string", "minLength": low, "maxLength": high},
            st.text(letters, min_size=low, max_size=high),
        )
    if kind in ("pattern", "format"):
        value, texts = draw(st.sampled_from(PATTERNS if kind == "pattern" else FORMATS))
        return Case({"type": "string", kind: value}, texts)
    values = draw(
        st.lists(
            st.none() | st.booleans() | st.integers(-99, 99) | TEXT, min_size=1, max_size=5, unique_by=repr
        )
    )
    if kind == "const":
        return Case({"const": values[0]}, st.just(values[0]))
    return Case({"enum": values}, st.sampled_from(values))


@st.composite
def arrays(draw: st.DrawFn, parts: SearchStrategy[Case]) -> Case:
    items = draw(parts)
    low = draw(st.integers(0, 2))
    high = low + draw(st.integers(0, 2))
    schema = {"type": "array", "items": items.schema, "minItems": low, "maxItems": high}
    if draw(st.booleans()):
        return Case(schema, st.lists(items.instances, min_size=low, max_size=high))
    prefix = draw(st.lists(parts, min_size=1, max_size=3))
    schema = {"type": "array", "prefixItems": [case.schema for case in prefix], "items": False}
    schema["minItems"] = len(prefix)
    return Case(schema, st.tuples(*(case.instances for case in prefix)).map(list))


@st.composite
def objects(draw: st.DrawFn, parts: SearchStrategy[Case], tag: str | None = None) -> Case:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    cases = {name: draw(parts) for name in names}
    if tag is not None:
        cases = {"kind": Case({"const": tag}, st.just(tag)), **cases}
    required = [name for name in cases if name == "kind" or draw(st.booleans())]
    schema: dict = {"type": "object", "properties": {name: case.schema for name, case in cases.items()}}
    schema["required"] = required
    extra = draw(st.sampled_from(["closed", "open", "typed"]))
    if extra == "closed":
        schema["additionalProperties"] = False
    elif extra == "typed":
        schema["additionalProperties"] = {"type": "boolean"}

    @st.composite
    def instances(draw: st.DrawFn) -> dict:
        out = {n: draw(case.instances) for n, case in cases.items() if n in required or draw(st.booleans())}
        more = 0 if extra == "closed" else draw(st.integers(0, 2))
        return out | {f"other {at}": draw(st.booleans()) for at in range(more)}

    return Case(schema, instances())


@st.composite
def unions(draw: st.DrawFn, parts: SearchStrategy[Case]) -> Case:
    keyword = draw(st.sampled_from(["anyOf", "oneOf"]))
    if keyword == "anyOf":
        cases = draw(st.lists(parts, min_size=2, max_size=3))
    else:
        cases = [draw(objects(parts, tag)) for tag in ("cat", "dog")]
    return Case({keyword: [case.schema for case in cases]}, st.one_of([case.instances for case in cases]))


@st.composite
def merged(draw: st.DrawFn, parts: SearchStrategy[Case]) -> Case:
    """Draw an object schema that is split into two allOf branches."""
    whole = draw(objects(parts))
    names = list(whole.schema["properties"])
    halves = [
        {"properties": {n: whole.schema["properties"][n] for n in some}} for some in (names[:1], names[1:])
    ]
    rest = {key: value for key, value in whole.schema.items() if key != "properties"}
    if rest.pop("additionalProperties", None) is not None:
        return whole
    return Case({**rest, "allOf": halves}, whole.instances)


def _tree(items: Case) -> Case:
    """Return a recursive schema ($ref) of linked nodes; each node has a value from `items`."""
    node = {
        "type": "object",
        "properties": {
            "value": items.schema,
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }

    def chained(values: list) -> dict | None:
        out = None
        for value in reversed(values):
            out = {"value": value, "next": out}
        return out

    chains = st.lists(items.instances, min_size=1, max_size=3).map(chained)
    return Case({"$ref": "#/$defs/node", "$defs": {"node": node}}, chains)


def cases(max_leaves: int = 8) -> SearchStrategy[Case]:
    """Return a strategy for small random schemas."""
    nested = st.recursive(
        scalars(),
        lambda parts: arrays(parts) | objects(parts) | objects(parts) | unions(parts) | merged(parts),
        max_leaves=max_leaves,
    )
    return nested | scalars().map(_tree)


def random_schemas(count):
    """Return `count` random schemas. The schemas depend on the imported modules, because Hypothesis also
    draws constants that it finds in these modules.
    """
    found = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(cases())
    def collect(case):
        found.append(case.schema)

    collect()
    return found

"""Lists the JSON Schema drafts, with their URIs and the keywords that each draft defines."""

import re

UNSPECIFIED = 0  # The draft of a schema without `$schema`.
SIBLINGS_IGNORED = frozenset((3, 4, 6, 7))  # Drafts in which keywords beside a `$ref` are ignored.

_URI = re.compile(r"https?://json-schema\.org/draft[-/](0[3-7]|2019-09|2020-12)/(?:hyper-)?schema#?")
_NUMBERS = {"03": 3, "04": 4, "05": 4, "06": 6, "07": 7, "2019-09": 2019, "2020-12": 2020}
NAMES = {
    UNSPECIFIED: "draft 2020-12",
    **{at: f"draft-0{at}" for at in (3, 4, 6, 7)},
    2019: "draft 2019-09",
    2020: "draft 2020-12",
}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FIRST = words(
    "$schema $ref type enum title description default format pattern minimum maximum exclusiveMinimum "
    "exclusiveMaximum minLength maxLength minItems maxItems uniqueItems items additionalItems properties "
    "patternProperties additionalProperties required dependencies definitions $defs"
)
_FOURTH = _FIRST | words("multipleOf minProperties maxProperties allOf anyOf oneOf not")
_SIXTH = _FOURTH | words("$id const contains propertyNames examples")
_SEVENTH = _SIXTH | words("if then else readOnly writeOnly contentEncoding contentMediaType $comment")
_NINETEEN = _SEVENTH | words(
    "$anchor $recursiveRef $recursiveAnchor $vocabulary dependentRequired dependentSchemas unevaluatedItems "
    "unevaluatedProperties minContains maxContains contentSchema deprecated"
)
_TWENTY = (_NINETEEN - {"additionalItems", "$recursiveRef", "$recursiveAnchor"}) | words(
    "prefixItems $dynamicRef $dynamicAnchor"
)
KNOWN_IN = {  # Draft -> keywords.
    UNSPECIFIED: _TWENTY | {"additionalItems", "nullable", "discriminator"},
    3: _FIRST | {"id", "divisibleBy", "extends", "disallow"},
    4: _FOURTH | {"id"},
    6: _SIXTH,
    7: _SEVENTH,
    2019: _NINETEEN,
    2020: _TWENTY,
}
ALL_KEYWORDS = frozenset().union(*KNOWN_IN.values())
ANNOTATION_KEYWORDS = words(
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $vocabulary $comment $defs definitions title "
    "description default examples deprecated readOnly writeOnly contentEncoding contentMediaType "
    "contentSchema discriminator"
)


def draft_of(uri: object) -> int | None:
    """Return the draft whose metaschema has this URI, or None."""
    found = _URI.fullmatch(uri) if isinstance(uri, str) else None
    return _NUMBERS[found[1]] if found else None

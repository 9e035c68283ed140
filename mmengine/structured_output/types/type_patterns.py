"""Patterns for strings that Python types such as datetime can parse.

A pattern may match fewer strings than the type accepts, but never more.

A pattern for a whole string starts with ^ and ends with $. Patterns without ^ and $ are used in other
patterns. If a schema has a pattern and a `format`, a string must match both.
"""

import re
from datetime import date
from typing import Any

from mmengine.structured_output.json_schema.vocabulary.formats import FORMATS

Schema = dict[str, Any]  # A JSON Schema.
PLAIN_TYPES = ["string", "number", "boolean", "null"]  # JSON types whose values are hashable in Python.

BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"
BASE64URL = "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?$"
# Base64 of ASCII text: 4 characters stand for 3 bytes, and the highest bit in each byte is 0. The last two
# characters of the alphabet are left out, because they differ between base64 and base64url.
ASCII_IN_BASE64 = "^(?:[A-Za-f][A-HQ-Xg-nw-z0-3][ABEFIJMNQRUVYZcdghklopstwx014589][A-Za-z0-9])*$"
HEX = "^(?:[0-9a-f]{2})*$"
INTEGER_KEY = "^(?:0|-?[1-9][0-9]{0,17})$"
NUMBER_KEY = "^-?(?:0|[1-9][0-9]{0,9})(?:\\.[0-9]{1,5})?$"
# Six digits keep each value below the maximum of datetime.timedelta, which is 999,999,999 days.
SHORT_DURATION = "^P(?:[0-9]{1,6}[YMWD])*(?:T(?:[0-9]{1,6}[HMS])*)?$"
BYTE_SIZE = "^[0-9]{1,9}(?:[kmgt]i?b)?$"
CLOCK_DURATION = "^P(?:[0-9]{1,6}D)?(?:T(?:[0-9]{1,6}[HMS])*)?$"  # A duration in units with a fixed length.
NAIVE_TIME = "^(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?$"
NAIVE_DATETIME = f"^{FORMATS['date']}T{NAIVE_TIME.strip('^$')}$"

# URL parsers do not change host names that match these patterns: the names contain no punycode, and their
# last label cannot belong to an IPv4 address.
_LABEL = "[a-z0-9]{1,20}(?:-[a-z0-9]{1,20})?"
HOST = f"(?:{_LABEL}\\.){{0,3}}[a-z]{{2,20}}"
_CHARACTERS = "[A-Za-z0-9._~-]"
_PATH = f"(?:/{_CHARACTERS}{{0,200}}){{0,5}}"
_QUERY = f"(?:\\?{_CHARACTERS}{{1,100}}=[A-Za-z0-9._~-]{{0,100}})?"
_FRAGMENT = f"(?:#{_CHARACTERS}{{0,100}})?"
_PORT = "(?::[1-9][0-9]{0,3})?"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"
IPV6 = "(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}"
_LONG_DOMAIN = "(?:[a-z]{2,3}|[a-z]{6}|info|name)"  # Excludes reserved domains such as test and local.
EMAIL = f"[a-z0-9]{{1,20}}(?:[._+-][a-z0-9]{{1,20}}){{0,2}}@(?:{_LABEL}\\.){{1,3}}{_LONG_DOMAIN}"

# Formats that only pydantic defines -> patterns.
FORMAT_PATTERNS = {
    "base64": BASE64,
    "base64url": BASE64URL,
    "color": "^#[0-9a-f]{6}$",
    "email": f"^{EMAIL}$",
    "name-email": f"^{EMAIL}$",
    "fraction": "^-?[0-9]{1,9}/[1-9][0-9]{0,8}$",
    "ipv4network": f"^{IPV4}(?:/32)?$",
    "ipv6network": f"^{IPV6}(?:/128)?$",
    "ipv4interface": f"^{IPV4}/(?:3[0-2]|[12]?[0-9])$",
    "ipv6interface": f"^{IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])$",
    "ipvanyaddress": f"^(?:{IPV4}|{IPV6})$",
    "ipvanynetwork": f"^(?:{IPV4}|{IPV6})$",
    "ipvanyinterface": f"^(?:{IPV4}|{IPV6})$",
}
UNCHECKABLE = {
    "file-path": "a file that exists",
    "directory-path": "a folder that exists",
    "zoneinfo": "a time zone that this machine knows",
    "regex": "a regular expression",
}


_WIDE_CLASS = re.compile(r"\\[DSW]")
ASCII = "^[ -~]*$"


def ascii_where_classes_differ(schema: Schema) -> Schema:
    r"""Return a string schema, restricted to ASCII if its pattern has \D, \S or \W.

    Validating libraries include Unicode digits and letters in \d and \w, but JSON Schema does not.
    """
    if not _WIDE_CLASS.search(str(schema.get("pattern", ""))):
        return schema
    return {"allOf": [schema, {"type": "string", "pattern": ASCII}]}


def url(schemes: list[str] | None) -> str:
    """Return a pattern for absolute URLs with these schemes (default: https and http).

    pydantic leaves such a URL unchanged, except that it adds "/" after a host without a path.
    """
    names = "|".join(_plain(name) for name in schemes or ["https", "http"])
    port = "" if "file" in (schemes or ()) else _PORT
    return f"^(?:{names})://{HOST}{port}{_PATH}{_QUERY}{_FRAGMENT}$"


def _plain(scheme: str) -> str:
    return "".join("\\" + each if each in "+.-" else each for each in scheme)


def uuid(version: int) -> str:
    """Return a pattern for lower-case UUIDs of this version, with RFC 9562's variant."""
    return f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version:x}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"


def dates(first: date, last: date) -> str:
    """Return a pattern for dates (YYYY-MM-DD) from `first` to `last`.

    The pattern also matches dates that do not exist, such as February 31st. The schema's `format` excludes
    these dates.
    """
    return f"^(?:{'|'.join(_days(first, last))})$"


def _days(first: date, last: date) -> list[str]:
    days = "[0-9]{2}"
    if (first.year, first.month) == (last.year, last.month):
        return [f"{first.year:04}-{first.month:02}-{_number_range(first.day, last.day, 2)}"]
    if first.year == last.year:
        between = [(first.year, first.month + 1, last.month - 1)]
    else:
        between = [(first.year, first.month + 1, 12), (last.year, 1, last.month - 1)]
    found = [f"{first.year:04}-{first.month:02}-{_number_range(first.day, 31, 2)}"]
    found += [f"{y:04}-{_number_range(low, high, 2)}-{days}" for y, low, high in between if low <= high]
    found.append(f"{last.year:04}-{last.month:02}-{_number_range(1, last.day, 2)}")
    if last.year - first.year > 1:
        found.append(f"{_number_range(first.year + 1, last.year - 1, 4)}-{days}-{days}")
    return found


def _number_range(low: int, high: int, width: int) -> str:
    """Return a pattern for the numbers from `low` to `high`, written with `width` digits."""
    if width == 1:
        return f"[{low}-{high}]"
    unit = 10 ** (width - 1)
    rest = width - 1
    found = []
    for head in range(low // unit, high // unit + 1):
        start, end = max(low, head * unit) - head * unit, min(high, head * unit + unit - 1) - head * unit
        whole = (start, end) == (0, unit - 1)
        found.append(f"{head}{f'[0-9]{{{rest}}}' if whole else _number_range(start, end, rest)}")
    return f"(?:{'|'.join(found)})"

"""Patterns for the `format` values that are enforced. A pattern allows only texts that the format's RFC
allows.

Rare forms are excluded to keep the patterns small: leap seconds, quoted local parts in an email,
internationalized (xn--) host names, IPv6 zones and IPvFuture.
"""

YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
LEAP_YEAR = (
    r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])"  # years divisible by 4 but not by 100
    r"|(?:0[48]|[2468][048]|[13579][26])00)"  # years divisible by 400
)
MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
DATE = rf"(?:{YEAR}-{MONTH_DAY}|{LEAP_YEAR}-02-29)"
HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
TIME = rf"{HOUR_MINUTE}:[0-5]\d(?:\.\d{{1,6}})?(?:[zZ]|[+-]{HOUR_MINUTE})"

_HMS = r"T(?:\d{1,9}H(?:\d{1,9}M(?:\d{1,9}S)?)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"
_YMD = r"(?:\d{1,9}Y(?:\d{1,9}M(?:\d{1,9}D)?)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"
DURATION = rf"P(?:{_YMD}(?:{_HMS})?|{_HMS}|\d{{1,9}}W)"

# A label has letters, digits and hyphens, but no hyphen as first, third, fourth or last character.
_ALNUM = r"[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
_LABEL = (
    rf"(?:{_ALNUM}|{_ALNUM}{{2}}|{_ALNUM}{_INNER}{_ALNUM}|{_ALNUM}{_INNER}{_ALNUM}{{2}}"
    rf"|{_ALNUM}{_INNER}(?:{_ALNUM}-|{_ALNUM}{{2}}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})"
)
# Three labels (63 characters each) and two dots stay below the limit for a host name, 253 characters.
HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
EMAIL = rf"{_ATEXT}{{1,20}}(?:\.{_ATEXT}{{1,20}}){{0,2}}@{HOSTNAME}"

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H = r"[\dA-Fa-f]{1,4}"
_LS32 = rf"(?:{_H}:{_H}|{IPV4})"
IPV6 = (
    "(?:"
    + "|".join(
        [
            rf"(?:{_H}:){{6}}{_LS32}",
            rf"::(?:{_H}:){{5}}{_LS32}",
            rf"(?:{_H})?::(?:{_H}:){{4}}{_LS32}",
            rf"(?:(?:{_H}:){{0,1}}{_H})?::(?:{_H}:){{3}}{_LS32}",
            rf"(?:(?:{_H}:){{0,2}}{_H})?::(?:{_H}:){{2}}{_LS32}",
            rf"(?:(?:{_H}:){{0,3}}{_H})?::{_H}:{_LS32}",
            rf"(?:(?:{_H}:){{0,4}}{_H})?::{_LS32}",
            rf"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
            rf"(?:(?:{_H}:){{0,6}}{_H})?::",
        ]
    )
    + ")"
)

UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"

_PCT = r"%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PCT})"
_SEGMENTS = rf"(?:/{_PCHAR}*)*"
_USER = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_PCT})*@)?"
_HOST = rf"(?:\[{IPV6}\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_PCT})*)"
_HIER = rf"(?://{_USER}{_HOST}(?::\d*)?{_SEGMENTS}|/(?:{_PCHAR}+{_SEGMENTS})?|{_PCHAR}+{_SEGMENTS})"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_HIER})?{_TAIL}"

# Without a scheme the first segment must not contain a colon.
_NO_COLON = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PCT})"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*:"
_ROOTED = rf"(?://{_USER}{_HOST}(?::\d*)?{_SEGMENTS}|/(?:{_PCHAR}+{_SEGMENTS})?)"
_ROOTLESS = rf"(?:{_SCHEME}(?:{_PCHAR}+{_SEGMENTS})?|(?:{_NO_COLON}+{_SEGMENTS})?)"
URI_REFERENCE = rf"(?:(?:{_SCHEME})?{_ROOTED}|{_ROOTLESS}){_TAIL}"

_TOKEN = r"(?:[^~/]|~[01])"
JSON_POINTER = rf"(?:/{_TOKEN}*)*"
RELATIVE_JSON_POINTER = rf"(?:0|[1-9]\d*)(?:#|{JSON_POINTER})"

# RFC 6570: text with expressions in braces.
_NAME_CHAR = rf"(?:\w|{_PCT})"
_VARIABLE = rf"{_NAME_CHAR}(?:\.?{_NAME_CHAR})*(?::[1-9]\d{{0,3}}|\*)?"
_LITERAL = (
    r"(?:[!#$&-;=?-Z_a-z~\[\]\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\u{10000}-\u{EFFFD}]"
    rf"|{_PCT}|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})"
)
URI_TEMPLATE = rf"{_LITERAL}*"

FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": rf"{DATE}[tT]{TIME}",
    "duration": DURATION,
    "email": EMAIL,
    "hostname": HOSTNAME,
    "ipv4": IPV4,
    "ipv6": IPV6,
    "uuid": UUID,
    "uri": URI,
    "uri-reference": URI_REFERENCE,
    "uri-template": URI_TEMPLATE,
    # An international format uses the ASCII format's pattern.
    "iri": URI,
    "iri-reference": URI_REFERENCE,
    "idn-email": EMAIL,
    "idn-hostname": HOSTNAME,
    "json-pointer": JSON_POINTER,
    "relative-json-pointer": RELATIVE_JSON_POINTER,
}

# Formats whose patterns allow every text that the RFC allows. All other patterns allow fewer texts.
EXACT = frozenset(("date", "uuid", "ipv4"))

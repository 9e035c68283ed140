"""The terminals that `%import common` offers, with llguidance's definitions."""

_FLOAT = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?|[0-9]+[eE][+\-]?[0-9]+"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"[+\-]?(?:{_FLOAT})",
    "NUMBER": rf"[0-9]+|{_FLOAT}",
    "SIGNED_NUMBER": rf"[+\-]?(?:[0-9]+|{_FLOAT})",
    "ESCAPED_STRING": r"\"(?:[^\"\\]|\\.)*\"",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}

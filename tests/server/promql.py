"""Finds a PromQL query's series in the exported metrics. Supports only the dashboards' subset of PromQL."""

import re

from prometheus_client.parser import text_string_to_metric_families

_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)(=~|!~|!=|=)"([^"]*)"\s*')
_BY = re.compile(r"\bby \(([^)]*)\)")
_WORDS = {"sum", "avg", "min", "max", "rate", "by", "histogram_quantile", "le", "or", "vector", "count"}
OF_TARGETS = ("job", "instance")  # Labels that Prometheus adds.


def samples_of(text):
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def selectors(expr):
    """Return (name, [(label, operator, value)]) for each selector in a query. Raises ValueError for
    unsupported PromQL.
    """
    found = []
    for name, inside in _SELECTOR.findall(expr):
        matchers = [_MATCHER.fullmatch(each) for each in inside.split(",") if each]
        if not all(matchers):
            raise ValueError(f"cannot read {{{inside}}}")
        found.append((name, [each.groups() for each in matchers]))
    rest = _BY.sub("by", re.sub(r"\[[^]]*\]", "", _SELECTOR.sub("", expr)))
    strange = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", rest)) - _WORDS
    if strange or not found:
        raise ValueError(f"{expr} names {sorted(strange) or 'nothing'}")
    return found


def _fits(labels, label, operator, value):
    if "$" in value:  # A dashboard variable: matches all values.
        return label in OF_TARGETS or label in labels
    given, is_pattern = labels.get(label, ""), "~" in operator
    same = bool(re.fullmatch(value, given)) if is_pattern else given == value
    return same != operator.startswith("!")


def lacking(expr, samples):
    """Return the series and labels in a query that are missing in `samples`."""
    found, missing = {}, []
    for name, matchers in selectors(expr):
        found[name] = [
            each
            for each in samples
            if each.name == name and all(_fits(each.labels, *one) for one in matchers)
        ]
        if not found[name]:
            missing.append(name)
    grouped = {label.strip() for group in _BY.findall(expr) for label in group.split(",")} - set(OF_TARGETS)
    for name, those in found.items():
        missing += [f"{name} by {label}" for label in grouped if those and label not in those[0].labels]
    return missing

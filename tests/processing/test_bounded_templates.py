"""Tests of chat templates that try to take memory without bound."""

import jinja2
import pytest

from mmengine.processing.chat.environment import chat_environment

TOO_LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ 10**(10**9) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%s%%0999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "{{ '{a:>{w}}'.format_map({'a': 1, 'w': 999999999}) }}",
    "{{ 'a'.center(999999999) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.zfill(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a\nb' | indent(999999999) }}",
    "{{ [1] | batch(999999999, 'x') | list }}",
    "{{ [1] | slice(999999999) | list }}",
    "{{ (1).to_bytes(999999999, 'big') }}",
    "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "{{ ('a' * 99999).join(['b'] * 9999) }}",
    "{{ (['b'] * 9999) | join('a' * 99999) }}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
]


@pytest.mark.parametrize("source", TOO_LARGE)
def test_an_operation_that_is_too_large_is_refused(source):
    with pytest.raises(jinja2.TemplateError, match="too large"):
        chat_environment().from_string(source).render()


def test_lipsum_is_unknown():
    with pytest.raises(jinja2.TemplateError, match="lipsum"):
        chat_environment().from_string("{{ lipsum(10**3) }}").render()


def test_usual_operations_have_their_results():
    source = (
        "{{ 3 * 4 }} {{ 7 % 2 }} {{ 'a' * 3 }} {{ 'x=%s' % 'y' }} {{ 'a' ~ 1 ~ none }} {{ [1] + [2] }} "
        "{{ 'b-c'.replace('-', '+') }} {{ ['d', 'e'] | join(', ') }} {{ '{} {:>3}'.format('f', 2) }} "
        "{{ 'g'.center(3) }} {{ m | map(attribute='r') | join('/') }} {{ 'h\ni' | indent(2) }} {{ 2**8 }} "
        "{{ {'k': [1, 'é']} | tojson(indent=1) }} {{ ' l '.strip().split(',')[0] }} {{ m | length }}"
    )
    expected = (
        '12 1 aaa x=y a1None [1, 2] b+c d, e f   2  g  s/t h\n  i 256 {\n "k": [\n  1,\n  "é"\n ]\n} l 2'
    )
    assert chat_environment().from_string(source).render(m=[{"r": "s"}, {"r": "t"}]) == expected

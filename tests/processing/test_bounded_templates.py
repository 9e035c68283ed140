"""Tests the limits on the memory and time of chat templates."""

from itertools import count
from types import SimpleNamespace

import jinja2
import pytest

from mmengine.processing.chat import template_work
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
    "{{ ('a\\n' * 99999) | indent(9999) }}",
    "{{ 'a\\nb' | indent('x' * 9999999) }}",
    "{{ ('\\t' * 99999).expandtabs(9999) }}",
    "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "{{ ('a' * 9999).encode().replace('a'.encode(), ('b' * 9999).encode()) }}",
    "{{ ('a' * 99999).encode().join(['b'.encode()] * 9999) }}",
    "{{ ('a' * 999999).encode('punycode') }}",
    "{{ ('a' * 9999999).rfind('b' + 'a' * 999999) }}",
    "{{ ('a' * 9999999).strip('b' * 999999 + 'a') }}",
    "{{ ('a' * 9999999) | trim('b' * 999999 + 'a') }}",
    "{{ ('<!---->' * 99999) | striptags }}",
    "{{ ('a ' * 99999) | wordwrap(1) }}",
    "{{ ('http://a.b ' * 99999) | urlize }}",
    "{{ [1] | tojson(separators=('a' * 9999, ':')) }}",
    "{{ ([[1] * 999] * 99) | tojson(indent=9999) }}",
    "{{ strftime_now('%c' * 999) }}",
    "{{ ([['a']] * 9999) | sum(start=[]) }}",
    "{{ ('1' * 9999999) | int(base=2) }}",
    "{{ (1).from_bytes(('a' * 9999999).encode(), 'big') }}",
    "{{ [['a' * 9999] * 9999] | string }}",
    "{{ [['a' * 9999] * 9999] }}",
    "{% set m = {'a': ['b' * 9999] * 9999} %}{{ m | tojson }}",
    "{{ '%s' % ((['a' * 9999] * 9999),) }}",
    "{{ '{}'.format(['a' * 9999] * 9999) }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}",
    "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = (n.s, n.s) %}{% endfor %}",
    "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}",
    "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = namespace(a=n.s, b=n.s) %}{% endfor %}",
    "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}",
    "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set m = namespace() %}{% set m.a = n.s %}"
    "{% set m.b = n.s %}{% set n.s = m %}{% endfor %}{{ n.s }}",
]
LONG = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "{% for i in [[1] * 9] recursive %}{{ loop([[1] * 9] * 9) }}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list | length %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999) | select('odd') | list | length %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999) | max %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = messages | sort(attribute='role') %}{% endfor %}",
    "{% block a %}{% for i in range(9) %}{{ self.a() }}{% endfor %}{% endblock %}",
    "{% macro m() %}{% for i in range(9) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% macro n(k) %}{% if k %}{% call m() %}{{ n(k - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ n(99) }}",
]
MANY = [
    "{% set a = 'a' * 9999999 %}{% macro m() %}{% for i in range(999) %}{{ a }}{% endfor %}{% endmacro %}"
    "{{ m() | length }}",
    "{% set a = 'a' * 9999999 %}{% for i in range(999) %}{% set b = a[1:] %}{% endfor %}",
    "{% set a = 'a' * 9999999 %}{% for i in range(999) %}{% set b = a.upper() %}{% endfor %}",
    "{% set a = 'a' * 9999999 %}{% for i in range(999) %}{% set b = a | upper %}{% endfor %}",
    "{% set a = ['a' * 9999] * 9 %}{% for i in range(99999) %}{% set b = a | join %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "text " * 9999 + "{% endfor %}{% endset %}",
    "{% macro m() %}" + "text " * 9999 + "{% endmacro %}{% set x %}{% for i in range(99999) %}{{ m() }}"
    "{% endfor %}{% endset %}",
]


@pytest.mark.parametrize("source", TOO_LARGE)
def test_an_operation_that_is_too_large_is_refused(source):
    with pytest.raises(jinja2.TemplateError, match="too large"):
        chat_environment().from_string(source).render()


@pytest.mark.parametrize("source", LONG)
def test_a_rendering_that_takes_too_long_is_ended(source, monkeypatch):
    monkeypatch.setattr(template_work, "MAX_STEPS", 200_000)
    with pytest.raises((jinja2.TemplateError, RecursionError), match="too long|recursion"):
        chat_environment().from_string(source).render(messages=[{"role": "a"}] * 99)


def test_the_clock_ends_a_rendering_of_few_long_steps(monkeypatch):
    monkeypatch.setattr(template_work, "time", SimpleNamespace(thread_time=count(0, 1).__next__))
    source = "{% for i in range(99999) %}{% if 'a' * 99 == i %}{% endif %}{% endfor %}"
    with pytest.raises(jinja2.TemplateError, match="too long"):
        chat_environment().from_string(source).render()


@pytest.mark.parametrize("source", MANY)
def test_a_rendering_that_makes_too_many_texts_is_ended(source, monkeypatch):
    monkeypatch.setattr(template_work, "MAX_MADE", 2**26)
    with pytest.raises(jinja2.TemplateError, match="makes texts of over 67,108,864 characters in all"):
        chat_environment().from_string(source).render()


def test_each_rendering_has_its_own_work(monkeypatch):
    monkeypatch.setattr(template_work, "MAX_STEPS", 300)
    environment = chat_environment()
    template = environment.from_string("{% for i in range(200) %}{% endfor %}{{ i }}")
    for _ in range(5):
        with environment.counted():
            assert template.render() == ""


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

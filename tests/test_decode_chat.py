"""Chat templates: Hugging Face's semantics kept, hostile templates stopped."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ggraph.errors import FormatError, InputError
from ggraph.text.chat import CHATML, RENDERER, ChatTemplate
from ggraph.text.tokenizer import Tokenizer

USER = {"role": "user", "content": " Hi <b> é\n"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Yo"},
]

FEATURES = r"""
{%- macro line(m, upper=false) -%}
    {{ '<' ~ (m.role | upper if upper else m['role']) ~ '>' + m.content | trim }}
{% endmacro -%}
{{ bos_token }}
{%- set ns = namespace(last=none, seen=[]) %}
{%- for m in messages %}
    {%- if loop.first and m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + [m.role] %}
{{ line(m, upper=loop.last) }} {{ loop.index }}/{{ loop.length }}{% if not loop.last %}, {% endif %}
    {%- set ns.last = m %}
{%- endfor %}
{{ ns.seen | join('-') }} {{ ns.last.content.split(' ')[-1] }} {{ 'assistant' in ns.seen }}
{{ {'b': [1, 2.5, none, true], 'a': 'é<'} | tojson }} {{ {'a': {'b': [1]}} | tojson(indent=2) }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
{{ range(2, 9, 3) | list }} {{ messages[1:] | length }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 5 }}
{{ 'a,b'.replace(',', ';') }} {{ '%s=%d' % ('x', 3) }} {{ '{}!'.format('x') }} {{ -3 | abs }}
{{ "one\ntwo" | indent(2) }} {{ 3.14159 | round(2) }} {{ [3, 1, 2] | sort | first }}
{{ [1, 2] | sum }} {{ ('x' * 3) ~ 1 ~ none }} {{ messages[0].get('name', 'none') }} {{ nothing }}
{% filter upper %}loud{% endfilter %} {{ 'yes' if tools is none else 'no' }} {{ ' x '.strip() }}
{% for k, v in {'z': 1, 'y': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}
{% for n in [[1, [2]], [3]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}
{% if add_generation_prompt %}{{ '<assistant>' }}{{ eos_token }}{% endif %}
"""


def plain_render(source, **variables):
    """The same through jinja2 as Hugging Face sets it up: the oracle."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    return env.from_string(source).render(**variables)


@pytest.mark.parametrize("prompt", [True, False])
def test_every_common_feature_equals_plain_jinja2(prompt):
    ours = ChatTemplate(FEATURES, "<s>", "</s>").render(MESSAGES, add_generation_prompt=prompt)
    assert "assistant" in ours and "2/3" in ours
    assert ours == plain_render(
        FEATURES,
        messages=MESSAGES,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        tools=None,
    )


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), st.text()), max_size=5))
def test_chatml_equals_its_definition(turns):
    messages = [{"role": r, "content": c} for r, c in turns]
    expected = "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in turns)
    template = ChatTemplate(CHATML)
    assert template.render(messages) == expected + "<|im_start|>assistant\n"
    assert template.render(messages, add_generation_prompt=False) == expected


def test_extra_variables_generation_tag_and_clock():
    source = (
        "{{ tools | length }}{{ mood }}{% generation %}{{ messages[0].content }}"
        "{% endgeneration %}{{ strftime_now('%%') }}"
    )
    assert ChatTemplate(source).render([USER], tools=[1, 2], mood="ok") == "2ok Hi <b> é\n%"


def test_content_is_never_run_as_a_template():
    message = {"role": "user", "content": "{{ 7 * 7 }}{% raise %}{{ bos_token }}"}
    assert message["content"] in ChatTemplate(CHATML).render([message])


def test_the_template_can_refuse_its_input():
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    assert ChatTemplate(source).render([USER]) == "ok"
    with pytest.raises(InputError, match="refuses the messages: user first"):
        ChatTemplate(source).render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [1], [{}], [{"role": 3}], None])
def test_messages_of_another_form_are_refused(messages):
    with pytest.raises(InputError, match="messages"):
        ChatTemplate(CHATML).render(messages)


def test_default_template_needs_its_markers():
    tokens = ["a", "<|im_start|>", "<|im_end|>"]
    base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []}
    kinds = [1, 3, 3]
    chatml = base | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert ChatTemplate.of(Tokenizer.from_gguf(chatml)).source == CHATML
    own = chatml | {"tokenizer.chat_template": "own"}
    assert ChatTemplate.of(Tokenizer.from_gguf(own)).source == "own"
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate.of(Tokenizer.from_gguf(base | {"tokenizer.ggml.tokens": ["a"]}))


def grow(start, step):
    """Sixty-four times the same step on a namespace with x and y."""
    head = "{% set n = namespace(x=START, y=START) %}{% for i in range(64) %}"
    return head.replace("START", start) + step + "{% endfor %}"


LAUGHS = grow("[1]", "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}")
TUPLES = LAUGHS.replace("[1]", "(1,)").replace("[n.x, n.x]", "(n.x, n.x)")
LONG = "{% set a = 'a' * 4000000 %}"

RUNAWAYS = {
    "endless range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "string times": "{{ 'x' * 10**12 }}",
    "list times": "{{ [1] * 10**9 }}",
    "repeated square": grow("7", "{% set n.x = n.x * n.x %}"),
    "doubled by ~": grow("'x'", "{% set n.x = n.x ~ n.x %}"),
    "doubled by +": grow("'x'", "{% set n.x = n.x + n.x %}"),
    "shared lists printed": LAUGHS + "{{ n.x }}",
    "shared lists as JSON": LAUGHS + "{{ n.x | tojson }}",
    "shared lists compared": LAUGHS + "{{ n.x == n.y }}",
    "shared lists, greatest": LAUGHS + "{{ [n.x, n.y] | map('default') | max }}",
    "shared lists in a stream": LAUGHS + "{{ n.x in [n.y] | map('default') }}",
    "shared tuples as key": TUPLES + "{{ {n.x: 1} }}",
    "shared tuples looked up": TUPLES + "{{ {}[n.x] }}{{ {}.get(n.x) }}",
    "deep list": "{% set n = namespace(x=1) %}{% for i in range(9999) %}{% set n.x = [n.x] %}"
    "{% endfor %}{{ n.x }}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "long macro in a loop": "{% macro m() %}" + "{{ 1 }}" * 2000 + "{% endmacro %}"
    "{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "long block in a loop": "{% for i in range(99999) %}{{ self.b() }}{% endfor %}{% block b %}"
    + "{{ 1 }}" * 2000
    + "{% endblock %}",
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for x in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "wide filter": "{{ 'x' | center(10**9) }}",
    "wide method": "{{ 'x'.ljust(10**9) }}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "computed %": "{{ '%*d' % (10**9, 1) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "computed format": "{{ '{:{}}'.format(1, 10**9) }}",
    "replace by itself": LONG + "{{ a.replace('a', a) }}",
    "replace filter": LONG + "{{ a | replace('a', a) }}",
    "join by much": LONG + "{{ range(9999) | join(a) }}",
    "join of a stream": LONG + "{{ a.join(range(9999) | map('string')) }}",
    "strip much": LONG + "{{ a.strip('b' * 4000000 + 'a') }}",
    "trim much": LONG + "{{ a | trim('b' * 4000000 + 'a') }}",
    "wide JSON": "{{ messages | tojson(indent=10**8) }}",
    "round to much": "{{ 1.5 | round(10**9, 'ceil') }}",
    "many batches": "{{ [1] | batch(10**9, 1) | list }}",
}

# Dear, or strange, but with an end: how far they get depends on the machine.
COSTLY = {
    "sum of lists": "{{ ([[1] * 999] * 999) | sum(start=[]) }}",
    "split into letters": LONG + "{{ a | list }}",
    "tower of powers": "{{ 10 ** 10 ** 10 }}",
    "namespace in itself": "{% set n = namespace(x=1) %}{% set n.x = [n, n] %}{{ n }}",
    "find backwards": LONG + "{{ a.rfind('b' + 'a' * 2000000) }}",
    "JSON separators": LONG + "{{ messages | tojson(separators=(a, a)) }}",
    "wide indent": "{{ ('\n' * 100000) | indent(9999) }}",
    "costly test in a loop": LONG + "{% for i in range(99999) %}{{ a is upper }}{% endfor %}",
    "costly filter in a loop": LONG + "{% for i in range(99999) %}{{ a | select | first }}"
    "{% endfor %}",
    "long date": "{{ strftime_now('%Y' * 1000) }}",
    "large number": "{{ " + "9" * 4000 + " }}",
}

ESCAPES = {
    "class": "{{ ().__class__ }}",
    "class of a message": "{{ messages | map(attribute='__class__') | list }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ '' | attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "init": "{{ cycler.__init__.__globals__.os }}",
    "loop": "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends 'base' %}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "undefined": "{{ nothing.at.all }}",
    "division": "{{ 1 / 0 }}",
}

BROKEN = {
    "no expression": "{% if %}",
    "not closed": "{% for x in y %}",
    "no such filter": "{{ 1 | nope }}",
    "no such test": "{{ 1 is nope }}",
    "parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "nested lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "nested nots": "{{ " + "not " * 20000 + "1 }}",
    "nested ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "nested loops": "{% for a in b %}" * 60 + "{% endfor %}" * 60,
    "long number": "{{ " + "9" * 9999 + " }}",
    "too long": "x" * ((1 << 18) + 1),
    "no string": 3,
}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggraph.text.chat._SECONDS", 1.5)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS)
def test_runaway_templates_are_stopped(source):
    with pytest.raises(FormatError, match=r"chat template (stopped|failed: RecursionError)"):
        ChatTemplate(source).render([USER])


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY)
def test_costly_templates_end(source):
    try:
        text = ChatTemplate(source).render([USER])
    except FormatError as error:
        assert re.match(r"chat template (stopped|failed)", str(error))
    else:
        assert len(text) < 1 << 26


def test_what_was_stopped_does_not_stop_others(hurried):
    for _ in range(2):
        with pytest.raises(FormatError, match="chat template stopped"):
            ChatTemplate(RUNAWAYS["long block in a loop"]).render([USER])
        assert ChatTemplate(CHATML).render([USER]).startswith("<|im_start|>user")


def test_several_threads_ask_in_turn():
    template = ChatTemplate("{{ messages[0].content }}")

    def ask(i):
        return template.render([{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(100))) == [str(i) for i in range(100)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_copy_has_a_renderer_of_its_own():
    template = ChatTemplate("{{ messages[0].content }}")
    child = os.fork()
    if child == 0:
        mine = template.render([{"role": "user", "content": "child"}]) == "child"
        RENDERER.close()
        os._exit(0 if mine else 1)
    assert template.render([{"role": "user", "content": "parent"}]) == "parent"
    assert os.waitpid(child, 0)[1] == 0


def test_variables_that_are_no_json_are_refused():
    with pytest.raises(InputError, match="must be JSON"):
        ChatTemplate(CHATML).render([USER], tools=[object()])


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_escapes_fail(source):
    messages = [dict(USER)]
    with pytest.raises(FormatError, match="chat template"):
        ChatTemplate(source).render(messages)
    assert messages == [USER]


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_broken_templates_are_refused_when_loaded(source):
    with pytest.raises(FormatError, match="chat template") as error:
        ChatTemplate(source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


fragments = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.role }}",
        "{% if m %}",
        "{% else %}",
        "{% endif %}",
        "{{ n.x }}",
        "{% set n = namespace(x=[1]) %}",
        "{% set n.x = [n.x, n.x] %}",
        "{{ n.x * 99 }}",
        "{{ m | tojson }}",
        "{% macro f(a) %}",
        "{% endmacro %}",
        "{{ f(f) }}",
        "{{ loop.index }}",
        "{{ messages * 3 }}",
        "{%",
        "}}",
        "text\n",
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ 'a' ~ n.x }}",
        "{% break %}",
        "{{ m.content.split() }}",
        "{{ range(1000) | list }}",
        "{% for i in range(1000) %}",
    ]
)


@given(st.lists(fragments, max_size=12).map("".join) | st.text(max_size=40))
def test_any_source_renders_or_fails_cleanly(source):
    try:
        text = ChatTemplate(source).render(MESSAGES)
    except (FormatError, InputError):
        return
    assert isinstance(text, str)


def test_work_grows_with_the_input():
    messages = [{"role": "user", "content": "word " * 200}] * 3000
    assert ChatTemplate(FEATURES).render(messages).count("word") > 3000 * 200
    assert len(ChatTemplate(CHATML).render(messages)) > 3000 * 1000

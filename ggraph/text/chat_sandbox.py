"""A jinja2 environment in which a hostile template can neither escape nor run away.

jinja2's immutable sandbox keeps templates from changing their input and from reaching into Python.
This file adds: attributes by permission instead of by prohibition, and a price for everything
(chat_budget.py). Prices get in by rewriting the syntax tree: loops, macros and blocks pay for the
nodes in their bodies, and concatenations, comparisons and keys go through functions that weigh
their operands first. Filters and functions are in chat_filters.py, what a chat is in chat.py.
"""

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from ggraph.text.chat_budget import Counted, settled, size, spend, weigh
from ggraph.text.chat_filters import (
    check_format,
    check_operands,
    finalize,
    pay_call,
    priced_filters,
    priced_tests,
    template_globals,
    words,
)

_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,
        words(
            "capitalize casefold center count endswith find index isalnum isalpha isascii"
            " isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip"
            " partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit"
            " rstrip split splitlines startswith strip swapcase title upper zfill"
        ),
    ),
    (dict, words("get items keys values copy")),
    (list, words("count index copy")),
    (tuple, words("count index")),
)
_RUNTIME = (LoopContext, Macro, Cycler, Joiner, Namespace, Undefined)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what a model said: passed through."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates as Hugging Face does, within a budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding would run the template's code at compile time
            cache_size=0,
            extensions=[Generation, loopcontrols],
            finalize=finalize,
        )
        self.filters = priced_filters()
        self.tests = priced_tests()
        self.globals = template_globals()

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Pricing().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only methods that are named above; of jinja2's own objects what its sandbox allows."""
        if isinstance(obj, _RUNTIME):
            return super().is_safe_attribute(obj, attr, value)
        return any(isinstance(obj, t) and attr in names for t, names in _METHODS)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Reaching for Python's own attributes is never a slip, so it does not pass for empty."""
        if attribute.startswith("_"):
            raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with prices; `format_map` is refused by `is_safe_attribute`."""
        if getattr(value, "__name__", "") == "format_map":
            return None
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        template: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            check_format(template, "{", (args, kwargs))
            return inner(*args, **kwargs)

        return formatted

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`; a slice is paid for as the copy that it is."""
        if isinstance(argument, tuple):
            weigh(argument)  # a key is hashed all through
        value = super().getitem(obj, argument)
        if isinstance(argument, slice):
            spend(size(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic whose result is known to be small enough before it is made."""
        if not (type(left) is int and type(right) is int and operator in "+-//%"):
            check_operands(operator, left, right)
        value = super().call_binop(context, operator, left, right)
        spend(size(value))
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        """Calls from templates. (Positional only: a template may name its own arguments so.)"""
        self, context, obj, *given = args
        if isinstance(obj, Macro):
            spend(5)  # its body pays for itself
            return ImmutableSandboxedEnvironment.call(self, context, obj, *given, **kwargs)
        if isinstance(obj, LoopContext):
            # loop(items) runs the loop's body on other items, past the price at its head.
            price = getattr(obj._iterable, "units", 1)
            given = [Counted(items, price) for items in given]
        else:
            given = pay_call(obj, [settled(a) for a in given], kwargs)
        value = ImmutableSandboxedEnvironment.call(self, context, obj, *given, **kwargs)
        spend(size(value))
        return value


class _Pricing(NodeTransformer):
    """Puts prices into a syntax tree. Names with @ cannot be written in a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        steps = _nodes_in(node)
        self.generic_visit(node)
        node.iter = _through("@loop", node.iter, nodes.Const(steps))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._pay_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._pay_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._pay_body(node)

    def _pay_body(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        price = _through("@spend", nodes.Const(_nodes_in(node)))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(price, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("@concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _through("@weigh", node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("@weigh", node.expr)
        for operand in node.ops:
            operand.expr = _through("@weigh", operand.expr)
        return node


def _through(name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _nodes_in(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node))

"""Chat templates with a budget: a template comes with a model, and its author may be anybody.

jinja2's sandbox keeps a template from Python's inside, but not from loops without end, or texts
without size. Here a template pays from one budget for each text that it renders, in units of about
a character: for each turn of a loop or macro by the statements in it, and for what an operation
reads or makes by its size. What may make much of little (`*`, `center`, `join`, ...) is paid before
it is done. A template that spends more is refused, on every machine alike, as nothing here looks at
a clock. What costs little however it is used, such as a comparison with a constant, is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from string import Formatter
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from transformers.utils import chat_template_utils

from isles.data.chat.fields import FIXED_DAY

MAX_TEMPLATE_CHARS = 2**18
"""The largest template of a known model has 30,000."""

_BUDGET, _PER_UNIT_OF_INPUT = 2**26, 100
"""Units for a text, and more for each unit of the conversation itself."""

_UNIT = 64
"""Cost of a part of a statement, or an item of a list. A character costs 1."""

_MAX_BITS = 2**15
_NOT_OFFERED = ("pprint", "random", "striptags", "urlize", "wordwrap")
"""Filters that no chat needs, with a cost that is hard to tell, or with another result each day."""

_NO_METHODS = frozenset(("encode", "striptags", "to_bytes"))
_FREE = frozenset(("count", "d", "default", "first", "last", "length"))
_FREE_TESTS = frozenset(
    (
        *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable"),
        *("mapping", "none", "number", "sameas", "sequence", "string", "true", "undefined"),
    )
)
"""Filters and tests that do not look into a value."""

_SHALLOW = frozenset(
    (
        *("attr", "batch", "copy", "get", "items", "keys", "list", "map", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice", "values"),
    )
)
"""Filters and methods that look at the items of a list, and not into them."""

_OF_SUMS = (
    "!= % < <= == > >= divisibleby endswith eq equalto find format format_map ge get greaterthan gt"
    " in index le lessthan lt ne partition removeprefix removesuffix rfind rpartition rsplit split"
    " startswith truncate"
)
_SUMS = frozenset(_OF_SUMS.split())
"""Operations whose cost is at most the sum of the sizes of their arguments, not the product."""

_PROGRAMS = frozenset(("%", "divisibleby", "even", "format", "format_map", "odd", "replace", "sum"))
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*\d{0,3}(?:\.\d{0,3})?[hlL]?[a-zA-Z%]")
_WIDE = re.compile(r"\d{4}")
_NESTED: tuple[Any, ...] = (
    *(list, tuple, dict, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_LAZY: tuple[Any, ...] = (
    *(GeneratorType, reversed, map, filter, zip),
    *map(type, (reversed([]), reversed(range(0)), reversed({}))),
    *map(type, (reversed({}.keys()), reversed({}.values()), reversed({}.items()))),
)
_OF_JINJA = ("_block_vars", "_loop_vars")
"""Arguments that jinja2 adds to calls."""

_MARKS = "_generation_support"
"""The function of transformers behind `{% generation %}`."""


class OverBudgetError(SecurityError):
    """The template does more than any conversation needs."""


class _ListedItems:
    # In the place of a generator: its items can be told, and it can be read once.

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
        self._rest = iter(self.items)

    def __iter__(self) -> Iterator[Any]:
        return self._rest


class _Generator(CodeGenerator):
    # Python code that pays for what it does.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paid: dict[int, list[tuple[nodes.Node, str, str]]] = {}
        self._weights: dict[int, int] = {}
        self._statements: dict[int, int] = {}

    def _weigh(self, node: nodes.Node) -> int:
        # What a statement costs, and at least once all that is in it.
        if id(node) not in self._weights:
            value = getattr(node, "data", getattr(node, "value", None))
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                self.fail("the number is too large", node.lineno)
            own = _UNIT + (len(value) if isinstance(value, str) else 0)
            self._weights[id(node)] = own + sum(map(self._weigh, node.iter_child_nodes()))
        return self._weights[id(node)]

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        # Of a loop, macro or block, which pays for all that is in its statement, such as defaults;
        # a branch is paid with what it is in.
        body = list(nodes)
        if not frame.soft_frame:
            weight = self._statements.get(id(nodes), _UNIT + sum(map(self._weigh, body)))
            self.writeline(f"environment.spent += {weight}")
            self.writeline("if environment.spent > environment.limit: environment.spend(0)")
        super().blockvisit(body, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        parts: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Add):
            parts.append(first.right)
            first = first.left
        self.write("environment.plus(")
        for part in (first, *reversed(parts)):
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            self._statements[id(node.body)] = self._weigh(node)
        for part in _read_in_full(node):
            self._pay(part, "read")
        if isinstance(node, nodes.Operand) and node.op in ("in", "notin"):
            paid = self._paid.get(id(node.expr), [])
            self._paid[id(node.expr)] = [(part, "searched", more) for part, _, more in paid]
        if isinstance(node, nodes.For) and node.test is not None:
            self._pay(node.test, "tested", f", {self._weigh(node.test)}")
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            self._pay(node, "made")
        paid = self._paid.pop(id(node), [])
        for _, function, _ in paid:
            self.write(f"environment.{function}(")
        super().visit(node, *args, **kwargs)
        for _, _, more in reversed(paid):
            self.write(f"{more})")

    def _pay(self, node: nodes.Node, function: str, more: str = "") -> None:
        self._paid.setdefault(id(node), []).append((node, function, more))


def _read_in_full(node: nodes.Node) -> list[nodes.Expr]:
    # The parts whose size an operation depends on.
    parts: list[nodes.Expr] = []
    if isinstance(node, nodes.Compare):
        parts = [node.expr, *(operand.expr for operand in node.ops)]
        is_search = any(operand.op in ("in", "notin") for operand in node.ops)
        if len(parts) == 2 and not is_search and any(map(_is_small, parts)):
            return []
    elif isinstance(node, nodes.Concat):
        parts = node.nodes
    elif isinstance(node, nodes.Dict):
        parts = [pair.key for pair in node.items]
    elif isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
        parts = [node.arg]
    return [part for part in parts if not _is_small(part)]


def _is_small(node: nodes.Node) -> bool:
    # Whether it is no larger than the template, whatever the messages are.
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_small, node.items))
    if isinstance(node, nodes.Filter):
        return node.name in ("count", "length")
    return isinstance(node, nodes.Const | nodes.Compare | nodes.Not | nodes.Sub | nodes.Test)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. One thread at a time.

    `of` makes it from the environment of transformers, so templates can use the same names.
    """

    _safe: dict[tuple[type, str], bool]

    code_generator_class = _Generator
    intercepted_binops = frozenset(("-", "*", "**", "%", "//"))

    @classmethod
    def of(cls, original: Environment) -> Sandbox:
        """The same environment with a budget."""
        own = original.overlay()
        own.__class__ = cls
        assert isinstance(own, Sandbox)
        own.finalize = own.read
        offered: dict[str, Any] = {k: v for k, v in own.filters.items() if k not in _NOT_OFFERED}
        own.filters = {k: v if k in _FREE else own._priced(k, v) for k, v in offered.items()}
        tests: dict[str, Any] = dict(own.tests)
        own.tests = {k: v if k in _FREE_TESTS else own._priced(k, v) for k, v in tests.items()}
        own.globals = {name: value for name, value in own.globals.items() if name != "lipsum"}
        own.globals["strftime_now"] = _strftime_fixed
        # Its text would hold all that was put into it.
        base: Any = own.globals["namespace"]
        own.globals["namespace"] = type("namespace", (base,), {"__repr__": lambda _: "<namespace>"})
        own._safe = {}
        own.begin(None)
        return own

    def begin(self, conversation: object) -> None:
        """Give a budget for the next text, which is rendered from a conversation."""
        self.spent, self.limit, self._conversation = 0, _BUDGET, conversation

    # Prices.

    def spend(self, units: int) -> None:
        """Take units from the budget. OverBudgetError: they are used up."""
        self.spent += units
        if self.spent > self.limit and self._conversation is not None:
            # Few need more, so that the conversation's size is found out here.
            given, self._conversation = self._conversation, None
            before, self.limit = self.spent, 2**62
            self.read(given)
            self.limit = _BUDGET + _PER_UNIT_OF_INPUT * (self.spent - before)
            self.spent = before
        if self.spent > self.limit:
            raise OverBudgetError("it does far more than this conversation needs")

    def read(self, value: Any) -> Any:
        """Pay for a value that is looked at in full: it is compared, or made to text."""
        kind = type(value)
        if kind is str:
            self.spent += len(value)
            if self.spent > self.limit:
                self.spend(0)
            return value
        self.spend(_size(value))
        if issubclass(kind, _NESTED):
            # A list that is in several places counts in each, as each would write it.
            for item in value:
                self.read(item)
            if kind is dict:
                for item in value.values():
                    self.read(item)
        elif kind is _ListedItems:
            self.read(value.items)
        elif kind is MethodType:
            self.read(value.__self__)  # which its text may hold
        elif kind is LoopContext:
            raise OverBudgetError("it makes text of a loop")
        return value

    def searched(self, value: Any) -> Any:
        """Pay for a value that is on the right of `in`."""
        return value if type(value) is dict else self.read(value)

    def made(self, value: Any) -> Any:
        """Pay for a new value, but not for the content of its items, which existed before."""
        if type(value) is str:
            self.spent += len(value)
            if self.spent > self.limit:
                self.spend(0)
            return value
        kind = type(value)
        if kind is int:
            if value.bit_length() > _MAX_BITS:
                raise OverBudgetError("it computes a number that is too large")
            return value
        if issubclass(kind, _LAZY):
            value = _ListedItems(value)
        self.spend(_size(value))
        return value

    def tested(self, value: Any, units: int) -> Any:
        """Pay for the `if` of a `for`, which runs for each item even if the body never runs."""
        self.spend(units)
        return value

    def _price(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # What a method, filter, test or operation will cost, before it does anything.
        if type(value) is str:
            weight = len(value)
        else:
            weight = _size(value) if name in _SHALLOW else self._weigh(value)
        times = 0
        for each in (*args, *kwargs.values()) if kwargs else args:
            if type(each) is str:
                times += len(each)
            elif isinstance(each, int):
                times += 0 if name in _SUMS else abs(each)
            else:
                times += self._weigh(each)
        self.spent += weight + times
        if times and name not in _SUMS and (name != "replace" or kwargs):
            self.spent += (1 + weight) * times
        if self.spent > self.limit:
            self.spend(0)
        if name in _PROGRAMS:
            self._check(name, value, (*args, *kwargs.values()), times)

    def _weigh(self, value: Any) -> int:
        before = self.spent
        self.read(value)
        return self.spent - before

    def _check(self, name: str, value: Any, given: Sequence[Any], times: int) -> None:
        if name == "sum":
            if not all(isinstance(each, str | int | float) for each in given):
                raise OverBudgetError("sum adds numbers only")
        elif name == "replace":
            old, new, *_ = map(str, (*given, "", ""))
            self.spend(str(value).count(old) * len(new))
        elif isinstance(value, str) and name in ("format", "format_map"):
            fields = [spec or "" for _, _, spec, _ in Formatter().parse(value)]
            if any("{" in spec or _WIDE.search(spec) for spec in fields):
                raise OverBudgetError("a field of format is wider than 999")
            self.spend(len(fields) * (1000 + times))
        elif isinstance(value, str):
            if "%" in _CONVERSION.sub("", value):
                raise OverBudgetError("a conversion of % is wider than 999, or does not exist")
            self.spend(value.count("%") * (1000 + times))

    # Operations.

    def plus(self, *parts: Any) -> Any:
        """The operator `+` of templates, on any number of values."""
        size = 0
        for part in parts:
            if type(part) is not str:
                break
            size += len(part)
        else:
            self.spent += size
            if self.spent > self.limit:
                self.spend(0)
            return "".join(parts)
        value, *others = parts
        for other in others:
            value = self.made(value + other)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The rule of jinja2, cached by type and name: jinja2 reads only the type, and slowly."""
        key = type(obj), attr
        if key not in self._safe:
            if len(self._safe) > 1000:
                self._safe.clear()
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation that may make much of little."""
        if isinstance(left, int) and isinstance(right, int):
            if operator not in ("*", "**"):
                return self.made(self.binop_table[operator](left, right))
            bits, more = left.bit_length(), right.bit_length()
            if (bits + more if operator == "*" else bits * abs(right)) > _MAX_BITS:
                raise OverBudgetError("it computes a number that is too large")
        elif operator == "*" and isinstance(left, int):
            self._price(operator, right, (left,), {})
        else:
            self._price(operator, left, (right,), {})
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of a value, a macro, or a function that transformers gives to templates."""
        self = __self
        if type(__obj) is BuiltinMethodType:
            for key in _OF_JINJA:
                kwargs.pop(key, None)
            name = __obj.__name__
            if name in _NO_METHODS:
                raise OverBudgetError(f"templates cannot call the method {name}")
            self._price(name, __obj.__self__, args, kwargs)
            return self.made(__obj(*args, **kwargs))
        if type(__obj) is Macro:
            self.spend(_UNIT * (len(args) + len(kwargs)))
            return super().call(__context, __obj, *args, **kwargs)
        name = getattr(__obj, "__name__", "")
        if name == _MARKS:
            self.spend(self.spent // _UNIT)  # it joins all text so far
            return super().call(__context, __obj, *args, **kwargs)
        if name in _NO_METHODS:
            raise OverBudgetError(f"templates cannot call the method {name}")
        given = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            self._price(name, owner, args, given)
        else:
            for each in (*args, *given.values()):
                self.read(each)
        return self.made(super().call(__context, __obj, *args, **kwargs))

    def _priced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # A filter or test that pays.
        kind = _PassArg.from_obj(function)
        price = "%" if name == "format" else name

        @pass_context  # such a filter is never computed while the template is compiled
        def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            self._price(price, value, args, kwargs)
            if kind is None:
                return self.made(function(value, *args, **kwargs))
            by_kind = {_PassArg.context: context, _PassArg.environment: self}
            passed = by_kind.get(kind, context.eval_ctx)
            return self.made(function(passed, value, *args, **kwargs))

        return priced


def _strftime_fixed(format: str) -> str:
    # As transformers' strftime_now, on the day that all texts of a run are made.
    if _WIDE.search(format):
        raise OverBudgetError("a field of strftime_now is wider than 999")
    return FIXED_DAY.strftime(format)


def _size(value: Any) -> int:
    # What a value costs without its items. Of its type: jinja2's namespaces are slow to be asked.
    kind = type(value)
    if issubclass(kind, str):
        return len(value)
    if kind is _ListedItems:
        return _UNIT * (1 + len(value.items))
    return _UNIT * (1 + len(value)) if kind is range or issubclass(kind, _NESTED) else _UNIT


def compile_template(text: str) -> Template:
    """A template that pays, with all that transformers gives to templates.

    Raises:
        TemplateSyntaxError: it is no Jinja, or larger or deeper than any template.
    """
    if len(text) > MAX_TEMPLATE_CHARS:
        raise TemplateSyntaxError(f"it has more than {MAX_TEMPLATE_CHARS:,} characters", 1)
    # Not of this text: what can be computed at once would be, without a budget.
    original = chat_template_utils._compile_jinja_template("").environment
    try:
        return Sandbox.of(original).from_string(text)
    # Python's own limits: of nested loops, of numbers, of brackets.
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        what = f"Python cannot compile it: {str(error)[:200] or type(error).__name__}"
        raise TemplateSyntaxError(what, 1) from error


@cache
def _giver() -> Callable[..., Any]:
    # transformers' own function, so that messages are given as to any template. It gives them to
    # a template that only keeps them.
    keeps = SimpleNamespace(render=lambda **given: given)
    original = chat_template_utils.render_jinja_template
    names = {**original.__globals__, "_compile_jinja_template": lambda _: keeps}
    function = FunctionType(original.__code__, names, None, original.__defaults__)
    function.__kwdefaults__ = original.__kwdefaults__
    return function


def variables(messages: Sequence[Any], **given: Any) -> dict[str, Any]:
    """Variables that `render_jinja_template` of transformers gives to a template, for `render`."""
    texts, _ = _giver()([list(messages)], **given)
    found: dict[str, Any] = texts[0]
    return found


def render(
    template: Template, given: Mapping[str, Any], *, marked: bool
) -> tuple[str, list[tuple[int, int]]]:
    """Render a template of `compile_template`: its text, and the spans that it marks, if any."""
    sandbox = template.environment
    assert isinstance(sandbox, Sandbox)
    sandbox.begin([given["messages"], given["tools"]])
    if not marked:
        return template.render(given), []
    text, spans = chat_template_utils._render_with_assistant_indices(template, **given)
    return text, spans

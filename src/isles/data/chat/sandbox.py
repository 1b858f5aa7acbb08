"""Chat templates with a budget: a template comes with a model, and its author may be anybody.

jinja2's sandbox keeps a template from Python's inside, but not from loops without end, or texts
without size. Here every value that a template makes and every turn of its loops is paid for from
one budget for each conversation. A template that spends more is refused, on every machine alike,
as nothing here looks at a clock. Operations whose cost is no sum of sizes (`*`, `**`, `center`,
`join`, ...) are paid before they are done.
"""

from __future__ import annotations

import re
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from itertools import chain
from string import Formatter
from types import FunctionType, GeneratorType
from typing import Any, cast

from jinja2 import Environment, Template, pass_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.nodes import (
    Call,
    Compare,
    Concat,
    Const,
    Dict,
    EnvironmentAttribute,
    For,
    Getitem,
    If,
    List,
    Node,
    Output,
    Slice,
    TemplateData,
    Tuple,
)
from jinja2.runtime import Context, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from transformers.utils import chat_template_utils

MAX_TEMPLATE_CHARS = 2**20
"""The largest template of a known model has 30,000."""

_BUDGET, _PER_UNIT_OF_INPUT = 2**26, 100
"""Units for a conversation, and more for each unit of the conversation itself."""

_UNIT = 64
"""Cost of a turn, of an operation, of an item of a list. A character costs 1."""

_CALL = 512
"""Cost of a call of a macro or a method."""

_MAX_DEPTH, _MAX_BITS, _MAX_WIDTH = 64, 2**15, 10_000

_NOT_OFFERED = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters that no chat needs, with a cost that is hard to tell, or with another result each day."""

_NO_METHODS = frozenset(("encode", "decode", "from_bytes", "maketrans", "to_bytes", "translate"))
_SHALLOW = frozenset(
    (
        *("attr", "batch", "copy", "count", "d", "default", "first", "get", "items", "keys"),
        *("last", "length", "list", "map", "reject", "rejectattr", "reverse", "select"),
        *("selectattr", "slice", "values"),
    )
)
"""Methods and filters that look at the items of a list, and not into them."""

_PRODUCTS = frozenset(
    (
        *("batch", "center", "dictsort", "expandtabs", "groupby", "indent", "join", "ljust"),
        *("lstrip", "map", "max", "min", "reject", "rejectattr", "rjust", "round", "rstrip"),
        *("select", "selectattr", "slice", "sort", "strip", "sum", "tojson", "trim", "unique"),
        "zfill",
    )
)
"""What these cost or make grows with the size of a value times an argument."""

_COMPARING = frozenset(
    (
        *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in"),
        *("le", "lessthan", "lt", "ne"),
    )
)
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*\d{0,3}(?:\.\d{0,3})?[hlL]?[a-zA-Z%]")
_WIDE = re.compile(r"\d{4}")
_NESTED: tuple[Any, ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_LAZY: tuple[Any, ...] = (GeneratorType, type(reversed([])), map, filter, zip)
_PASS = "iterated"
_MARKS = "_generation_support"
"""The function of transformers behind `{% generation %}`."""


class OverBudgetError(SecurityError):
    """The template does more than any conversation needs."""


class _Generator(CodeGenerator):
    # Python code that pays for what it does.

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        # Of a loop, macro or block: a turn costs as much as all of the text that is in it.
        body = list(nodes)
        if not frame.soft_frame:  # no branch, which its turn has paid for
            self.writeline(f"environment.turn({sum(map(_text_in, body))})")
        super().blockvisit(body, frame)

    def _paid(self, visit: Callable[[Any, Frame], None], node: Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: List, frame: Frame) -> None:
        self._paid(super().visit_List, node, frame)

    def visit_Dict(self, node: Dict, frame: Frame) -> None:
        self._paid(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._paid(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: Getitem, frame: Frame) -> None:
        if isinstance(node.arg, Slice):
            self._paid(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_For(self, node: For, frame: Frame) -> None:
        # A loop with a condition turns where no turn of its body is seen.
        whole = Call(EnvironmentAttribute(_PASS), [node.iter], [], None, None)
        node.iter = whole.set_lineno(node.lineno)
        super().visit_For(node, frame)

    def visit_Call(self, node: Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, EnvironmentAttribute):
            self.write(f"environment.{node.node.name}(")
            self.visit(node.args[0], frame)
            self.write(")")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Compare(self, node: Compare, frame: Frame) -> None:
        self.write("(")
        self._compared(node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._compared(operand.expr, frame)
        self.write(")")

    def _compared(self, node: Node, frame: Frame) -> None:
        self.write("environment.read(")
        self.visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. One thread at a time.

    `of` makes it of the one that transformers makes, with all that templates may use there.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    @classmethod
    def of(cls, original: Environment) -> Sandbox:
        """The same environment with a budget."""
        own = original.overlay()
        own.__class__ = cls
        assert isinstance(own, Sandbox)
        own.finalize = own._written
        filters = {name: each for name, each in own.filters.items() if name not in _NOT_OFFERED}
        own.filters = {name: own._priced(name, cast(Any, each)) for name, each in filters.items()}
        own.tests = {
            name: own._priced(name, cast(Any, each), "test") for name, each in own.tests.items()
        }
        own.globals = {name: value for name, value in own.globals.items() if name != "lipsum"}
        # Its text would hold all that was put into it.
        base = own.globals["namespace"]
        assert isinstance(base, type)
        own.globals["namespace"] = type("namespace", (base,), {"__repr__": lambda _: "<namespace>"})
        own.begin(None)
        return own

    def begin(self, conversation: object) -> None:
        """Give a new conversation its budget."""
        self._left, self._conversation = _BUDGET, conversation
        self._known: dict[int, tuple[object, int, int]] = {}
        self._text = 0

    # Prices.

    def spend(self, units: int) -> None:
        """Take units from the budget. OverBudgetError: they are used up."""
        self._left -= units
        if self._left < 0 and self._conversation is not None:
            # Few need more, so that the conversation's size is found out here.
            given, self._conversation = self._conversation, None
            self._left += _PER_UNIT_OF_INPUT * self._weigh(given)[0]
        if self._left < 0:
            raise OverBudgetError("it does far more than this conversation needs")

    def turn(self, written: int) -> None:
        """Pay for a turn of a loop, a macro or a branch, and for the template's own text in it."""
        self._text += written
        self.spend(_UNIT + written)

    def made(self, value: Any) -> Any:
        """Pay for a new value: itself, but not what is in its items, which was there before."""
        if isinstance(value, str):
            self.spend(_UNIT + len(value))
            return value
        if isinstance(value, _LAZY):
            value = list(value)
        self.spend(_size(value))
        if isinstance(value, _NESTED) and self._weigh(value)[0] > _BUDGET:
            raise OverBudgetError("it puts a list into itself again and again")
        return value

    def read(self, value: Any) -> Any:
        """Pay for a value that is looked at in full: it is compared, or made to text."""
        self.spend(_UNIT + len(value) if type(value) is str else self._weigh(value)[0])
        return value

    def iterated(self, value: Any) -> Any:
        """Pay for a pass over a value."""
        self.spend(_size(value))
        return value

    def joined(self, parts: Sequence[Any]) -> str:
        """What `~` makes of them."""
        for part in parts:
            self.read(part)
        return str_join(parts)

    def _written(self, value: Any) -> Any:
        # What `{{ }}` writes.
        before = self._left
        self.read(value)
        self._text += before - self._left
        return value

    def _weigh(self, value: Any) -> tuple[int, int]:
        # How much a value would be as text, and how deep it is nested. A list that is in several
        # places counts in each, as each would write it. No template can change one, so each is
        # looked at once.
        if not isinstance(value, _NESTED):
            return _size(value), 0
        if (known := self._known.get(id(value))) is not None:
            return known[1], known[2]
        items = chain.from_iterable(value.items()) if isinstance(value, dict) else iter(value)
        weights = [self._weigh(item) for item in items]
        weight = _size(value) + sum(each for each, _ in weights)
        depth = 1 + max((depth for _, depth in weights), default=0)
        if depth > _MAX_DEPTH:
            raise OverBudgetError(f"it nests values more than {_MAX_DEPTH} deep")
        self._known[id(value)] = value, weight, depth  # held, so that no other gets its id
        return weight, depth

    # Operations.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation that may make much of little."""
        is_integer = isinstance(left, int) and isinstance(right, int)
        if operator == "+" and type(left) is type(right) is str:
            self.spend(2 * (len(left) + len(right) + _UNIT))
            return left + right
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+":
            self.spend(_size(left) + _size(right))
        elif operator == "*" and not is_integer:
            for sized, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self.spend(_size(sized) * max(1, times))
        elif is_integer and operator in ("*", "**"):
            bits, more = left.bit_length(), right.bit_length()
            if (bits + more if operator == "*" else bits * abs(right)) > _MAX_BITS:
                raise OverBudgetError("it computes a number that is too large")
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of a value, a macro, or a function that transformers gives to templates."""
        self, name = __self, getattr(__obj, "__name__", "")
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        self.spend(_CALL + (self._text // 16 if name == _MARKS else 0))  # a mark joins all text
        if isinstance(owner, str | bytes | int | float | list | tuple | dict | type):
            if name in _NO_METHODS:
                raise OverBudgetError(f"templates cannot call the method {name}")
            if name in ("format", "format_map") and isinstance(owner, str):
                self._check_fields(owner, args, kwargs)
            self._check(name, owner, args, kwargs)
        else:
            self.spend(_UNIT + sum(map(_size, (*args, *kwargs.values()))))
            if isinstance(__obj, Macro):
                self._weigh((args, kwargs))  # it may keep them, as varargs and kwargs
        return self.made(super().call(__context, __obj, *args, **kwargs))

    def _check(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # What a method, filter or test will cost, before it does anything.
        given = (*args, *kwargs.values())
        if name in _SHALLOW:
            weight, rest = _size(value), sum(map(_size, given))
        else:
            weight, rest = self._weigh(value)[0], self._weigh(given)[0]
        self.spend(_UNIT + weight + rest)
        if name in _PRODUCTS:
            numbers = [abs(each) for each in given if isinstance(each, int)]
            if max(numbers, default=0) > _MAX_WIDTH:
                raise OverBudgetError(f"{name} of {max(numbers)} is too large")
            texts = [self._weigh(each)[0] - _UNIT for each in given if not isinstance(each, int)]
            if name == "join" and isinstance(value, str):
                weight, texts = rest, [len(value)]
            self.spend((_UNIT + weight) * max((*numbers, *texts), default=0))
        elif name == "replace" and len(given) >= 2:
            self.spend(str(value).count(str(given[0])) * len(str(given[1])))

    def _check_format(self, text: str, args: Any) -> None:
        # `%`: each conversion may write all of the arguments, or a width of three digits.
        if "%" in _CONVERSION.sub("", text):
            raise OverBudgetError("a conversion of % is wider than 999, or does not exist")
        self.spend(text.count("%") * (1000 + self._weigh(args)[0]))

    def _check_fields(self, text: str, args: Any, kwargs: Any) -> None:
        # `str.format`: the same.
        specs = [spec or "" for _, _, spec, _ in Formatter().parse(text)]
        if any("{" in spec or _WIDE.search(spec) for spec in specs):
            raise OverBudgetError("a field of format is wider than 999")
        weight = self._weigh(args)[0] + self._weigh(tuple(kwargs.values()))[0]
        self.spend(len(specs) * (1000 + weight))

    def _priced(
        self, name: str, function: Callable[..., Any], what: str = "filter"
    ) -> Callable[..., Any]:
        # A filter or test that pays.
        kind = _PassArg.from_obj(function)

        @pass_context  # such a filter is never computed while the template is compiled
        def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            passed: tuple[Any, ...] = ()
            if kind is not None:
                by_kind = {_PassArg.context: context, _PassArg.environment: self}
                passed = (by_kind.get(kind, context.eval_ctx),)
            if what == "test":
                if name in _COMPARING:
                    self._check(name, value, args, kwargs)
                self.spend(_UNIT)
                return function(*passed, value, *args, **kwargs)
            if name == "format":
                self._check_format(str(value), (*args, *kwargs.values()))
            if name == "sum" and not isinstance(kwargs.get("start", (*args, 0, 0)[1]), int | float):
                raise OverBudgetError("sum adds numbers only")
            self._check(name, value, args, kwargs)
            return self.made(function(*passed, value, *args, **kwargs))

        return priced


def _text_in(node: Node) -> int:
    # Characters that a statement may write, without those of loops in it.
    if isinstance(node, If):
        return sum(map(_text_in, (*node.body, *node.elif_, *node.else_)))
    if not isinstance(node, Output):
        return 0
    texts: Any = node.find_all((TemplateData, Const))
    values = (text.data if isinstance(text, TemplateData) else text.value for text in texts)
    return sum(len(value) for value in values if isinstance(value, str))


def _size(value: Any) -> int:
    # What a value costs without its items.
    if isinstance(value, (str, bytes)):
        return _UNIT + len(value)
    if isinstance(value, int):
        return _UNIT + value.bit_length() // 3
    if type(value) is range or isinstance(value, _NESTED):
        return _UNIT * (1 + len(value))
    return _UNIT


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


def render_within_budget(template: Template, **given: Any) -> tuple[list[str], list[list[Any]]]:
    """As `render_jinja_template` of transformers, with a template of `compile_template`."""
    sandbox = template.environment
    assert isinstance(sandbox, Sandbox)
    original = chat_template_utils.render_jinja_template
    # transformers' own function, so that messages are given as to any template; only what it
    # compiles the text with is ours.
    names = {**original.__globals__, "_compile_jinja_template": lambda _: template}
    render = FunctionType(original.__code__, names, None, original.__defaults__)
    render.__kwdefaults__ = original.__kwdefaults__
    sandbox.begin([given["conversations"], given["tools"] or []])
    try:
        texts, spans = render(**given)
    finally:
        sandbox.begin(None)
    return texts, spans

"""Read the pickles of isles 0.1.0, which torch wrote, without running them.

A pickle is a program. This reader knows only a few of its opcodes, and builds texts, numbers,
tuples, lists and dicts. For an instance of a known class it builds a `PickledInstance`, which holds
only the name of the class and its arguments. No class of torch or Python is imported, called or
changed.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

_PLACE = "torch.distributed.checkpoint.metadata"
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CLASSES = {
    *(f"{_PLACE}.{name}" for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata")),
    *(f"{_PLACE}.{name}" for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    *(f"{_PLACE}.BytesStorageMetadata", _STORED),
}
_CALLED = {
    "torch.Size",
    "torch.serialization._get_layout",
    f"{_PLACE}._MEM_FORMAT_ENCODING",
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # Python 3.13 uses the second name
    "builtins.getattr",  # Python before 3.11.4 uses it to pickle enum members
    *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
    "collections.OrderedDict",
}


class PickleFault(ValueError):
    """A pickle contains something that isles 0.1.0 never wrote. The text describes it."""


class _Named:
    """A class or function in a pickle."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PickledInstance:
    """An instance in a pickle: its class, arguments and state. It is equal only to itself."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def __getitem__(self, key: str) -> Any:
        return self.state.get(key) if isinstance(self.state, dict) else None


_MARK = object()


def read_pickle(data: bytes, most_opcodes: int = 1000) -> Any:
    """Build the content of a pickle from plain values, `PickledInstance` and names.

    Args:
        most_opcodes: limit for the opcodes: each takes time and memory. The default is for one
            tensor, which has about 60.

    Raises:
        PickleFault: it is damaged or too long, or has a name that isles 0.1.0 never wrote.
    """
    machine = _Machine()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number >= most_opcodes:
                raise PickleFault(f"it has more than {most_opcodes} opcodes")
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except PickleFault:
        raise
    except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
        raise PickleFault(f"it is damaged ({type(error).__name__})") from None
    raise PickleFault("it ends too early")


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleFault("it is damaged (mark)")
        return value

    def step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _WITH_VALUE:
            self._stack.append(argument)
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        else:
            raise PickleFault(f"it has the opcode {name}")

    def _since_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _target(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise PickleFault("it fills an object that it has not made")
        return self._stack[-1]

    def _new_list(self, _: Any) -> None:
        self._stack.append([])

    def _new_dict(self, _: Any) -> None:
        self._stack.append({})

    def _remember(self, place: Any) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def _recall(self, place: Any) -> None:
        self._stack.append(self._memo[place])

    def _tuple(self, size: int | None) -> None:
        values = self._since_mark() if size is None else [self.pop() for _ in range(size)][::-1]
        self._stack.append(tuple(values))

    def _append(self, *, many: bool) -> None:
        values = self._since_mark() if many else [self.pop()]
        self._target(list).extend(values)

    def _set(self, *, many: bool) -> None:
        values = self._since_mark() if many else [self.pop(), self.pop()][::-1]
        target = self._target(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            # The hash of nested tuples may take forever.
            if type(key) not in (str, PickledInstance):
                raise PickleFault("it has a dict with an invalid key")
            target[key] = value

    def _name(self, argument: Any) -> None:
        self._stack.append(_named(*argument.split(" ", 1)))

    def _name_from_stack(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._stack.append(_named(module, name))

    def _call(self, *, is_class: bool) -> None:
        arguments, called = self.pop(), self.pop()
        self._stack.append(_made(called, arguments, is_class=is_class))

    def _build(self, _: Any) -> None:
        state = self.pop()
        made = self._target(PickledInstance)
        if made.name not in _CLASSES or made.state is not None:
            raise PickleFault(f"it gives {made.name} a state")
        made.state = state

    def _storage(self, _: Any) -> None:
        self._stack.append(PickledInstance("storage", _tuple_of(self.pop())))


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONSTANTS["MARK"] = _MARK
_WITH_VALUE = frozenset(("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"))
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda _, argument: None),
    "EMPTY_LIST": _Machine._new_list,
    "EMPTY_DICT": _Machine._new_dict,
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Machine._remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine._recall),
    "TUPLE": lambda machine, _: machine._tuple(None),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "APPEND": lambda machine, _: machine._append(many=False),
    "APPENDS": lambda machine, _: machine._append(many=True),
    "SETITEM": lambda machine, _: machine._set(many=False),
    "SETITEMS": lambda machine, _: machine._set(many=True),
    "GLOBAL": _Machine._name,
    "STACK_GLOBAL": _Machine._name_from_stack,
    "NEWOBJ": lambda machine, _: machine._call(is_class=True),
    "REDUCE": lambda machine, _: machine._call(is_class=False),
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._storage,
}
"""The action of each opcode. The reader refuses all others, which isles 0.1.0 never wrote."""


def _named(module: object, name: object) -> _Named:
    if type(module) is not str or type(name) is not str:
        raise PickleFault("it has a number in place of a name")
    path = f"{module}.{name}"
    is_type = module in ("torch", "torch.storage") and name.isidentifier()
    if path not in _CLASSES | _CALLED and not is_type:
        raise PickleFault(f"it names {ascii(path)[1:-1][:80]}, which does not belong in an index")
    return _Named(path)


def _made(called: object, arguments: object, *, is_class: bool) -> Any:
    arguments = _tuple_of(arguments)
    if type(called) is not _Named or called.name not in (_CLASSES if is_class else _CALLED):
        name = called.name if type(called) is _Named else type(called).__name__
        raise PickleFault(f"it calls {ascii(name)[1:-1][:80]}, which does not belong in an index")
    match called.name:
        case "torch.Size":
            [sizes] = arguments
            if not all(type(size) is int for size in _tuple_of(sizes)):
                raise PickleFault("it has a size that is not a number")
            return sizes
        case "collections.OrderedDict":
            return {}
        case "builtins.getattr":
            kind, name = arguments
            if getattr(kind, "name", "") != f"{_PLACE}._MEM_FORMAT_ENCODING":
                raise PickleFault("it asks for an attribute, which does not belong in an index")
            return None
    return PickledInstance(called.name, arguments)


def _tuple_of(value: object) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise PickleFault("it is damaged (tuple)")
    return value


Tensors = dict[Any, tuple[Any, Any, list[tuple[Any, Any]]]]
Places = dict[tuple[Any, Any], tuple[Any, Any, Any]]


def read_torch_index(data: bytes, most_opcodes: int) -> tuple[Tensors, Places]:
    """The tensors of a `.metadata`, and the places of their pieces. The values are not yet checked.

    Returns:
        By name: the type, the shape, and the offsets and sizes of each piece. By name and offsets:
        the file, the first byte, and the number of bytes.

    Raises:
        PickleFault: it is not an index, or has an entry that is not a tensor.
    """
    whole = _of(read_pickle(data, most_opcodes), f"{_PLACE}.Metadata")
    entries, stored = whole["state_dict_metadata"], whole["storage_data"]
    if type(entries) is not dict or type(stored) is not dict:
        raise PickleFault("it lists no tensors")
    tensors: Tensors = {}
    for name, value in entries.items():
        entry = _of(value, f"{_PLACE}.TensorStorageMetadata", name)
        properties = _of(entry["properties"], f"{_PLACE}.TensorProperties", name)
        state: Any = properties.state
        chunks = entry["chunks"]
        if type(state) is not tuple or not state or type(chunks) is not list:
            raise PickleFault("it has a tensor without type or pieces")
        dtype = state[0].name.removeprefix("torch.") if type(state[0]) is _Named else None
        pieces = [_of(chunk, f"{_PLACE}.ChunkStorageMetadata", name) for chunk in chunks]
        tensors[name] = dtype, entry["size"], [(_sizes(c["offsets"]), c["sizes"]) for c in pieces]
    places: Places = {}
    for key, value in stored.items():
        index, info = _of(key, f"{_PLACE}.MetadataIndex"), _of(value, _STORED)
        if type(index["fqn"]) is not str or info["transform_descriptors"]:
            raise PickleFault("it has a place without a name, or of an unknown kind")
        place = index["fqn"], _sizes(index["offset"])
        places[place] = info["relative_path"], info["offset"], info["length"]
    return tensors, places


def _of(value: object, name: str, tensor: object = None) -> PickledInstance:
    if not isinstance(value, PickledInstance) or value.name != name:
        of = f"{ascii(tensor)[1:-1][:80]} is not a tensor: " if type(tensor) is str else ""
        raise PickleFault(f"{of}it lacks a {name.rpartition('.')[2]} at its place")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    # Numbers alone, so hashing them is quick.
    if not isinstance(value, tuple) or not all(type(size) is int for size in value):
        raise PickleFault("it has a piece without offsets")
    return value

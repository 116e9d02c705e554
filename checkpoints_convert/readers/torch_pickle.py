"""Reads the pickle inside a torch file: a machine of its own that can build tensors' descriptions and nothing else.

A pickle is a program. Python's ``Unpickler`` can be told which globals to find, but goes on to call, to build and to
set state on whatever it has, and its C form takes lengths and recursion from the file. Here the program is run by
twenty instructions: there is no import and no call in this file, a global is a pair of strings compared with a list,
and each instruction makes at most one small value, so that memory is bounded by the length of the pickle. Every other
instruction, and every other global, is refused by name.
"""

import pickle
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from checkpoints_convert.readers.stored_zip import shown
from jaxspec.errors import UserError

# A 405B shard's pickle has 150 KB, and a value takes some hundred bytes of memory per byte of a hostile one.
MAX_PICKLE: Final = 4 << 20
_MAX_NAME: Final = 256  # of a module or global
_MAX_INTEGER_BYTES: Final = 8

# Storage class -> dtype, as safetensors calls it. Those without one are read up to here and refused by the tensor.
STORAGES: Final = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "BoolStorage": "BOOL",
    "DoubleStorage": "F64",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "UntypedStorage": "bytes",
}
_STORAGE_MODULES: Final = frozenset({"torch", "torch.storage", "torch.cuda"})
# Element types, which stand apart from the storage where that is untyped.
_DTYPES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
}
_FUNCTIONS: Final = frozenset(
    {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),  # of an untyped storage
        ("torch._utils", "_rebuild_parameter"),
        ("collections", "OrderedDict"),
    }
)

_OPCODES: Final = {
    value[0]: name
    for name, value in vars(pickle).items()
    if name.isupper() and isinstance(value, bytes) and len(value) == 1
}


class Global(NamedTuple):
    """A name that the pickle may mention."""

    module: str
    name: str


class Storage(NamedTuple):
    """A run of elements in an entry of the zip."""

    encoding: str
    key: str
    length: int


class TensorView(NamedTuple):
    """A tensor: which elements of a storage, in which order (all counted in elements)."""

    storage: Storage
    encoding: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_pickle(data: bytes, where: str) -> Any:
    """The value that the pickle describes: str, int, float, bool, None, tuple, list, dict, Global, Storage, TensorView.

    ``where`` names the file in messages. Raises UserError for anything that a saved state dict does not hold.
    """
    return _Machine(data, where).run()


class _Machine:
    def __init__(self, data: bytes, where: str) -> None:
        self._data = data
        self._where = where
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._run: dict[str, Callable[[], None]] = {
            "PROTO": lambda: self._skip(1),
            "FRAME": lambda: self._skip(8),
            "MARK": lambda: self._marks.append(len(self._stack)),
            "NONE": lambda: self._push(None),
            "NEWTRUE": lambda: self._push(True),
            "NEWFALSE": lambda: self._push(False),
            "BININT": lambda: self._push(int.from_bytes(self._take(4), "little", signed=True)),
            "BININT1": lambda: self._push(self._number(1)),
            "BININT2": lambda: self._push(self._number(2)),
            "LONG1": lambda: self._push(self._long(self._number(1))),
            "LONG4": lambda: self._push(self._long(self._number(4))),
            "BINFLOAT": lambda: self._push(struct.unpack(">d", self._take(8))[0]),
            "SHORT_BINUNICODE": lambda: self._push(self._text(self._number(1))),
            "BINUNICODE": lambda: self._push(self._text(self._number(4))),
            "BINUNICODE8": lambda: self._push(self._text(self._number(8))),
            "EMPTY_TUPLE": lambda: self._push(()),
            "TUPLE1": lambda: self._tuple(1),
            "TUPLE2": lambda: self._tuple(2),
            "TUPLE3": lambda: self._tuple(3),
            "TUPLE": lambda: self._push(tuple(self._since_mark())),
            "EMPTY_LIST": lambda: self._push([]),
            "EMPTY_DICT": lambda: self._push({}),
            "APPEND": lambda: self._append([self._pop()]),
            "APPENDS": lambda: self._append(self._since_mark()),
            "SETITEM": lambda: self._set_items([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda: self._set_items(self._since_mark()),
            "BINGET": lambda: self._push(self._recall(self._number(1))),
            "LONG_BINGET": lambda: self._push(self._recall(self._number(4))),
            "BINPUT": lambda: self._remember(self._number(1)),
            "LONG_BINPUT": lambda: self._remember(self._number(4)),
            "MEMOIZE": lambda: self._remember(len(self._memo)),
            "GLOBAL": lambda: self._push(self._global(self._line(), self._line())),
            "STACK_GLOBAL": self._stack_global,
            "INST": lambda: self._refuse(self._line(), self._line()),
            "BINPERSID": lambda: self._push(self._storage(self._pop())),
            "REDUCE": self._reduce,
            "BUILD": self._build,
        }

    def run(self) -> Any:
        while True:
            code = self._take(1)[0]
            name = _OPCODES.get(code)
            if name == "STOP":
                break
            if name not in self._run:
                called = f"the pickle instruction {name}" if name else f"byte {code}, which is no pickle instruction"
                self._fail(f"{called}: a saved state dict needs none")
            self._run[name]()
        if len(self._stack) != 1 or self._marks:
            self._fail(f"the pickle ends with {len(self._stack)} values, expected one")
        return self._stack[0]

    # What the program is made of.

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            self._fail(f"the pickle needs {count} bytes at byte {self._position}, it has {len(self._data)}")
        data = self._data[self._position : end]
        self._position = end
        return data

    def _skip(self, count: int) -> None:
        self._take(count)

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _long(self, width: int) -> int:
        if width > _MAX_INTEGER_BYTES:
            self._fail(f"an integer of {width} bytes in the pickle, expected at most {_MAX_INTEGER_BYTES}")
        return int.from_bytes(self._take(width), "little", signed=True)

    def _text(self, count: int) -> str:
        try:
            return self._take(count).decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"text in the pickle that is not UTF-8, before byte {self._position}")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position, self._position + _MAX_NAME)
        if end < 0:
            self._fail(f"a name in the pickle without an end, at byte {self._position}")
        line = self._text(end - self._position)
        self._position = end + 1
        return line

    # The stack.

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._fail("the pickle takes a value where there is none")
        return self._stack.pop()

    def _top(self) -> Any:
        if not self._stack:
            self._fail("the pickle takes a value where there is none")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            self._fail("the pickle closes a list that it did not open")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _remember(self, index: int) -> None:
        self._memo[index] = self._top()

    def _recall(self, index: int) -> Any:
        if index not in self._memo:
            self._fail(f"the pickle refers to value {index}, which it did not store")
        return self._memo[index]

    # Values.

    def _tuple(self, count: int) -> None:
        self._push(tuple([self._pop() for _ in range(count)][::-1]))

    def _append(self, values: list[Any]) -> None:
        if not isinstance(target := self._top(), list):
            self._fail(f"the pickle appends to {_kind(target)}, expected a list")
        target.extend(values)

    def _set_items(self, flat: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(flat) % 2:
            self._fail(f"the pickle sets items of {_kind(target)}, expected pairs for a dict")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # Only keys that hash in no time: a nest of tuples would not.
            if not isinstance(key, str | int):
                self._fail(f"a dict with {_kind(key)} as a key, expected names")
            if key in target:
                self._fail(f"{shown(str(key))}: there are two of that name")
            target[key] = value

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(module, str) or not isinstance(name, str):
            self._fail(f"the pickle names a global by {_kind(module)} and {_kind(name)}, expected two names")
        self._push(self._global(module, name))

    def _global(self, module: str, name: str) -> Global:
        known = (
            (module, name) in _FUNCTIONS
            or (module in _STORAGE_MODULES and name in STORAGES)
            or (module == "torch" and name in _DTYPES)
        )
        if not known:
            self._refuse(module, name)
        return Global(module, name)

    def _storage(self, identity: Any) -> Storage:
        match identity:
            case ("storage", Global(_, kind), str(key), str(), int(count)) if kind in STORAGES and count >= 0:
                return Storage(STORAGES[kind], key, count)
        self._fail(f"a persistent id that is {_kind(identity)}, expected (storage, type, key, place, count)")

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            self._fail(f"the pickle calls {_kind(function)} with {_kind(arguments)}, which is not loaded")
        match function, arguments:
            case (("collections", "OrderedDict"), ()):
                value = {}
            case (("torch._utils", "_rebuild_tensor_v2"), (storage, offset, size, stride, _, _, *metadata)):
                value = self._tensor(storage, None, offset, size, stride, metadata)
            case (("torch._utils", "_rebuild_tensor_v3"), (storage, offset, size, stride, _, _, dtype, *metadata)):
                value = self._tensor(storage, dtype, offset, size, stride, metadata)
            case (("torch._utils", "_rebuild_parameter"), (TensorView() as value, _, _)):
                pass
            case _:
                self._fail(
                    f"the pickle calls {_kind(function)} with {len(arguments)} arguments that torch does not give it"
                )
        self._push(value)

    def _tensor(
        self, storage: Any, dtype: Global | None, offset: Any, size: Any, stride: Any, metadata: list[Any]
    ) -> TensorView:
        whole = all(isinstance(numbers, tuple) and all(map(_is_count, numbers)) for numbers in (size, stride))
        if not isinstance(storage, Storage) or not _is_count(offset) or not whole or len(size) != len(stride):
            self._fail("a tensor without a storage, an offset, a size and a stride of whole numbers in the pickle")
        if any(metadata):
            self._fail("a tensor with conjugate or negative bits in the pickle; save its value")
        encoding = storage.encoding
        if dtype is not None:
            if not isinstance(dtype, Global) or dtype.name not in _DTYPES or encoding != "bytes":
                self._fail(f"an untyped tensor of {_kind(dtype)} in the pickle, expected {', '.join(_DTYPES)}")
            encoding = _DTYPES[dtype.name]
        return TensorView(storage, encoding, offset, size, stride)

    def _build(self) -> None:
        """Only what torch hangs on a state dict: the versions of its modules, which say nothing of the tensors."""
        state, target = self._pop(), self._top()
        if not isinstance(target, dict) or not isinstance(state, dict) or set(state) - {"_metadata"}:
            self._fail(f"the pickle sets the state of {_kind(target)}, which is not loaded")

    def _refuse(self, module: str, name: str) -> NoReturn:
        self._fail(
            f"asks for {shown(f'{module}.{name}')}, which is no part of a tensor: nothing was run; "
            "expected a state dict of tensors alone"
        )

    def _fail(self, what: str) -> NoReturn:
        raise UserError(f"{self._where}: {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _kind(value: Any) -> str:
    """What a value is, never its content: that may be large, or refer to itself."""
    match value:
        case Global(module, name):
            return f"{module}.{name}"
        case TensorView():
            return "a tensor"
        case Storage():
            return "a storage"
        case None:
            return "None"
        case _:
            return f"a {type(value).__name__}"

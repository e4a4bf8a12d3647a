"""What a function returned, as JSON with its tensors beside it, and back: the same types, bit for bit, never by pickle.

Numbers, texts, bytes, lists, tuples, sets and dicts, arrays and scalars of NumPy and tensors of torch are known; any
other class is only with ``register_codec``. What JSON does not have is an object with one key that begins with ``$``.
Types are compared exactly: what is derived from a known class would not come back as what it was.
"""

import hashlib
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.safetensors_format import ITEM_BYTES, Tensor
from forebay.core.starts.payload_text import is_utf8
from forebay.replay.skip.arrays import (
    ObjectArray,
    Scalar,
    of_numpy,
    of_torch,
    to_numpy,
    to_object_array,
    to_scalar,
    to_torch,
)

T = TypeVar("T")

_INT64 = range(-(2**63), 2**63)
"""What JSON's readers take for an integer."""
_ARRAY_TYPES = re.compile(r"O|<U[0-9]{1,6}")
FIRST_TEXT_BYTES, TEXT_BYTES_PER_BYTE = 16 << 20, 1_024
"""What arrays of texts may take in memory, by the length of the JSON they are in: each text has the longest's room."""


class NotStorable(ForebayError, TypeError):
    """A value, or something in it, has no form in a dump."""

    code = "not_storable"
    status = 422


class _Codec(NamedTuple):
    name: str
    to_tree: Callable[[Any], Any]
    from_tree: Callable[[Any], Any]


_codecs: dict[type, _Codec] = {}
_codecs_by_name: dict[str, _Codec] = {}


def register_codec(cls: type[T], to_tree: Callable[[T], Any], from_tree: Callable[[Any], T]) -> None:
    """Say how objects of ``cls`` are stored: ``to_tree`` makes a value that can be, ``from_tree`` the object of it.

    A dump names the class, and is loaded only where a codec for that name is registered. Registering a class of the
    same name once more, as a notebook does, replaces it.
    """
    if not isinstance(cls, type) or not callable(to_tree) or not callable(from_tree):
        raise InvalidInput("register_codec takes a class and two functions", field="cls")
    codec = _Codec(f"{cls.__module__}.{cls.__qualname__}", to_tree, from_tree)
    _codecs[cls] = _codecs_by_name[codec.name] = codec


PlainForm = Callable[[Any], tuple[Any, str] | None]
"""Returns a value to store in place of one without a codec, and the type that loads if it is a different one."""


class Entries(NamedTuple):
    """A dict for ``to_tree`` that loads as a dict. An entry that cannot be stored is left out and noted."""

    entries: Mapping[Any, Any]
    plain_form: PlainForm


class Packed(NamedTuple):
    """A value in the form in which it is stored."""

    tree: bytes
    tensors: dict[str, Tensor]
    """By their places in the value; those with larger items first, so that each one is aligned in a file."""
    notes: list[str]
    """How a load differs from the value, by place."""

    def digest(self) -> str:
        """Equal for equal values."""
        found = hashlib.blake2b(self.tree, digest_size=32)
        for name, tensor in self.tensors.items():
            found.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
            found.update(tensor.data)
        return found.hexdigest()


def pack(value: object, place: str = "result") -> Packed:
    """``value`` as it is stored, without a copy of large arrays. Raises ``NotStorable``, naming what
    cannot be."""
    packer = _Packer(place)
    try:
        tree = msgspec.json.encode(packer.pack(value))
    except RecursionError:
        raise NotStorable(f"{place} is nested too deeply, or contains itself") from None
    tensors = sorted(packer.tensors.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    return Packed(tree, dict(tensors), list(packer.notes))


def parts(value: Any, name: str, plain_form: PlainForm | None = None, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The parts of an argument that are compared, by path: not ``uid``, which is drawn anew for the same prompts."""
    value = _codecs[type(value)].to_tree(value) if type(value) in _codecs else value
    if isinstance(value, Entries):
        value, plain_form = value
    if type(value) is not dict or not depth or len(value) > 64 or {*map(type, value)} - {str}:
        yield name, value if plain_form is None else Entries({"": value}, plain_form)
        return
    yield name, sorted(value.keys() - {"uid"})
    for key in value.keys() - {"uid"}:
        yield from parts(value[key], f"{name}/{key}", plain_form, depth - 1)


class _Packer:
    def __init__(self, place: str, plain_form: PlainForm = lambda _value: None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.notes: dict[str, None] = {}
        self._path = [place]
        self._plain_form = plain_form

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _codecs:
            codec = _codecs[kind]
            return {"$object": codec.name, "tree": self.pack(codec.to_tree(value))}
        if kind in _FORMS:
            return _FORMS[kind](self, value)
        if (array := of_numpy(value)) is not None:
            return self._pack_numpy(array)
        if (tensor := of_torch(value)) is not None:
            return {"$tensor": self._add(tensor), "as": "torch"}
        if (plain := self._plain_form(value)) is not None:
            if plain[1]:
                self.notes[f"{self._path[0]}: {kind.__module__}.{kind.__qualname__} loads as {plain[1]}"] = None
            return self.pack(plain[0])
        raise NotStorable(
            f"{self._place()}: a {kind.__module__}.{kind.__qualname__} cannot be stored",
            hint="register_codec says how objects of a class are stored",
        )

    def _place(self) -> str:
        return "/".join(self._path)

    def _at(self, key: object, value: Any) -> Any:
        """``value`` as it is stored; ``key`` is what leads to it."""
        self._path.append(str(key))
        packed = self.pack(value)
        self._path.pop()
        return packed

    def _add(self, tensor: Tensor) -> str:
        name = self._place()
        # Keys with slashes, or 1 beside "1", may lead to one name twice.
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        return name

    def _pack_numpy(self, array: Tensor | ObjectArray | Scalar) -> Any:
        if isinstance(array, Tensor):
            return {"$tensor": self._add(array), "as": "numpy"}
        if isinstance(array, Scalar):
            return {"$scalar": self.pack(array.value), "dtype": array.dtype}
        return {"$array": self._items(array.items), "dtype": array.dtype, "shape": array.shape}

    def _items(self, items: Any) -> list[Any]:
        # Tokens and logprobs by the million: one look at all of them is enough.
        kinds = set(map(type, items))
        if kinds == {int} and min(items) in _INT64 and max(items) in _INT64:
            return list(items)
        if kinds == {float} and all(map(math.isfinite, items)):
            return list(items)
        return [self._at(number, item) for number, item in enumerate(items)]

    def pack_dict(self, value: dict[Any, Any]) -> Any:
        return self._keyed({key: self._at(key, item) for key, item in value.items()})

    def _keyed(self, packed: dict[Any, Any]) -> Any:
        if all(type(key) is str and not key.startswith("$") and is_utf8(key) for key in packed):
            return packed
        return {"$dict": [[self._at("key", key), item] for key, item in packed.items()]}

    def pack_entries(self, value: Entries) -> Any:
        packed = {}
        for key, item in value.entries.items():
            entry = _Packer(f"{self._place()}/{key}", value.plain_form)
            entry.tensors |= self.tensors
            try:
                packed[key] = entry.pack(item)
            except Exception as error:  # noqa: BLE001 - NotStorable, or what a property of a user's object raises
                self.notes[f"{self._place()}/{key} is left out: {str(error) or type(error).__name__}"] = None
            else:
                self.tensors, self.notes = entry.tensors, self.notes | entry.notes
        return self._keyed(packed)

    def pack_list(self, value: Any) -> Any:
        return self._items(value)

    def pack_tuple(self, value: Any) -> Any:
        return {"$tuple": self._items(value)}

    def pack_set(self, value: Any) -> Any:
        # In an order of its own: the same set may be walked in another one in the next process.
        return {f"${type(value).__name__}": sorted(self._items(value), key=msgspec.json.encode)}

    def pack_bytes(self, value: bytes) -> Any:
        return {"$bytes": b64encode(value).decode()}

    def pack_str(self, value: str) -> Any:
        if is_utf8(value):
            return value
        return {"$text": b64encode(value.encode("utf-8", "surrogatepass")).decode()}

    def pack_int(self, value: int) -> Any:
        # In hexadecimal, which has no limit of digits.
        return value if value in _INT64 else {"$int": hex(value)}

    def pack_float(self, value: float) -> Any:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def pack_plain(self, value: Any) -> Any:
        return value


_FORMS: dict[type, Callable[[_Packer, Any], Any]] = {
    type(None): _Packer.pack_plain,
    bool: _Packer.pack_plain,
    int: _Packer.pack_int,
    float: _Packer.pack_float,
    str: _Packer.pack_str,
    bytes: _Packer.pack_bytes,
    list: _Packer.pack_list,
    tuple: _Packer.pack_tuple,
    set: _Packer.pack_set,
    frozenset: _Packer.pack_set,
    dict: _Packer.pack_dict,
    Entries: _Packer.pack_entries,
}


def unpack(tree: bytes | bytearray, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was packed; its arrays are views of ``tensors``.

    Raises ``InvalidInput`` where a codec is missing, ``MissingExtra`` without NumPy or torch where the value has their
    arrays, and ``ValueError`` or ``KeyError`` where ``tree`` was never made by ``pack``.
    """
    most_text_bytes = FIRST_TEXT_BYTES + TEXT_BYTES_PER_BYTE * len(tree)
    return _Unpacker(tensors, most_text_bytes).unpack(msgspec.json.decode(tree))


class _Unpacker:
    def __init__(self, tensors: Mapping[str, Tensor], most_text_bytes: int) -> None:
        self._tensors = tensors
        self._text_bytes_left = most_text_bytes
        self._forms: dict[str, Callable[[dict[str, Any]], Any]] = {
            "$tensor": self._tensor,
            "$array": self._array,
            "$scalar": lambda tree: to_scalar(Scalar(tree["dtype"], self.unpack(tree["$scalar"]))),
            "$object": self._object,
            "$dict": lambda tree: {self.unpack(key): self.unpack(value) for key, value in tree["$dict"]},
            "$tuple": lambda tree: tuple(self.unpack(tree["$tuple"])),
            "$set": lambda tree: set(self.unpack(tree["$set"])),
            "$frozenset": lambda tree: frozenset(self.unpack(tree["$frozenset"])),
            "$bytes": lambda tree: b64decode(tree["$bytes"]),
            "$text": lambda tree: b64decode(tree["$text"]).decode("utf-8", "surrogatepass"),
            "$int": lambda tree: int(tree["$int"], 16),
            "$float": lambda tree: float(tree["$float"]),
        }

    def unpack(self, tree: Any) -> Any:
        if isinstance(tree, list):
            if {dict, list}.isdisjoint(map(type, tree)):
                return tree
            return [self.unpack(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        first = next(iter(tree), "")
        if first.startswith("$"):
            return self._forms[first](tree)
        return {key: self.unpack(value) for key, value in tree.items()}

    def _tensor(self, tree: dict[str, Any]) -> Any:
        make = {"torch": to_torch, "numpy": to_numpy}[tree["as"]]
        return make(self._tensors[tree["$tensor"]])

    def _array(self, tree: dict[str, Any]) -> Any:
        if not _ARRAY_TYPES.fullmatch(tree["dtype"]):
            raise ValueError(f"no type of an array: {tree['dtype']!r}")
        array = ObjectArray(tree["dtype"], tuple(tree["shape"]), self.unpack(tree["$array"]))
        self._text_bytes_left -= 4 * int(array.dtype[2:] or 0) * len(array.items)
        if self._text_bytes_left < 0:
            raise ValueError("its arrays of texts take far more memory than there is in its files")
        return to_object_array(array)

    def _object(self, tree: dict[str, Any]) -> Any:
        name = tree["$object"]
        if name not in _codecs_by_name:
            raise InvalidInput(
                f"this value has a {name}, for which no codec is registered",
                hint="call register_codec for its class before the value is loaded",
            )
        return _codecs_by_name[name].from_tree(self.unpack(tree["tree"]))

"""Encodes a function's result as JSON plus arrays, and decodes it bit for bit with the same types, without pickle.

Supported: numbers, texts, bytes, lists, tuples, sets, dicts, NumPy arrays and scalars, and torch tensors; other classes
need ``register_codec``. What JSON cannot represent becomes an object with one key that starts with ``$``. Types must
match exactly, because an instance of a subclass would load as the base class. NumPy and torch are imported only when
needed.
"""

import hashlib
import importlib
import math
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from forebay.core.errors import ForebayError, InvalidInput, MissingExtra
from forebay.core.starts.payload_text import is_utf8

T = TypeVar("T")

_INT64 = range(-(2**63), 2**63)
"""The integers that every JSON reader accepts."""
_NUMPY_SCALARS = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
_NUMPY_DTYPES = _NUMPY_SCALARS | {"complex64"}
_TORCH_DTYPES = _NUMPY_DTYPES | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


class NotStorable(ForebayError, TypeError):
    """A value, or something inside it, cannot be stored in a dump."""

    code = "not_storable"
    status = 422


class _Codec(NamedTuple):
    name: str
    to_tree: Callable[[Any], Any]
    from_tree: Callable[[Any], Any]


_codecs: dict[type, _Codec] = {}
_codecs_by_name: dict[str, _Codec] = {}


def register_codec(cls: type[T], to_tree: Callable[[T], Any], from_tree: Callable[[Any], T]) -> None:
    """Register a codec for ``cls``: ``to_tree`` returns a storable value, and ``from_tree`` restores the object.

    A dump names the class, and loads only if a codec for that name is registered. Registering a class of the same name
    again, as a notebook does, replaces the codec.
    """
    if not isinstance(cls, type) or not callable(to_tree) or not callable(from_tree):
        raise InvalidInput("register_codec takes a class and two functions", field="cls")
    codec = _Codec(f"{cls.__module__}.{cls.__qualname__}", to_tree, from_tree)
    _codecs[cls] = _codecs_by_name[codec.name] = codec


PlainForm = Callable[[Any], tuple[Any, str] | None]
"""Returns the value to store in place of one without a codec, and the name of the loaded type if it differs."""


class Entries(NamedTuple):
    """A dict for ``to_tree`` that loads as a dict. Entries that cannot be stored are left out and noted."""

    entries: Mapping[Any, Any]
    plain_form: PlainForm


class Packed(NamedTuple):
    """The stored form of a value."""

    tree: bytes
    arrays: dict[str, Any]
    """NumPy arrays, by their path in the value."""
    notes: list[str]
    """How a loaded value will differ, by path."""

    def digest(self) -> str:
        """A hash that is equal for equal values."""
        found = hashlib.blake2b(self.tree, digest_size=32)
        for name, array in self.arrays.items():
            found.update(f"\0{name}\0{array.dtype}\0{array.shape}\0".encode())
            found.update(array)
        return found.hexdigest()


def pack(value: object, place: str = "result") -> Packed:
    """Encode ``value`` without copying large arrays. Raises ``NotStorable``, naming the part that cannot be stored."""
    packer = _Packer(lambda _value: None, {})
    try:
        tree = msgspec.json.encode(packer.pack(value, place))
    except RecursionError:
        raise NotStorable(f"{place} is nested too deeply, or contains itself") from None
    return Packed(tree, packer.arrays, list(packer.notes))


def parts(value: Any, name: str, plain_form: PlainForm | None = None, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The compared parts of an argument, by path. Leaves out ``uid``, which is random even for equal prompts."""
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
    def __init__(self, plain_form: PlainForm, arrays: dict[str, Any]) -> None:
        self.arrays = arrays
        self.notes: dict[str, None] = {}
        self._plain_form = plain_form

    def pack(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in _codecs:
            codec = _codecs[kind]
            return {"$object": codec.name, "tree": self.pack(codec.to_tree(value), place)}
        if kind in _FORMS:
            return _FORMS[kind](self, value, place)
        for library, pack in (("numpy", self._pack_numpy), ("torch", self._pack_torch)):
            # If the library is not imported, the value cannot be one of its objects.
            if library in sys.modules and (packed := pack(sys.modules[library], value, place)) is not None:
                return packed
        if (plain := self._plain_form(value)) is not None:
            if plain[1]:
                self.notes[f"{place}: {kind.__module__}.{kind.__qualname__} loads as {plain[1]}"] = None
            return self.pack(plain[0], place)
        raise NotStorable(
            f"{place}: a {kind.__module__}.{kind.__qualname__} cannot be stored",
            hint="use register_codec to define how objects of this class are stored",
        )

    def _pack_numpy(self, numpy: Any, value: Any, place: str) -> Any:
        """None for types that cannot be stored: dates, records, array subclasses."""
        if isinstance(value, numpy.str_):
            return {"$scalar": self.pack(value.item(), place), "dtype": "str"}
        if isinstance(value, numpy.generic):
            is_known = value.dtype.name in _NUMPY_SCALARS
            return {"$scalar": self.pack(value.item(), place), "dtype": value.dtype.name} if is_known else None
        if type(value) is not numpy.ndarray:
            return None
        if value.dtype.kind == "O":
            return {"$objects": self.pack_items(list(value.reshape(-1)), place), "shape": value.shape}
        plain = numpy.asarray(value, value.dtype.newbyteorder("<"), order="C")
        if value.dtype.kind == "U":
            # As code points: the shape of the stored array keeps the length of the longest text.
            return self._add(plain.reshape(-1).view("<u4").reshape(*value.shape, -1), place, "text")
        return self._add(plain, place, "numpy") if value.dtype.name in _NUMPY_DTYPES else None

    def _pack_torch(self, torch: Any, value: Any, place: str) -> Any:
        """None unless the value is a dense tensor."""
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_nested:
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        if value.device.type == "meta" or dtype not in _TORCH_DTYPES:
            return None
        # As bytes: NumPy lacks some of torch's types.
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {**self._add(plain.numpy(), place, "torch"), "dtype": dtype, "shape": tuple(value.shape)}

    def _add(self, array: Any, place: str, kind: str) -> dict[str, Any]:
        # Keys with slashes, or 1 next to "1", can produce the same name.
        while place in self.arrays:
            place += "'"
        self.arrays[place] = array
        return {"$array": place, "as": kind}

    def pack_items(self, items: Any, place: str) -> list[Any]:
        # There may be millions of tokens and logprobs, so the whole list is checked at once.
        kinds = set(map(type, items))
        if kinds == {int} and min(items) in _INT64 and max(items) in _INT64:
            return list(items)
        if kinds == {float} and all(map(math.isfinite, items)):
            return list(items)
        return [self.pack(item, f"{place}/{number}") for number, item in enumerate(items)]

    def pack_dict(self, value: dict[Any, Any], place: str) -> Any:
        return self._keyed({key: self.pack(item, f"{place}/{key}") for key, item in value.items()}, place)

    def _keyed(self, packed: dict[Any, Any], place: str) -> Any:
        if all(type(key) is str and not key.startswith("$") and is_utf8(key) for key in packed):
            return packed
        return {"$dict": [[self.pack(key, f"{place}/key"), item] for key, item in packed.items()]}

    def pack_entries(self, value: Entries, place: str) -> Any:
        packed = {}
        for key, item in value.entries.items():
            entry = _Packer(value.plain_form, dict(self.arrays))
            try:
                packed[key] = entry.pack(item, f"{place}/{key}")
            except Exception as error:  # noqa: BLE001 - NotStorable, or what a property of a user's object raises
                self.notes[f"{place}/{key} is left out: {str(error) or type(error).__name__}"] = None
            else:
                self.arrays, self.notes = entry.arrays, self.notes | entry.notes
        return self._keyed(packed, place)

    def pack_set(self, value: Any, place: str) -> Any:
        # Sorted, because the order of a set may differ in the next process.
        return {f"${type(value).__name__}": sorted(self.pack_items(value, place), key=msgspec.json.encode)}


def _pack_text(value: str) -> Any:
    return value if is_utf8(value) else {"$text": b64encode(value.encode("utf-8", "surrogatepass")).decode()}


_FORMS: dict[type, Callable[[_Packer, Any, str], Any]] = {
    type(None): lambda _packer, value, _place: value,
    bool: lambda _packer, value, _place: value,
    # In hexadecimal, which Python converts without a limit on digits.
    int: lambda _packer, value, _place: value if value in _INT64 else {"$int": hex(value)},
    float: lambda _packer, value, _place: value if math.isfinite(value) else {"$float": repr(value)},
    str: lambda _packer, value, _place: _pack_text(value),
    bytes: lambda _packer, value, _place: {"$bytes": b64encode(value).decode()},
    list: _Packer.pack_items,
    tuple: lambda packer, value, place: {"$tuple": packer.pack_items(value, place)},
    set: _Packer.pack_set,
    frozenset: _Packer.pack_set,
    dict: _Packer.pack_dict,
    Entries: _Packer.pack_entries,
}


def unpack(tree: bytes, arrays: Mapping[str, Any]) -> Any:
    """Decode a packed value, with ``arrays`` inserted.

    Raises ``InvalidInput`` if a codec is missing, ``MissingExtra`` if the value needs NumPy or torch and these are not
    installed, and ``ValueError`` or ``KeyError`` if ``tree`` was not made by ``pack``.
    """
    return _Unpacker(arrays).unpack(msgspec.json.decode(tree))


class _Unpacker:
    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self._forms: dict[str, Callable[[dict[str, Any]], Any]] = {
            "$array": self._array,
            "$objects": self._objects,
            "$scalar": self._scalar,
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

    def _array(self, tree: dict[str, Any]) -> Any:
        array = self._arrays[tree["$array"]]
        if tree["as"] == "text":
            return array.reshape(-1).view(f"<U{array.shape[-1]}").reshape(array.shape[:-1])
        if tree["as"] == "numpy":
            return array
        if tree["as"] != "torch" or tree["dtype"] not in _TORCH_DTYPES:
            raise ValueError(f"unknown kind of array: {tree!r}")
        torch = import_extra("torch")
        return torch.from_numpy(array).view(getattr(torch, tree["dtype"])).reshape(tree["shape"])

    def _objects(self, tree: dict[str, Any]) -> Any:
        items = self.unpack(tree["$objects"])
        made = import_extra("numpy").empty(len(items), object)
        # One by one: NumPy would turn items that are lists into further dimensions.
        for number, item in enumerate(items):
            made[number] = item
        return made.reshape(tree["shape"])

    def _scalar(self, tree: dict[str, Any]) -> Any:
        if tree["dtype"] not in _NUMPY_SCALARS | {"str"}:
            raise ValueError(f"unknown type of scalar: {tree['dtype']!r}")
        return import_extra("numpy").dtype(tree["dtype"]).type(self.unpack(tree["$scalar"]))

    def _object(self, tree: dict[str, Any]) -> Any:
        name = tree["$object"]
        if name not in _codecs_by_name:
            raise InvalidInput(
                f"this value contains a {name}, for which no codec is registered",
                hint="call register_codec for the class before loading the value",
            )
        return _codecs_by_name[name].from_tree(self.unpack(tree["tree"]))


def import_extra(name: str) -> Any:
    """Import a module of the extra ``torch``. Raises ``MissingExtra``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(error.name or name, "torch") from None

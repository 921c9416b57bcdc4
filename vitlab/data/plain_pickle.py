"""The data in a pickle: numbers, text, bytes, lists, dicts and numpy's arrays. Nothing in it is ever called.

A pickle is a program for a machine with a stack. Python's own machine imports and calls whatever the program names;
this one knows the few instructions that data needs, and ends at any other. No value is copied and nothing is allocated
on a claim, so that the memory it takes follows from the file's size.
"""

from collections.abc import Callable
from dataclasses import dataclass

# What numpy's arrays are pickled as, under the names of numpy 1 and 2, and what Python 3 pickles bytes as.
RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
NDARRAY, DTYPE, ENCODE = ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")
MOST_KEY = 200  # characters


class NotPlain(ValueError):
    """A pickle that is damaged, or holds more than data."""


@dataclass
class Name:
    """A function or class that a pickle names; it is compared with those above, never looked up."""

    parts: tuple[str, str]


@dataclass
class Kind:
    """numpy's type of an array's elements, such as "u1"."""

    code: str


@dataclass
class Array:
    """An array as it was pickled: shape, type of its elements, and their bytes."""

    shape: tuple[object, ...] = ()
    code: str = ""
    raw: bytes | str = b""  # text stands for its encoding in Latin-1

    def tobytes(self) -> bytes:
        try:
            return self.raw if isinstance(self.raw, bytes) else self.raw.encode("latin-1")
        except UnicodeError:
            raise NotPlain("it is damaged") from None


def read_pickle(data: bytes) -> object:
    """The content of a pickle; raises NotPlain."""
    machine = Machine(data)
    try:
        while (code := machine.take(1)) != b".":
            instruction = INSTRUCTIONS.get(code)
            if instruction is None:
                raise NotPlain(f"it has the instruction {code!r}, which is not for data")
            instruction(machine)
        return machine.stack.pop()
    except (IndexError, KeyError, UnicodeError):  # an empty stack, an unknown number in the memo, text that is none
        raise NotPlain("it is damaged") from None


class Machine:
    """The state of the reading: a place in the file, the stack with its marks, and values to be used again."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise NotPlain("it is cut short")
        self.at += count
        return part

    def skip(self, count: int) -> None:
        self.take(count)

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + MOST_KEY)
        if end < 0:
            raise NotPlain("it is cut short")
        return self.take(end + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list[object]:
        """The values above the last mark, removed together with it."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def last(self, count: int) -> list[object]:
        if len(self.stack) < count:
            raise NotPlain("it is damaged")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise NotPlain("it is damaged")
        target.extend(values)

    def update(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise NotPlain("it is damaged")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes) or len(key) > MOST_KEY:  # the hash of others can take forever
                raise NotPlain("a key of it is not a short text")
            target[key if isinstance(key, str) else key.decode("latin-1")] = value

    def reduce(self) -> None:
        """A call, which is carried out only in so far as its result is data."""
        function, given = self.last(2)
        match function, given:
            case Name(parts), (Name(kind), *_) if parts in RECONSTRUCT and kind == NDARRAY:
                self.push(Array())
            case Name(parts), (str() | bytes() as code, *_) if parts == DTYPE:
                self.push(Kind(code if isinstance(code, str) else code.decode()))
            case Name(parts), (str() as text, *_) if parts == ENCODE:
                self.push(text)  # encoded where it is used
            case Name(parts), _:
                raise NotPlain(f"it asks to call {'.'.join(parts)[:MOST_KEY]!r}")
            case _:
                raise NotPlain("it is damaged")

    def build(self) -> None:
        """The state of an array; that of a type adds nothing to it."""
        (state,) = self.last(1)
        match self.stack[-1], state:
            case Kind(), _:
                pass
            case Array() as array, (1, tuple() as shape, Kind(code), False | 0, str() | bytes() as raw):
                array.shape, array.code, array.raw = shape, code, raw
            case _:
                raise NotPlain("it is damaged")

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise NotPlain("it is damaged")
        self.push(Name((module, name)))


def remember(machine: Machine, number: int) -> None:
    machine.memo[number] = machine.stack[-1]


Instruction = Callable[[Machine], None]
INSTRUCTIONS: dict[bytes, Instruction] = {
    b"\x80": lambda m: m.skip(1),  # the protocol
    b"\x95": lambda m: m.skip(8),  # a frame's length
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    b"U": lambda m: m.push(m.take(m.number(1))),
    b"T": lambda m: m.push(m.take(m.number(4))),
    b"C": lambda m: m.push(m.take(m.number(1))),
    b"B": lambda m: m.push(m.take(m.number(4))),
    b"\x8c": lambda m: m.push(m.take(m.number(1)).decode()),
    b"X": lambda m: m.push(m.take(m.number(4)).decode()),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"\x85": lambda m: m.push(tuple(m.last(1))),
    b"\x86": lambda m: m.push(tuple(m.last(2))),
    b"\x87": lambda m: m.push(tuple(m.last(3))),
    b"a": lambda m: m.extend(m.last(1)),
    b"e": lambda m: m.extend(m.since_mark()),
    b"s": lambda m: m.update(m.last(2)),
    b"u": lambda m: m.update(m.since_mark()),
    b"q": lambda m: remember(m, m.number(1)),
    b"r": lambda m: remember(m, m.number(4)),
    b"\x94": lambda m: remember(m, len(m.memo)),
    b"h": lambda m: m.push(m.memo[m.number(1)]),
    b"j": lambda m: m.push(m.memo[m.number(4)]),
    b"c": lambda m: m.name(m.line(), m.line()),
    b"\x93": lambda m: m.name(*m.last(2)),
    b"R": lambda m: m.reduce(),
    b"b": lambda m: m.build(),
}

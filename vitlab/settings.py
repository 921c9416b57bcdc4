"""Settings as frozen dataclasses: each field declares its type, default, range and help text once.

    @dataclass(frozen=True)
    class Augment:
        mixup: Annotated[float, Range(0, 1), "Mixup's alpha; 0: none"] = 0.0

        def __post_init__(self) -> None:
            check_types(self)

From that one line follow the checks, JSON in and out, `key=value` text on the command line, the arguments and help of
functions (`takes`) and the tables of the docs (`describe`).
"""

import dataclasses
import difflib
import functools
import inspect
import json
import logging
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from vitlab.errors import UserError
from vitlab.text import listed

log = logging.getLogger("vitlab")

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
INF = float("inf")


@dataclass(frozen=True)
class Range:
    """The numbers that a setting accepts: from `least` to `most`, strictly between `above` and `below`."""

    least: float = -INF
    most: float = INF
    above: float = -INF
    below: float = INF

    def check(self, value: Any, name: str) -> None:
        """Raise UserError unless a number, or each number of a list, is in the range."""
        numbers = value if is_list(value) else (value,)
        if not all(self.least <= v <= self.most and self.above < v < self.below for v in numbers):
            shown = f"{value:,}" if isinstance(value, int) else value
            raise UserError(f"{name} must be {self}, not {shown}")

    def __str__(self) -> str:
        if self.above == 0:
            return "positive"
        bounds = [f"at least {self.least:,}"] if self.least > -INF else []
        bounds += [f"at most {self.most:,}"] if self.most < INF else []
        bounds += [f"below {self.below:,}"] if self.below < INF else []
        return " and ".join(bounds) or "finite"


POSITIVE, RATE = Range(above=0), Range(0, below=1)


@dataclass(frozen=True)
class Setting:
    """One setting as a table shows it."""

    name: str
    type: str
    default: str  # empty: required, or chosen by something else
    help: str


# ---- what a class declares


@functools.cache
def annotations(kind: Any) -> dict[str, Any]:
    """Each field's complete annotation, by name."""
    return typing.get_type_hints(kind, include_extras=True)


def hints(kind: Any) -> dict[str, Any]:
    """Each field's plain type, by name."""
    return typing.get_type_hints(kind)


def describe(kind: Any, skip: Iterable[str] = ()) -> list[Setting]:
    """The settings that a class declares, in order."""
    found = []
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            notes = getattr(annotations(kind)[field.name], "__metadata__", ())
            text = next((note for note in notes if isinstance(note, str)), "")
            default = "" if field.default is dataclasses.MISSING else _show(field.default)
            found.append(Setting(field.name, type_name(hints(kind)[field.name]), default, text))
    return found


def type_name(hint: Any) -> str:
    """A type as people write its values: `int`, `a|b|c`, `int,int`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return type_name(args[0])
    if origin is tuple:
        return f"{type_name(args[0])},..." if args[-1] is Ellipsis else ",".join(map(type_name, args))
    return getattr(hint, "__name__", str(hint))


def _show(value: Any) -> str:
    if is_list(value):
        return ",".join(map(_show, value))
    return str(value).lower() if value is None or isinstance(value, bool) else f"{value}"


def takes(kind: type[Any], skip: Iterable[str] = (), **defaults: Any) -> Callable[[F], F]:
    """Let a function with `**settings` show the fields of `kind` as its keyword arguments, in `help` too.

    `defaults` are those that differ from the class's; a field without any is None, which the function replaces.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for field in dataclasses.fields(kind):
            if field.name not in skip:
                default = None if field.default is dataclasses.MISSING else field.default
                given = defaults.get(field.name, default)
                hint = hints(kind)[field.name] | None if given is None else hints(kind)[field.name]
                keyword = inspect.Parameter.KEYWORD_ONLY
                kept.append(inspect.Parameter(field.name, keyword, default=given, annotation=hint))
        shown = describe(kind, skip)
        width = max(len(setting.name) for setting in shown)
        table = "\n".join(f"    {s.name:{width}}  {s.help} ({s.type})" for s in shown)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nSettings:\n{table}\n"
        function.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
        return function

    return decorate


# ---- checks: every value of a config is what its annotation declares, whatever it came from


def is_list(value: object) -> typing.TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def check_types(config: Any) -> None:
    """Replace each field by its checked value (an int where a float belongs becomes one; lists become tuples)."""
    kind: Any = type(config)
    for name, hint in annotations(kind).items():
        object.__setattr__(config, name, check_value(getattr(config, name), hint, name))


def check_value(value: Any, hint: Any, name: str) -> Any:
    """The value as its annotation has it, or UserError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = check_value(value, args[0], name)
        for note in args[1:]:
            if isinstance(note, Range) and value is not None:
                note.check(value, name)
        return value
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise UserError(f"{name} must be {listed(map(repr, args))}, not {value!r}")
    if origin in (types.UnionType, typing.Union):  # only "X | None" occurs
        return None if value is None else check_value(value, args[0], name)
    if origin is tuple and is_list(value):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(value) == len(kinds):
            return tuple(check_value(v, k, name) for v, k in zip(value, kinds, strict=True))
    if hint is float and type(value) is int:
        if abs(value) >> 1000:
            raise UserError(f"{name} is a number of {value.bit_length():,} bits, which is too large")
        return float(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_json(typing.cast(type[Any], hint), value)
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise UserError(f"{name} must be {_plain(hint)}, not {value!r}")


def _plain(hint: Any) -> str:
    words = {int: "an integer", float: "a number", str: "a word", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        return "a list of " + {int: "integers", float: "numbers"}.get(typing.get_args(hint)[0], "words")
    return words.get(hint, f"a {getattr(hint, '__name__', hint)}")


def is_number(hint: Any) -> bool:
    """Whether an annotation is of one number."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, types.UnionType, typing.Union):
        return is_number(args[0])
    return hint in (int, float)


def check_key(key: str, known: Iterable[str]) -> None:
    """Raise UserError for a key that is not known, with the nearest one that is."""
    names = list(known)
    if key not in names:
        near = difflib.get_close_matches(key, names, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"
        raise UserError(f"there is no setting '{key}'; {hint}")


def check_all(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the annotations in `known` have them; UserError for an unknown key or a wrong value."""
    checked = {}
    for key, value in values.items():
        check_key(key, known)
        checked[key] = check_value(value, known[key], key)
    return checked


# ---- JSON and `key=value`


def to_json(config: Any) -> dict[str, Any]:
    """Plain dicts and lists; `from_json` is its inverse."""
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists
    return data


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass from a mapping, or UserError for unknown and missing keys and for wrong values."""
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    for key in data:
        check_key(key, fields)
    unset = dataclasses.MISSING
    missing = [n for n, f in fields.items() if n not in data and f.default is unset and f.default_factory is unset]
    if missing:
        raise UserError(f"{kind.__name__} lacks {listed(missing)}")
    return kind(**data)


def parse_settings(pairs: Iterable[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """`["dropout=0.1", "image_size=384"]` as typed values, by the annotations in `known`."""
    settings: dict[str, Any] = {}
    for pair in last_of(pairs):
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"'{pair}' is not a setting; write key=value, such as dropout=0.1")
        check_key(key, known)
        settings[key] = check_value(parse_value(text, known[key], key), known[key], key)
    return settings


def last_of(pairs: Iterable[str]) -> list[str]:
    """The last pair of each key, as of a script that appends what differs, with a warning of the values it replaces."""
    given: dict[tuple[str, str], list[str]] = {}
    for pair in pairs:
        given.setdefault(pair.partition("=")[:2], []).append(pair)
    for (key, _), every in given.items():
        used, *others = dict.fromkeys(pair.partition("=")[2] for pair in reversed(every))
        if others:
            times = "twice" if len(every) == 2 else f"{len(every)} times"
            log.warning("%s is given %s: %s is used, not %s", key, times, used, listed(reversed(others)))
    return [every[-1] for every in given.values()]


def to_pairs(settings: Mapping[str, Any]) -> list[str]:
    """Values as `key=value`, which `parse_settings` reads; a value that cannot be one is its error."""
    return [f"{key}={_show(value)}" for key, value in settings.items()]


def parse_value(text: str, hint: Any, name: str) -> Any:
    """Text as a value of a type, or UserError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return parse_value(text, args[0], name)
    if origin in (types.UnionType, typing.Union):
        is_word = typing.get_origin(args[0]) is Literal  # positions=none is a word, not the lack of one
        return None if text == "none" and not is_word else parse_value(text, args[0], name)
    if origin is tuple:
        parts = text.replace("x", ",").split(",")
        fixed = args[-1] is not Ellipsis
        parts = parts * len(args) if fixed and len(parts) == 1 else parts
        kinds = args if fixed and len(parts) == len(args) else args[:1] * len(parts)
        return [parse_value(part, kind, name) for part, kind in zip(parts, kinds, strict=True)]
    try:
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        return hint(text) if hint in (int, float) else text
    except (KeyError, ValueError):
        raise UserError(f"{name} must be {_plain(hint)}, not '{text}'") from None

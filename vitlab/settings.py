"""Settings as frozen dataclasses: types checked once, JSON in and out, `key=value` text from the command line."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from vitlab.errors import UserError
from vitlab.text import listed


def is_list(value: object) -> typing.TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def at_least(config: object, field: str, lowest: int) -> None:
    value = getattr(config, field)
    if value < lowest:
        raise UserError(f"{field} must be at least {lowest}, not {value}")


def check_positive(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not all(0 < v < float("inf") for v in (value if is_list(value) else (value,))):
            raise UserError(f"{field} must be positive, not {value}")


def check_rate(config: object, field: str) -> None:
    value = getattr(config, field)
    if not 0 <= value < 1:
        raise UserError(f"{field} must be at least 0 and below 1, not {value}")


T = TypeVar("T")


def check_types(config: Any) -> None:
    """Replace each field by its checked value (an int where a float belongs becomes one; lists become tuples)."""
    for name, hint in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, check_value(getattr(config, name), hint, name))


def check_value(value: Any, hint: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
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
        return float(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_json(typing.cast(type[Any], hint), value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise UserError(f"{name} must be {_plain(hint)}, not {value!r}")


def _plain(hint: Any) -> str:
    words = {int: "an integer", float: "a number", str: "a word", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        return "a list of " + {int: "integers", float: "numbers"}.get(typing.get_args(hint)[0], "words")
    return words.get(hint, f"a {getattr(hint, '__name__', hint)}")


def to_json(config: Any) -> dict[str, Any]:
    """Plain dicts and lists; `from_json` is its inverse."""
    data: dict[str, Any] = _lists(dataclasses.asdict(config))
    return data


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(v) for key, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, tuple) else value


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    for key in data:
        known_key(key, fields)
    missing = [
        n
        for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{kind.__name__} lacks {listed(missing)}")
    return kind(**data)


def known_key(key: str, known: Iterable[str]) -> None:
    names = list(known)
    if key not in names:
        near = difflib.get_close_matches(key, names, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"
        raise UserError(f"there is no setting '{key}'; {hint}")


def parse_settings(pairs: Iterable[str], hints: Mapping[str, Any]) -> dict[str, Any]:
    """`["dropout=0.1", "image_size=384"]` as typed values, by the annotations in `hints`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"'{pair}' is not a setting; write key=value, such as dropout=0.1")
        known_key(key, hints)
        settings[key] = check_value(parse_value(text, hints[key], key), hints[key], key)
    return settings


def parse_value(text: str, hint: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
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

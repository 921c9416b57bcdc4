"""Help pages and the command line's own words: verbs in groups, one style of metavars, one example per line.

Values of options are capitals (`--out PATH`, `--batch N`), flags have none. `-v` may stand anywhere.
"""

import inspect
import logging
import typing
from collections.abc import Container
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from vitlab.errors import UserError
from vitlab.terminal import Terminal

GROUPS = {
    "Your photos": ("demo", "finetune", "predict", "serve", "report", "evaluate", "inspect", "embed", "search", "data"),
    "Research": (
        *("train", "recipes", "bench", "bench compare", "fewshot", "probe", "vtab", "study", "transfer", "results"),
        *("models", "cost"),
    ),
    "Tools": ("export", "convert", "data shrink"),
}
METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
VERBOSE = ("-v", "--verbose")
VERBOSE_HELP = "Print details too, such as every default that a file of weights leaves open."


class Verb(TyperCommand):
    """A verb: its help page, and advice where a setting is written as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, words = list(args), take_verbose(args)
        try:
            return super().parse_args(ctx, words)
        except Exception as error:
            name = getattr(error, "option_name", None)  # an unknown option; typer's class for it is private
            if name is not None and any(parameter.name == "settings" for parameter in self.params):
                check_setting(name, given)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(usage(parameter) for parameter in self.params if is_argument(parameter))]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        terminal = Terminal()
        with terminal.capture() as page:
            print_head(terminal, self.get_usage(ctx), self.help or "")
            kinds = typing.get_type_hints(inspect.unwrap(self.callback)) if self.callback else {}
            arguments = [(name_of(p), describe(p)) for p in self.params if is_argument(p)]
            options = [(option_text(p, kinds.get(p.name)), describe(p)) for p in self.params if not is_argument(p)]
            common = [(", ".join(VERBOSE), Text(VERBOSE_HELP)), ("-h, --help", Text("Show this page."))]
            print_rows(terminal, "Arguments:", arguments)
            print_rows(terminal, "Options:", [*options, *common])
            print_examples(terminal, self.epilog or "")
        write_page(formatter, page.get())


class Verbs(TyperGroup):
    """The verbs of the program, in the groups of its help page."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # typer's own way to show the page without arguments prints nothing of a page that is not typer's
        return super().parse_args(ctx, take_verbose(args) or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The verb that the words begin with; its name may be two of them."""
        return super().resolve_command(ctx, join_name(args, self.commands))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        terminal = Terminal()
        with terminal.capture() as page:
            print_head(terminal, self.get_usage(ctx), self.help or "")
            for title, names in GROUPS.items():
                found = [(name, self.commands[name]) for name in names if name in self.commands]
                width = max(map(len, self.commands))
                rows = [(name, Text(paragraphs(command.help or "")[0])) for name, command in found]
                print_rows(terminal, f"{title}:", rows, width)
            common = [("--version", Text("Print the version.")), (", ".join(VERBOSE), Text(VERBOSE_HELP))]
            print_rows(terminal, "Options:", [*common, ("-h, --help", Text("Show this page, or a verb's."))])
            terminal.print(Text(f"\n{self.epilog or ''}"))
        write_page(formatter, page.get())


# ---- what is typed


def join_name(args: list[str], names: Container[str]) -> list[str]:
    """The words with the first two as one where they are the name of a verb: bench compare."""
    both = " ".join(args[:2])
    return [both, *args[2:]] if both in names else args


def take_verbose(args: list[str]) -> list[str]:
    """The words without `-v`, which makes the package's log complete."""
    rest = [word for word in args if word not in VERBOSE]
    if len(rest) < len(args):
        logging.getLogger("vitlab").setLevel(logging.DEBUG)
    return rest


def check_setting(option: str, given: list[str]) -> None:
    """Raise UserError with `key=value` for an unknown option that is the name of a setting."""
    from vitlab.training.recipe import keys
    from vitlab.training.search import Repeats

    key = option.lstrip("-").replace("-", "_")
    if key not in keys() and key not in typing.get_type_hints(Repeats):
        return
    joined = next((word for word in given if word.startswith(f"{option}=")), None)
    after = given[given.index(option) + 1 :] if option in given else []
    value = joined.partition("=")[2] if joined else after[0] if after and not after[0].startswith("--") else "VALUE"
    raise UserError(f"there is no option {option}; it is a setting, written without dashes: {key}={value}")


# ---- parts of a page


def is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def name_of(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def usage(argument: Any) -> str:
    """An argument in the line of usage: RUN, [DATA], PATH..., [KEY=VALUE]..."""
    name, many = name_of(argument).removesuffix("..."), "..." if argument.nargs != 1 else ""
    return f"{name}{many}" if argument.required or name.startswith("[") else f"[{name}]{many}"


def option_text(option: Any, kind: Any) -> str:
    """An option with its metavar: --out PATH; a flag has none."""
    names = ", ".join(option.opts)
    if option.is_flag:
        return names
    kinds = [each for each in (kind, *typing.get_args(kind)) if each in METAVARS]
    return f"{names} {option.metavar or METAVARS[kinds[0] if kinds else str]}"


def describe(parameter: Any) -> Text:
    """The help of an argument or an option, with its default and its variable."""
    text = Text(parameter.help or "")
    shown, default = getattr(parameter, "show_default", True), parameter.default
    plain = default is not None and not callable(default) and not getattr(parameter, "is_flag", False)
    if isinstance(shown, str) or (shown and plain and default != [] and default != ()):
        text.append(f" [default: {shown if isinstance(shown, str) else default}]", "dim")
    if parameter.envvar:
        text.append(f" [variable: {parameter.envvar}]", "dim")
    return text


def write_page(formatter: Any, page: str) -> None:
    """Without the spaces that fill the cells of tables."""
    formatter.write("\n".join(line.rstrip() for line in page.splitlines()) + "\n")


def print_head(terminal: Terminal, usage: str, text: str) -> None:
    """The line of usage and a docstring, each paragraph as one line, which the terminal wraps."""
    terminal.print(Text(usage, "bold"), "", Text("\n\n".join(paragraphs(text))), sep="\n")


def paragraphs(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.split("\n\n")]


def print_rows(terminal: Terminal, title: str, rows: list[tuple[str, Text]], width: int | None = None) -> None:
    """A titled table without lines."""
    if not rows:
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan", min_width=width)
    table.add_column()
    for name, text in rows:
        table.add_row(Text(name), text)
    terminal.print("", Text(title, "bold"), Padding(table, (0, 0, 0, 2)), sep="\n")


def print_examples(terminal: Terminal, epilog: str) -> None:
    """The examples of a verb, a line each: a long one is not broken, so that it can be copied."""
    terminal.print("", Text("Examples:", "bold"), sep="\n")
    for example in epilog.splitlines():
        terminal.print(f"  {example}", soft_wrap=True)

"""The Typer application: what all commands share, and the list of them."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from ckptio.cli.output import print_error
from ckptio.errors import (
    CkptioError,
    CorruptionError,
    InvalidOptionError,
    InvalidURIError,
    LeafNotFoundError,
    MismatchError,
    NotFoundError,
    UnknownSchemeError,
)

__all__ = ["NO", "app", "command", "parse_duration", "parse_options", "parse_size"]

NO = 1
"""Exit code of a command that worked and whose answer is no."""

F = TypeVar("F", bound=Callable[..., Any])

_CODES: tuple[tuple[tuple[type[CkptioError], ...], int], ...] = (
    ((InvalidOptionError, InvalidURIError, UnknownSchemeError), 2),
    ((NotFoundError, LeafNotFoundError), 3),
    ((CorruptionError, MismatchError), NO),
)

app = typer.Typer(
    name="ckptio",
    help="Look at JAX checkpoints on any storage, check, copy, compare, convert and delete them.",
    epilog="Exit codes: 0 success, 1 the answer is no (damage, difference), 2 wrong usage, 3 not "
    "found, 4 another failure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Uri = Annotated[str, typer.Argument(metavar="URI", help="Of a checkpoint; a path is local.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Options = Annotated[
    list[str],
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Storage option for the driver, as fsspec spells it; JSON where it is not text. "
        "Repeatable.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from ckptio import __version__

        typer.echo(f"ckptio {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def command(example: str) -> Callable[[F], F]:
    """Register a command; the example is shown below its help, errors become exit codes."""

    def register(function: F) -> F:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except CkptioError as error:
                print_error(_as_options(str(error)))
                raise typer.Exit(_code(error)) from error
            except typer.BadParameter as error:
                print_error(error.message)
                raise typer.Exit(2) from error
            except KeyboardInterrupt as error:
                raise typer.Exit(130) from error

        # Typer asks the signature, and resolves names where the function was written.
        guarded.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
        guarded.__annotations__ = inspect.get_annotations(function, eval_str=True)
        app.command(epilog=f"Example: {example}", no_args_is_help=False)(guarded)
        return function

    return register


_ARGUMENTS = {
    "overwrite=True": "--overwrite",
    "cast=True": "--cast",
    "only=": "--only",
    "anon=True": "-o anon=true",
    "ckptio.convert": "ckptio convert",
}


def _as_options(message: str) -> str:
    """Return a message of the library's in the command's terms."""
    for argument, option in _ARGUMENTS.items():
        message = message.replace(argument, option)
    return message


def _code(error: CkptioError) -> int:
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), 4)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return storage options from ``KEY=VALUE`` arguments.

    Examples
    --------
    >>> parse_options(["anon=true", "key=abc", 'client_kwargs={"region_name": "eu"}'])
    {'anon': True, 'key': 'abc', 'client_kwargs': {'region_name': 'eu'}}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            # The text is not shown: it may be a secret.
            raise typer.BadParameter("a storage option is written KEY=VALUE")
        found[key] = _value(text)
    return found


def _value(text: str) -> Any:
    # Keys and secrets may be all digits: only what JSON alone can say is read as JSON.
    if text in ("true", "false", "null") or text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def parse_size(text: str) -> int:
    """Return bytes.

    Examples
    --------
    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size("100")
    (5000000000, 1572864, 100)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMGTP])(i?))?[bB]?\s*", text)
    if match is None:
        raise typer.BadParameter(f"not a size: {text!r} (write 500MB, 5GB or 64MiB)")
    number, unit, binary = match.groups()
    power = " kMGTP".index(unit.replace("K", "k")) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def parse_duration(text: str) -> float:
    """Return seconds.

    Examples
    --------
    >>> parse_duration("90"), parse_duration("15m"), parse_duration("1.5h"), parse_duration("7d")
    (90.0, 900.0, 5400.0, 604800.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if match is None:
        raise typer.BadParameter(f"not a duration: {text!r} (write 90s, 15m, 24h or 7d)")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def interactive() -> bool:
    """Whether somebody watches, so that a progress bar is worth showing."""
    return sys.stderr.isatty()


# What registers the commands; in the order of the help.
from ckptio.cli import look, check, move, stores  # noqa: E402, F401, I001

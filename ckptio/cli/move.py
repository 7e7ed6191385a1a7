"""``cp``, ``convert``, ``rm`` and ``gc``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptio.checkpoint import collect_garbage, delete
from ckptio.checkpoint import open as open_checkpoint
from ckptio.cli.app import (
    Json,
    Options,
    Uri,
    command,
    interactive,
    parse_duration,
    parse_options,
    parse_size,
)
from ckptio.cli.output import console, print_json, printable
from ckptio.errors import ManifestError
from ckptio.units import format_bytes

Source = Annotated[str, typer.Argument(metavar="SRC", help="URI of a checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")]
SourceOptions = Annotated[
    list[str], typer.Option("--src-option", metavar="KEY=VALUE", help="Storage option for SRC.")
]
TargetOptions = Annotated[
    list[str], typer.Option("--dst-option", metavar="KEY=VALUE", help="Storage option for DST.")
]


def _print_report(report: Any, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
    else:
        console().print(Text(printable(str(report))))


@command("ckptio cp gs://bucket/run/step-100 s3://other/run/step-100")
def cp(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Where to; in any store.")],
    overwrite: Overwrite = False,
    no_read_back: Annotated[
        bool,
        typer.Option("--no-read-back", help="Trust the connection and the store with DST."),
    ] = False,
    src_option: SourceOptions = [],  # noqa: B006  # Typer reads it, nobody writes it
    dst_option: TargetOptions = [],  # noqa: B006  # as above
    as_json: Json = False,
) -> None:
    """Copy a checkpoint: every block verified, committed last. Run it again to go on."""
    from ckptio.copying import copy

    report = copy(
        src,
        dst,
        overwrite=overwrite,
        read_back=not no_read_back,
        src_storage_options=parse_options(src_option),
        dst_storage_options=parse_options(dst_option),
        progress=interactive(),
    )
    _print_report(report, as_json)


@command("ckptio convert gs://bucket/run/step-100 model.safetensors --only 'params/**'")
def convert(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of ckptio, Orbax or safetensors.")
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="NAME.safetensors, or else a checkpoint of ckptio.")
    ],
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only leaves of these paths.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Divide a safetensors file above this.")
    ] = "5GB",
    separator: Annotated[
        str, typer.Option(metavar="TEXT", help="Between the keys of a tensor's name.")
    ] = ".",
    cast: Annotated[
        bool, typer.Option("--cast", help="Widen dtypes that safetensors lacks, losing nothing.")
    ] = False,
    overwrite: Overwrite = False,
    src_option: SourceOptions = [],  # noqa: B006  # Typer reads it, nobody writes it
    dst_option: TargetOptions = [],  # noqa: B006  # as above
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint in another format, streaming: it may be larger than memory."""
    from ckptio import converting

    report = converting.convert(
        src,
        dst,
        only=only or None,
        cast=cast,
        separator=separator,
        max_shard_size=parse_size(max_shard_size),
        overwrite=overwrite,
        src_storage_options=parse_options(src_option),
        dst_storage_options=parse_options(dst_option),
        progress=interactive(),
    )
    _print_report(report, as_json)


@command("ckptio rm s3://bucket/run/step-100 --yes")
def rm(
    uri: Uri,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    option: Options = [],  # noqa: B006  # Typer reads it, nobody writes it
    as_json: Json = False,
) -> None:
    """Delete a checkpoint, its manifest first. Other files there stay."""
    options = parse_options(option)
    try:
        with open_checkpoint(uri, storage_options=options) as checkpoint:
            what = (
                f"{checkpoint.uri}: {len(checkpoint):,} leaves, {format_bytes(checkpoint.nbytes)}"
            )
            foreign = checkpoint.format != "ckptio"
    except ManifestError:
        what, foreign = f"{uri}, whose manifest is damaged", False
    if foreign:
        raise typer.BadParameter(
            f"{uri} is another program's checkpoint, which ckptio does not delete"
        )
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here: pass --yes")
        typer.confirm(f"Delete {printable(what)}?", abort=True, err=True)
    delete(uri, storage_options=options)
    if as_json:
        print_json({"uri": uri, "deleted": True})
    else:
        console().print(Text(f"deleted {printable(what)}"))


@command("ckptio gc gs://bucket/run --grace 24h")
def gc(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Of a checkpoint, or of a run.")],
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="What was written later is left alone.")
    ] = "24h",
    option: Options = [],  # noqa: B006  # Typer reads it, nobody writes it
    as_json: Json = False,
) -> None:
    """Delete what saves that died have left; never what a checkpoint names."""
    count = collect_garbage(uri, grace=parse_duration(grace), storage_options=parse_options(option))
    if as_json:
        print_json({"uri": uri, "deleted": count})
    else:
        console().print(Text(f"deleted {count:,} object{'s' * (count != 1)}"))

"""The checkpoints of a run, for ``ls``: ckptio's own, and Orbax's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ckptio import formats, hooks
from ckptio.backend import Backend
from ckptio.cli.output import console, print_json, print_table
from ckptio.errors import ManifestError, NotFoundError
from ckptio.formats import Glance
from ckptio.manifest import MANIFEST, Manifest
from ckptio.manifest import decode as decode_manifest
from ckptio.metrics import KEY
from ckptio.operation import Operation
from ckptio.retry import RetryingBackend
from ckptio.transfer import Transfer
from ckptio.units import format_bytes

__all__ = ["find_steps", "print_steps"]

Found = Manifest | Glance | ManifestError
Step = tuple[str, Found]

_UNFINISHED = ".orbax-checkpoint-tmp"


def find_steps(uri: str, options: Mapping[str, Any]) -> list[Step]:
    """Return the checkpoints one level below, by name."""
    with hooks.open_backend(uri, options) as opened:
        operation = Operation(f"listing {opened.uri}")
        backend = RetryingBackend(opened, operation)
        transfer = Transfer(operation, concurrency=backend.limits.concurrency, memory=1)
        names = [
            name[:-1]
            for name in backend.list_children()
            if name.endswith("/") and _UNFINISHED not in name
        ]
        found = transfer.map(lambda name: (name, _look(backend, name)), names)
        steps = [(name, what) for name, what in found if what is not None]
    return sorted(steps, key=lambda step: _by_number(step[0]))


def _look(backend: Backend, name: str) -> Found | None:
    key = f"{name}/{MANIFEST}"
    try:
        try:
            return decode_manifest(backend.read(key), backend.describe(key))
        except NotFoundError:
            return formats.glance(backend, name)
    except ManifestError as error:
        return error


def _by_number(name: str) -> tuple[str, int, str]:
    """Sort ``step-9`` before ``step-10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name


def print_steps(uri: str, steps: Sequence[Step], as_json: bool) -> None:
    """Print what `find_steps` found."""
    if as_json:
        print_json({"uri": uri, "checkpoints": [_facts(*step) for step in steps]})
        return
    columns = ["name", "created (UTC)", "leaves", "size", "format", "metadata"]
    print_table(columns, [_row(*step) for step in steps], right=["leaves", "size"], last="cut")
    console().print(Text(f"{len(steps):,} checkpoint{'s' * (len(steps) != 1)}", style="dim"))


def _facts(name: str, found: Found) -> dict[str, Any]:
    if isinstance(found, ManifestError):
        return {"name": name, "error": str(found)}
    facts = {"name": name, "created": found.created.isoformat(), "metadata": dict(found.metadata)}
    if isinstance(found, Glance):
        return {**facts, "format": found.format, "leaves": found.leaves, "nbytes": None}
    leaves, nbytes = len(found.leaves), found.nbytes
    return {**facts, "format": "ckptio", "leaves": leaves, "nbytes": nbytes}


def _row(name: str, found: Found) -> tuple[str, ...]:
    if isinstance(found, ManifestError):
        return name, "", "", "", "", "damaged manifest"
    created = f"{found.created:%Y-%m-%d %H:%M}"
    metadata = "  ".join(_brief(found.metadata))[:400]
    if isinstance(found, Glance):
        return name, created, f"{found.leaves:,}", "", found.format, metadata
    return name, created, f"{len(found.leaves):,}", format_bytes(found.nbytes), "", metadata


def _brief(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield what tells steps apart first: the metrics."""
    manager = metadata.get(KEY)
    metrics = manager.get("metrics") if isinstance(manager, dict) else None
    rest = {key: value for key, value in metadata.items() if key != KEY}
    for found in (metrics if isinstance(metrics, dict) else {}, rest):
        yield from _pairs(found)


def _pairs(found: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in found.items():
        if isinstance(value, dict) and value:
            yield from _pairs(value, f"{above}{key}.")
        elif isinstance(value, float):
            yield f"{above}{key}={value:.6g}"
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{above}{key}={text}"

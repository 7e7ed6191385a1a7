"""Puts a run's tables and plots into README.md, between two marks.

::

    python -m benchmarks readme
"""

from __future__ import annotations

import os
import re
from pathlib import Path

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PARTS = {
    "goals": "What was promised",
    "workloads": "Whole checkpoints on the local disk",
    "remote": "Whole checkpoints on object stores",
    "stores": "Drivers and SDKs",
}


def write(out: Path, readme: Path = README) -> None:
    """Replace what stands between the marks by what is in `out`."""
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{readme} has no {BEGIN} … {END}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [
        f"### {title}\n\n{_linked((out / f'{name}.md').read_text(), out, readme)}"
        for name, title in PARTS.items()
        if (out / f"{name}.md").exists()
    ]
    results = "\n".join(parts)
    readme.write_text(f"{before}{BEGIN}\n\n{results}\n{END}{after}")
    print(f"written: {readme}")


def _linked(markdown: str, out: Path, readme: Path) -> str:
    """Let the plots' links start from where the text will be."""
    place = os.path.relpath(out, readme.parent)
    return re.sub(r"\]\(([^)/]+\.png)\)", rf"]({place}/\1)", markdown)

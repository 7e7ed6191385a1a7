"""The `ckptio` command; needs the extra ``ckptio[cli]``.

Exit codes: 0 success; 1 the answer is no (damage found, checkpoints differ, a check failed);
2 wrong usage; 3 no such checkpoint or leaf; 4 anything else that went wrong; 130 interrupted.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with this process's arguments."""
    try:
        import rich
        import typer
    except ImportError as error:
        print(f"the ckptio command needs {error.name}: pip install 'ckptio[cli]'", file=sys.stderr)
        raise SystemExit(4) from error
    del rich, typer
    from ckptio.cli.app import app

    app(prog_name="ckptio")

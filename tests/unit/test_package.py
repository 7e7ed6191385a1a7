"""The package's shape: what it imports, in which order, what it exports, what it documents."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptio
from ckptio import errors, hooks

ROOT = Path(ckptio.__file__).parent

# Each imports only what stands above it. A reader can go from top to bottom.
ORDER = [
    "errors", "pages", "collector", "backend", "hooks", "memory", "boxes", "dtypes", "values",
    "units", "tree", "arrays",
    "columns", "sealed", "chunk_table", "manifest", "parts", "container", "options", "progress",
    "operation", "retry", "transfer", "save_plan", "restore_plan", "placing",
    "block_check", "leaves", "writer", "reader", "source", "uploading",
    "commit", "processes", "rendezvous", "attempt", "pending", "saving", "leaf", "checkpoint",
    "target", "shared_reads", "restoring", "copying", "rewriting", "export", "converting",
    "keep", "every", "metrics", "steps", "agreement", "stateful",
    "housekeeping", "preemption", "run_reader", "manager",
]  # fmt: skip


def imports(path):
    """The modules of the core that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ckptio"):
            module = node.module.removeprefix("ckptio").removeprefix(".")
            found |= {module.split(".")[0]} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("ckptio.")}
    return found


def test_every_module_has_its_place():
    assert {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"} == {*ORDER}


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_what_stands_above_it(name):
    below = ORDER[ORDER.index(name) :]
    assert not imports(ROOT / f"{name}.py") & {*below}


def test_the_core_knows_no_store():
    names = {"fsspec", "s3fs", "gcsfs", "adlfs", "botocore", "azure", "google", "ckptio_backends"}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert not {module.split(".")[0] for module in modules} & names, path


def test_importing_ckptio_loads_neither_jax_nor_a_driver_nor_an_sdk():
    code = "import sys, ckptio; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    heavy = {"jax", "jaxlib", "ml_dtypes", "ckptio_backends", "fsspec", "s3fs", "gcsfs", "adlfs"}
    assert not heavy & {*loaded}
    assert not {"botocore", "azure", "google", "aiohttp", "tqdm", "tensorstore"} & {*loaded}


def test_a_local_checkpoint_is_opened_and_read_without_jax(tmp_path):
    code = """
import sys, numpy as np, ckptio
print(ckptio.open(sys.argv[1])["w"][1].tolist(), ckptio.restore(sys.argv[1])["w"].sum())
print(*sorted({m.split('.')[0] for m in sys.modules}))
"""
    import numpy as np

    ckptio.save(tmp_path / "c", {"w": np.arange(6).reshape(2, 3), "step": 3})
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "c"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip
    assert out[0] == "[3, 4, 5] 15"
    assert not {"jax", "ml_dtypes", "fsspec", "botocore"} & {*out[1].split()}


def test_all_is_sorted_complete_and_documented():
    assert ckptio.__all__ == sorted(ckptio.__all__)
    public = {name for name in vars(ckptio) if not name.startswith("_")} - {"TYPE_CHECKING"}
    modules = {m.name for m in pkgutil.iter_modules(ckptio.__path__)}
    assert public - modules <= {*ckptio.__all__}
    for name in ckptio.__all__:
        value = getattr(ckptio, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_every_error_is_exported_and_drawn():
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.CkptioError)
    }
    assert errors.__all__ == sorted(errors.__all__)
    assert {*errors.__all__} == {*kinds}
    assert {*kinds} <= {*ckptio.__all__}
    drawn = inspect.getdoc(errors) or ""
    for name, kind in kinds.items():
        builtin = [b.__name__ for b in kind.__bases__ if b.__module__ == "builtins"]
        wanted = name if name == "CkptioError" or not builtin else f"{name} ({builtin[0]})"
        assert wanted in drawn, name
        assert str(kind("text")) == "text"


def test_every_hook_is_documented_in_one_line_and_named_in_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    for name, hook in vars(hooks.HookSpecs).items():
        if name.startswith("ckptio_"):
            assert (inspect.getdoc(hook) or "").count("\n") == 0, name
            assert inspect.getdoc(hook), name
            assert tests.count(name) > 0, f"no test uses {name}"


@pytest.mark.parametrize("name", ORDER)
def test_the_examples_in_the_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(f"ckptio.{name}")).failed == 0

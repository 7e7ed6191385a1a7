"""The command, run as a user runs it."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from servers.process import ServerUnavailableError, unavailable

import ckptio

pytest.importorskip("typer", reason="the extra ckptio[cli] is not installed")

SCRIPT = Path(sys.executable).with_name("ckptio")
COMMAND = [SCRIPT] if SCRIPT.exists() else [sys.executable, "-m", "ckptio"]
COMMANDS = ["ls", "show", "verify", "diff", "cp", "convert", "rm", "gc", "backends", "doctor"]


def run(*arguments, code=0, **environment):
    """Run the command with its output piped; return what it printed."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done.stdout if code in (0, 1) and done.stdout else done.stderr


def as_json(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code))


def tree(step=100, nudge=0.0):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    kernel = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    return {
        "params": {
            "layers": [
                {"kernel": jax.device_put(kernel + i, NamedSharding(mesh, P("data", "model")))}
                for i in range(3)
            ],
            "table": np.ones((100, 4), ml_dtypes.bfloat16),
        },
        "opt": {"mu": np.arange(5.0) + nudge, "bad": np.array([1.0, np.nan, np.inf, 0.0])},
        "step": step,
        "name": "a [bold]run[/bold]",
        "rng": jax.random.key(1),
    }


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The directory of a run with three steps."""
    root = tmp_path_factory.mktemp("run")
    for step in (9, 10, 11):
        nudge = 1e-3 if step == 11 else 0.0
        ckptio.save(root / f"step-{step}", tree(step, nudge), metadata={"loss": 1 / step})
    return root


@pytest.fixture
def saved(training):
    return training / "step-10"


def test_ls_lists_leaves(saved):
    out = run("ls", saved)
    (kernel,) = (line for line in out.splitlines() if "params/layers/0/kernel" in line)
    assert kernel.split() == [
        "params/layers/0/kernel", "float32", "64×16", "4.1", "kB", "(data,", "model)",
    ]  # fmt: skip
    assert "mesh data=4, model=2" in out
    assert "uint32 keys" in out
    assert '"loss": 0.1' in out
    assert "9 leaves" in out
    found = as_json("ls", saved)
    assert {leaf["path"] for leaf in found["leaves"]} == {*ckptio.open(saved)}
    (kernel,) = (leaf for leaf in found["leaves"] if leaf["path"] == "params/layers/0/kernel")
    assert kernel["sharding"] == {"mesh": {"data": 4, "model": 2}, "spec": [["data"], ["model"]]}
    assert found["format"] == "ckptio"


def test_ls_folds_filters_and_sorts(saved):
    out = run("ls", saved, "params/**", "--depth", 2, "--sort", "size").splitlines()
    assert [line.split()[0] for line in out[1:3]] == ["params/layers/", "params/table"]
    assert "3 leaves" in out[1]
    sizes = [leaf["nbytes"] for leaf in as_json("ls", saved, "--sort", "size")["leaves"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "'nothing/*'" in run("ls", saved, "nothing/*", code=3)


def test_ls_lists_the_steps_of_a_run_in_order(training):
    out = run("ls", training)
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["step-9", "step-10", "step-11"]
    assert "loss=0.111111" in out
    found = as_json("ls", training)["checkpoints"]
    assert {item["format"] for item in found} == {"ckptio"}
    assert [item["metadata"]["loss"] for item in found] == [1 / 9, 1 / 10, 1 / 11]


def test_ls_of_nothing_says_so(tmp_path):
    assert "no checkpoint" in run("ls", tmp_path, code=3)
    assert "no driver for zz://" in run("ls", "zz://bucket/x", code=2)


def test_ls_of_a_local_checkpoint_needs_no_jax(saved):
    code = """
import sys
sys.argv = ["ckptio", "ls", sys.argv[1]]
from ckptio.cli import main
try:
    main()
except SystemExit:
    pass
print(*sorted({m.split(".")[0] for m in sys.modules}), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, saved], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"jax", "jaxlib", "fsspec", "botocore", "tensorstore", "orbax", "tqdm"}
    assert "params/table" in done.stdout
    loaded = heavy & {*done.stderr.split()}
    assert not loaded


def test_show_gives_values_and_statistics(saved):
    out = run("show", saved, "params/layers/1/kernel[0:2,::8]")
    assert "float32  2×2" in out
    assert "[[ 1.  9.]" in out
    assert "min 1" in out
    found = as_json("show", saved, "opt/bad")["statistics"]
    assert (found["nan"], found["inf"], found["zeros"], found["count"]) == (1, 1, 1, 4)
    assert (found["min"], found["max"], found["mean"]) == (0, 1, 0.5)
    assert as_json("show", saved, "params/table[3]")["values"] == [1, 1, 1, 1]
    assert as_json("show", saved, "step")["values"] == 10
    assert as_json("show", saved, "name")["value"] == "a [bold]run[/bold]"
    assert "a [bold]run[/bold]" in run("show", saved, "name")


def test_show_says_what_is_wrong_with_a_path_or_slice(saved):
    assert "did you mean 'opt/mu'" in run("show", saved, "opt/nu", code=3)
    assert "not an index" in run("show", saved, "opt/mu[a]", code=2)
    assert "too many indices" in run("show", saved, "opt/mu[0,0]", code=2)
    assert "out of bounds" in run("show", saved, "opt/mu[9]", code=2)


def test_show_reads_large_leaves_block_by_block(tmp_path):
    large = np.arange(10_000_000, dtype=np.float32).reshape(100, -1)
    ckptio.save(tmp_path / "c", {"w": large})
    found = as_json("show", tmp_path / "c", "w")
    assert found["statistics"]["max"] == large.max()
    assert found["statistics"]["mean"] == pytest.approx(large.mean(dtype=float))
    assert found["statistics"]["std"] == pytest.approx(large.std(dtype=float))
    assert "values" not in found


def test_verify_answers_by_its_exit_code(saved, tmp_path):
    assert "sound" in run("verify", saved)
    assert as_json("verify", saved)["ok"] is True
    ckptio.copy(saved, tmp_path / "c")
    (path,) = tmp_path.glob("c/data/*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert path.name in run("verify", tmp_path / "c", code=1)
    found = as_json("verify", tmp_path / "c", code=1)
    assert found["ok"] is False
    assert path.name in found["error"]


def test_diff_lists_what_differs(training):
    same = run("diff", training / "step-10", training / "step-10")
    assert "the same: 9 leaves" in same
    found = as_json("diff", training / "step-10", training / "step-11", code=1)
    assert [item["path"] for item in found["differences"]] == ["opt/mu", "step"]
    mu, step = found["differences"]
    assert mu["max_absolute"] == pytest.approx(1e-3)
    assert (mu["differing"], mu["elements"]) == (5, 5)
    assert step["max_absolute"] == 1
    assert "2 of 9 leaves differ" in run("diff", training / "step-10", training / "step-11", code=1)
    run("diff", training / "step-10", training / "step-11", "opt/*", "--atol", "0.01")
    run("diff", training / "step-10", training / "step-11", "--structure")


def test_diff_of_other_trees_names_paths_shapes_and_dtypes(tmp_path):
    ckptio.save(
        tmp_path / "a",
        {"x": np.ones(3), "y": np.ones(3, np.float32), "s": "one", "z": np.ones(2), "n": 1},
    )
    ckptio.save(
        tmp_path / "b",
        {"x": np.ones(4), "y": np.ones(3), "s": "two", "w": 1, "n": 1},
    )
    found = as_json("diff", tmp_path / "a", tmp_path / "b", code=1)["differences"]
    kinds = {item["path"]: item["kind"] for item in found}
    assert kinds == {
        "s": "values", "x": "shape", "y": "dtype", "z": "only in a", "w": "only in b",
    }  # fmt: skip
    out = run("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "float32 3 → float64 3" in out
    assert "5 of 6 leaves differ" in out


def test_diff_reads_a_block_once_however_many_leaves_lie_in_it(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from ckptio.cli.app import app

    tree = {str(i): np.full(100, i, np.float32) for i in range(2000)}
    ckptio.save(tmp_path / "a", tree)
    ckptio.save(tmp_path / "b", {**tree, "1999": np.zeros(100, np.float32)})
    counts = []
    close = ckptio.Checkpoint.close
    monkeypatch.setattr(
        ckptio.Checkpoint, "close", lambda self: (counts.append(self.bytes_read), close(self))
    )
    answer = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert answer.exit_code == 1, answer.output
    assert "1 of 2,000 leaves differ" in answer.output
    stored = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*.safetensors"))
    assert [count <= stored for count in counts] == [True, True]


def test_nan_is_the_same_as_nan_and_far_from_a_number(tmp_path):
    ckptio.save(tmp_path / "a", {"x": np.array([np.nan, 1, np.inf])})
    ckptio.save(tmp_path / "b", {"x": np.array([np.nan, 1, np.inf])})
    ckptio.save(tmp_path / "c", {"x": np.array([0.0, 1, np.inf])})
    run("diff", tmp_path / "a", tmp_path / "b")
    (found,) = as_json("diff", tmp_path / "a", tmp_path / "c", code=1)["differences"]
    assert (found["differing"], found["max_absolute"]) == (1, "inf")


def test_cp_copies_between_stores(saved, s3_store):
    place = s3_store.place("cli-copy")
    options = [f"--dst-option={key}={value if isinstance(value, str) else json.dumps(value)}"
               for key, value in place.storage_options.items()]  # fmt: skip
    assert "copied" in run("cp", saved, place.uri, *options)
    found = as_json("cp", saved, place.uri, *options)
    assert (found["objects"], found["kept"]) == (0, 1)
    assert "nothing to copy" in run("cp", saved, place.uri, "--no-read-back", *options)
    plain = [option.replace("--dst-option=", "-o") for option in options]
    assert "params/table" in run("ls", place.uri, *plain)
    assert "--overwrite" in run("cp", saved.parent / "step-9", place.uri, *options, code=4)
    run("rm", place.uri, "--yes", *plain)
    run("ls", place.uri, *plain, code=3)


def test_convert_there_and_back(saved, tmp_path):
    out = tmp_path / "model.safetensors"
    refused = run("convert", saved, out, code=1)
    assert "name: is a Python str" in refused
    run("convert", saved, out, "--only", "params/**")
    assert {*load_file(out)} >= {"params.layers.0.kernel", "params.table"}
    assert as_json("ls", out)["format"] == "safetensors"
    assert as_json("convert", out, tmp_path / "own")["leaves"] == 4
    assert "sound" in run("verify", tmp_path / "own")
    assert "no checksums" in run("verify", out, code=4)
    run("convert", saved, tmp_path / "s.safetensors", "--only", "params/**",
        "--max-shard-size", "5kB", "--separator", "/")  # fmt: skip
    assert (tmp_path / "s.safetensors.index.json").exists() or (
        tmp_path / "s-00001-of-00003.safetensors"
    ).exists()


def test_rm_asks_or_is_told(saved, tmp_path):
    ckptio.copy(saved, tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    assert "--yes" in run("rm", tmp_path / "c", code=2)
    assert ckptio.exists(tmp_path / "c")
    assert "deleted" in run("rm", tmp_path / "c", "--yes")
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["notes.txt"]
    run("rm", tmp_path / "c", "--yes", code=3)
    save_file({"w": np.ones(1)}, tmp_path / "x.safetensors")
    assert "another program's" in run("rm", tmp_path / "x.safetensors", "-y", code=2)


def test_gc_removes_what_died(saved, tmp_path):
    ckptio.copy(saved, tmp_path / "c")
    dead = tmp_path / "c" / "data" / ("0" * 16)
    dead.mkdir()
    (dead / "p00000-000.safetensors").write_bytes(b"half")
    assert "deleted 0 objects" in run("gc", tmp_path)
    assert as_json("gc", tmp_path, "--grace", "0s")["deleted"] == 1
    assert "sound" in run("verify", tmp_path / "c")
    assert "not a duration" in run("gc", tmp_path, "--grace", "soon", code=2)


def test_backends_lists_every_scheme():
    found = {item["scheme"]: item for item in as_json("backends")["backends"]}
    assert {*found} >= {"file", "s3", "gs", "az", "memory"}
    assert found["file"]["problem"] is None
    assert "ckptio_backends.local" in run("backends")


def test_backends_says_what_is_missing_and_how_to_install_it():
    code = """
import sys
sys.modules["botocore"] = sys.modules["botocore.exceptions"] = None
sys.argv = ["ckptio", "backends"]
from ckptio.cli import main
main()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'ckptio[s3]'" in out.stdout, out.stderr


def test_doctor_tries_everything_and_leaves_nothing(tmp_path):
    found = as_json("doctor", tmp_path / "scratch", "--size", "9MB")
    assert found["ok"] is True
    assert len(found["checks"]) == 8
    assert not (tmp_path / "scratch").exists()
    assert "MB/s" in run("doctor", tmp_path, "--size", "1MB")


def test_doctor_says_what_does_not_work(tmp_path):
    (tmp_path / "file").write_text("no directory")
    found = as_json("doctor", tmp_path / "file" / "below", code=1)
    assert found["ok"] is False
    assert {check["check"]: check["ok"] for check in found["checks"]}["put"] is False


def test_doctor_asks_no_further_where_nobody_answers():
    options = ["-o", "endpoint_url=http://127.0.0.1:9", "-o", "key=a", "-o", "secret=b"]
    found = as_json("doctor", "s3://bucket/x", *options, code=1)
    assert [check["check"] for check in found["checks"]] == ["list"]
    assert "cannot connect" in found["checks"][0]["detail"]


def test_the_installed_command_runs_this_package():
    if not SCRIPT.exists():
        unavailable(ServerUnavailableError("the command is not installed beside this Python"))
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"ckptio {ckptio.__version__}\n"


def test_every_command_has_help_with_an_example_json_and_a_line_in_the_readme():
    listing = run("--help", COLUMNS="200")
    assert re.findall(r"^│ (\w+) ", listing.partition("Commands")[2], re.MULTILINE) == COMMANDS
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    for name in COMMANDS:
        shown = run(name, "--help", COLUMNS="200")
        assert f"Example: ckptio {name}" in shown
        assert "--json" in shown
        assert f"\n| `ckptio {name}" in readme
    assert "Exit codes" in listing
    assert ckptio.__version__ in run("--version")


def test_wrong_usage_is_code_2():
    run("ls", code=2)
    run("nothing", code=2)
    assert "KEY=VALUE" in run("ls", "x", "-o", "secret-without-key", code=2)
    assert "secret-without-key" not in run("ls", "x", "-o", "secret-without-key", code=2)


def test_shell_completion_can_be_shown():
    done = subprocess.run(
        [sys.executable, "-m", "ckptio", "--show-completion", "bash"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )  # fmt: skip
    assert "_CKPTIO_COMPLETE=complete_bash" in done.stdout
    completed = subprocess.run(
        [sys.executable, "-m", "ckptio"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "_CKPTIO_COMPLETE": "complete_bash", "COMP_WORDS": "ckptio ve",
             "COMP_CWORD": "1"},
    )  # fmt: skip
    assert "verify" in completed.stdout


def test_without_the_extra_it_says_what_to_install():
    code = """
import sys
sys.modules["typer"] = None
from ckptio.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "pip install 'ckptio[cli]'" in done.stderr


def on_a_terminal(columns, *arguments):
    """Run the command on a terminal of that width; return what it wrote there."""
    import fcntl
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=child, stdout=child, stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(child)
    out = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([parent], [], [], 1)[0]:
            continue
        try:
            data = os.read(parent, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        out += data
    os.close(parent)
    assert process.wait(timeout=10) == 0
    return out.decode()


def lines_of(out):
    return re.sub(r"\x1b\[[0-9;]*m", "", out).replace("\r", "").splitlines()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_tables_fit_the_terminal_and_lose_nothing(tmp_path, columns):
    long = "/".join(["a_rather_long_name_of_a_module"] * 5)
    ckptio.save(tmp_path / "c", {"w": np.ones(3), long: np.ones((1000, 2000), np.float32)})
    out = on_a_terminal(columns, "ls", tmp_path / "c")
    assert "\x1b[" in out, "there are colours on a terminal"
    lines = lines_of(out)
    assert max(map(len, lines)) <= columns
    assert long.replace("/", "~1") in "".join(lines)
    assert "1000×2000" in out


def test_a_name_too_long_for_its_column_has_a_line_of_its_own(tmp_path):
    long = {f"layer_{i}": {"a_rather_long_name_of_a_module": np.ones((9, 9))} for i in range(2)}
    wide = {"module_of_modules": long, "w": np.ones(3)}
    ckptio.save(tmp_path / "c", wide)
    lines = lines_of(on_a_terminal(70, "ls", tmp_path / "c"))
    first = 70 - len("  float64  shape  648 B")
    assert lines[:6] == [
        f"{'path':{first}}  dtype    shape   size",
        "module_of_modules/layer_0/a_rather_long_name_of_a_module",
        f"{'':{first}}  float64  9×9    648 B",
        "module_of_modules/layer_1/a_rather_long_name_of_a_module",
        f"{'':{first}}  float64  9×9    648 B",
        f"{'w':{first}}  float64  3       24 B",
    ]


def test_an_error_is_one_line_and_cannot_steer_the_terminal(tmp_path):
    assert run("ls", tmp_path / "\x1b]0;title\x07", code=3).count("\n") == 1
    ckptio.save(tmp_path / "c", {"w": np.ones(3)})
    assert "\\x1b" in run("show", tmp_path / "c", "\x1b[31mw", code=3)


def test_a_path_cannot_steer_the_terminal(tmp_path):
    ckptio.save(tmp_path / "c", {"\x1b]0;title\x07": np.ones(1)}, metadata={"\x1b[31m": "x"})
    assert "\x1b]0" not in on_a_terminal(80, "ls", tmp_path / "c")
    assert "\\x1b]0" in run("ls", tmp_path / "c")


@pytest.mark.parametrize("name", ["app", "output", "selection"])
def test_the_examples_in_the_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(f"ckptio.cli.{name}")).failed == 0

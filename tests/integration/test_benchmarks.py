"""The benchmarks run from one command, and leave tables that people and programs can read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks import agreement, goals, readme
from benchmarks.limits import MIB
from benchmarks.machine import Machine
from benchmarks.meter import Spread
from benchmarks.results import DEVICE_PUT, LIMIT, OURS, Figure, Results, Section, slower
from benchmarks.workloads import Leaf

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not measured" not in done.stdout
    return done


def found(out: Path, name: str) -> Counter[tuple[str, str, str]]:
    """Return how many rounds each figure has."""
    figures = json.loads((out / f"{name}.json").read_text())["figures"]
    assert all(f["seconds"] > 0 for f in figures)
    return Counter((f["section"], f["peer"], f["verb"]) for f in figures)


def test_each_driver_is_measured_against_its_sdk_and_the_limit(tmp_path):
    done = run("--out", tmp_path, "stores", "--quick", "--only", "local")
    measured = found(tmp_path, "stores")
    clients = ("ckptio", "files, buffered", LIMIT)
    assert measured.keys() >= {("local", c, v) for c in clients for v in ("write", "read")}
    assert "| write: files, buffered |" in (tmp_path / "stores.md").read_text()
    machine, *tables = done.stdout.splitlines()  # how long a processor's name is, it decides
    assert "cores" in machine
    assert max(map(len, tables)) <= 100


def test_workloads_are_measured_against_the_limit_and_can_be_resumed(tmp_path):
    arguments = ("--out", tmp_path, "workloads", "--quick", "--peers", "ckptio")
    run(*arguments, "--only", "d", "--rounds", "2")
    measured = found(tmp_path, "workloads")
    assert measured == {("d", p, "restore"): 2 for p in (OURS, LIMIT, DEVICE_PUT)}
    run(*arguments, "--only", "d,g", "--resume")
    resumed = found(tmp_path, "workloads")
    assert {key: n for key, n in resumed.items() if key[0] == "d"} == measured
    assert resumed["g", OURS, "block"] == resumed["g", LIMIT, "block"] == 1
    assert "save_async" in (tmp_path / "goals.md").read_text()


def test_a_leafs_content_is_its_own_and_never_repeats_at_a_blocks_distance():
    first, second = (Leaf("w", (48, MIB // 4), (None, None), number).content() for number in (0, 1))
    assert not (first == second).any(axis=1).all()
    blocks = {row.tobytes()[:64] for row in (*first, *second)}
    assert len(blocks) == 96


SECTION = Section("a", "a transformer", {"save": 10**9}, 3, limits={"save": "the device"})


def results(seconds: dict[str, list[float]]) -> Results:
    figures = [
        Figure("a", peer, "save", round_, taken, 0.1, peak=10**9, extra=2 * 10**8)
        for peer, times in seconds.items()
        for round_, taken in enumerate(times)
    ]
    return Results("workloads", Machine.here(), sections=[SECTION], figures=figures)


def test_ratios_are_of_medians_and_spread_over_the_rounds():
    made = results({OURS: [1.0, 2.0, 4.0], "Orbax": [9.0, 24.0, 32.0]}).of(SECTION, "save")
    assert slower(made["Orbax"], made[OURS]) == Spread(12.0, 8.0, 12.0)


def test_goals_tell_what_is_met(tmp_path):
    times = {OURS: [1.0] * 3, LIMIT: [0.8] * 3, "DCP, 1 thread": [2.0] * 3, "Orbax": [8.0] * 3}
    rows = {row[1].partition(" (")[0]: row for row in goals.rows(results(times), goals.GOALS)}
    assert {what: row[-1] for what, row in rows.items()} == {
        "the device's limit": "NO",
        "DCP's best": "yes",
        "Orbax, default": "yes",
    }
    assert rows["the device's limit"][2:4] == ("at least 0.85 ×", "0.80 ×")


def test_two_runs_agree_where_their_spreads_meet_and_chance_alone_is_told():
    first = results({OURS: [1.0, 1.1, 1.3], "Orbax": [8.0, 8.1, 8.2]})
    second = results({OURS: [1.2, 1.25, 1.4], "Orbax": [9.0, 9.1, 9.2]})
    pairs = {pair.name: pair for pair in agreement.times(first, second)}
    assert pairs["save: ckptio"].agrees
    assert not pairs["save: Orbax"].agrees
    assert pairs["save: Orbax"].chance == 0.1  # of 20 ways to deal six rounds out, two
    told = "1 of 2 do not agree, where chance alone makes 0.2; "
    assert agreement.summary([*pairs.values()]).startswith(told)


def test_results_come_back_as_they_were_written_and_reach_the_page(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    out = tmp_path / "results"
    made = results({OURS: [1.0, 1.1, 1.3], "Orbax": [8.0, 8.1, 8.2]})
    made.write(out)
    assert Results.read(out / "workloads.json").figures == made.figures
    readme.write(out, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| save: Orbax | 8.10 (8.00–8.20) | 123 MB/s | 7.36 | 0.10 | 1000 | 200 |" in text

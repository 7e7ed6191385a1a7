"""`copy`: between all stores, verified on the way and at the end, resumed after a kill, committed
last.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from places import PLUGGED, SERVED, Place
from servers.process import ServerUnavailableError, unavailable
from servers.proxy import fault_proxy

import ckptio
from ckptio.hooks import hookimpl, open_backend, plugin_manager
from ckptio.testing import FaultyBackend

MIB = 1 << 20
TREE = {
    "w": np.arange(5 * MIB // 4, dtype=np.float32).reshape(5, -1),
    "b": {str(i): np.full(3, i) for i in range(20)},
    "step": 7,
    "name": "été",
}


def same(a, b):
    assert a["w"].tobytes() == b["w"].tobytes()
    assert all((a["b"][k] == b["b"][k]).all() for k in a["b"])
    assert (a["step"], a["name"]) == (b["step"], b["name"])


def many_objects(uri, count=6, size=5 * MIB, **to):
    tree = {str(i): np.random.default_rng(i).integers(0, 256, size, np.uint8) for i in range(count)}
    ckptio.save(uri, tree, options=ckptio.SaveOptions(object_size=size), **to)
    return tree


def objects(path):
    return sorted(p for p in Path(path).rglob("*.safetensors"))


@pytest.mark.parametrize("to", ["local", "memory", *SERVED])
def test_between_every_pair_of_stores_it_is_the_same_checkpoint(place, to, request, tmp_path):
    name = uuid4().hex
    if to == "local":
        other = Place(str(tmp_path / name))
    elif to == "memory":
        other = Place(f"memory://place/{name}")
    else:
        other = request.getfixturevalue(f"{to}_store").place(name)
    ckptio.save(tree=TREE, metadata={"v": 1}, **place.to)
    report = ckptio.copy(
        place.uri,
        other.uri,
        src_storage_options=place.storage_options,
        dst_storage_options=other.storage_options,
    )
    assert (report.objects, report.kept) == (1, 0)
    same(ckptio.restore(**other.to), TREE)
    with ckptio.open(**other.to) as copied, ckptio.open(**place.to) as saved:
        copied.verify()
        assert copied.metadata == {"v": 1}
        assert copied.manifest.attempt == saved.manifest.attempt
        assert copied.created == saved.created


def test_another_checkpoint_is_kept_unless_told_otherwise(tmp_path):
    ckptio.save(tmp_path / "a", {"w": np.ones(3)})
    ckptio.save(tmp_path / "b", {"w": np.zeros(3)})
    with pytest.raises(ckptio.AlreadyExistsError, match="overwrite=True"):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert not ckptio.restore(tmp_path / "b")["w"].any()
    ckptio.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert ckptio.restore(tmp_path / "b")["w"].all()
    assert len(objects(tmp_path / "b")) == 1, "the replaced data is gone"


def test_nothing_to_copy_and_nowhere_to_go(tmp_path):
    with pytest.raises(ckptio.NotFoundError, match="no checkpoint"):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    ckptio.save(tmp_path / "a", {"w": 1})
    with pytest.raises(ckptio.InvalidOptionError, match="itself"):
        ckptio.copy(tmp_path / "a", tmp_path / "." / "a")


def test_a_checkpoint_without_data_is_copied_too(tmp_path):
    ckptio.save(tmp_path / "a", {"nothing": {}, "empty": np.zeros((0, 3))})
    assert ckptio.copy(tmp_path / "a", tmp_path / "b").objects == 0
    assert ckptio.restore(tmp_path / "b")["empty"].shape == (0, 3)


@pytest.mark.parametrize("which", [0, 3, 5])
def test_a_flipped_byte_is_caught_and_nothing_is_committed(tmp_path, which):
    many_objects(tmp_path / "a")
    victim = objects(tmp_path / "a")[which]
    with open(victim, "r+b") as file:
        file.seek(MIB + which)
        byte = file.read(1)
        file.seek(MIB + which)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ckptio.CorruptionError, match=victim.name):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert not ckptio.exists(tmp_path / "b")


def through(driver, request, name, endpoint=None):
    """A place in a store that has a server, by the store's own driver or a plugin's."""
    scheme, _, plugin = driver.partition("+")
    found = request.getfixturevalue(f"{scheme}_store").place(name, endpoint)
    if not plugin:
        return found
    if find_spec(f"ckptio_{plugin}") is None:
        unavailable(ServerUnavailableError(f"the plugin ckptio-{plugin} is not installed"))
    return Place(found.uri.replace("://", f"+{plugin}://", 1), found.storage_options)


def endpoint_of(driver, request):
    return request.getfixturevalue(f"{driver.partition('+')[0]}_store").endpoint


def flip_answer(exchange):
    answer = exchange.forward()
    pieces = [bytearray(piece) for piece in answer.pieces]
    middle = pieces[len(pieces) // 2]
    middle[len(middle) // 2] ^= 0x10
    answer.pieces = [bytes(piece) for piece in pieces]
    exchange.send(answer)


def flip_request(at):
    def flip(exchange):
        body = bytearray(exchange.request.raw_body)
        body[at(body)] ^= 0x10
        exchange.request.raw_body = bytes(body)
        exchange.send(exchange.forward())

    return flip


def asks_for_bytes(request):
    return request.method == "GET" and not {"range", "x-ms-range"}.isdisjoint(request.headers)


@pytest.mark.parametrize("driver", [*SERVED, *PLUGGED])
def test_a_byte_flipped_on_the_way_from_a_store_is_caught(driver, request, tmp_path):
    name = uuid4().hex
    place = through(driver, request, name)
    many_objects(place.uri, count=2, size=MIB, storage_options=place.storage_options)
    with fault_proxy(endpoint_of(driver, request)) as proxy:
        rule = proxy.add(flip_answer, path="p00000-001.safetensors", when=asks_for_bytes)
        flawed = through(driver, request, name, proxy.url)
        with pytest.raises(ckptio.CorruptionError, match=r"p00000-001.* on its way from there"):
            ckptio.copy(place.uri, tmp_path / "b", src_storage_options=flawed.storage_options)
        assert rule.hits == 1
    assert not ckptio.exists(tmp_path / "b")
    assert ckptio.copy(place.uri, tmp_path / "b", src_storage_options=place.storage_options)
    ckptio.open(tmp_path / "b").verify()


@pytest.mark.parametrize("size", [MIB, 17 * MIB], ids=["one-part", "parts"])
@pytest.mark.parametrize("driver", [*SERVED, *PLUGGED])
def test_a_byte_flipped_on_the_way_to_a_store_is_never_committed(driver, size, request, tmp_path):
    """Over a connection without TLS: no server here refuses such a body by itself."""
    name = uuid4().hex
    place = through(driver, request, name)
    many_objects(tmp_path / "a", count=2, size=size)
    with fault_proxy(endpoint_of(driver, request)) as proxy:
        rule = proxy.add(
            flip_request(lambda body: len(body) // 2), when=lambda r: r.sent > MIB // 2
        )
        flawed = through(driver, request, name, proxy.url)
        with pytest.raises(ckptio.CorruptionError, match="is not what was sent"):
            ckptio.copy(tmp_path / "a", place.uri, dst_storage_options=flawed.storage_options)
        assert rule.hits == 1
    assert not ckptio.exists(**place.to)
    again = ckptio.copy(tmp_path / "a", place.uri, dst_storage_options=place.storage_options)
    assert (again.objects, again.kept) == (1, 1)
    with ckptio.open(**place.to) as copied:
        copied.verify()


@pytest.mark.parametrize("driver", [*SERVED, *PLUGGED])
def test_a_manifest_that_is_damaged_on_its_way_is_sent_again(driver, request, tmp_path):
    name = uuid4().hex
    ckptio.save(tmp_path / "a", TREE)
    with fault_proxy(endpoint_of(driver, request)) as proxy:
        rule = proxy.add(
            flip_request(lambda body: body.index(b'"leaves"') + 2),
            when=lambda r: b'{"format":"ckptio/' in r.raw_body,
        )
        flawed = through(driver, request, name, proxy.url)
        ckptio.copy(tmp_path / "a", flawed.uri, dst_storage_options=flawed.storage_options)
        assert rule.hits == 1
    same(ckptio.restore(**through(driver, request, name).to), TREE)


@contextmanager
def calls_to(place):
    """Gather the calls to the backends of a place while the block runs."""
    name = place.uri.rpartition("/")[2]
    calls = []

    class Observer:
        @hookimpl
        def ckptio_wrap_backend(self, backend):
            if backend.uri.rpartition("/")[2] != name:
                return None
            return FaultyBackend(backend, before=calls.append)

    observer = Observer()
    plugin_manager().register(observer)
    try:
        yield calls
    finally:
        plugin_manager().unregister(observer)


@pytest.mark.parametrize("driver", ["local", *SERVED, *PLUGGED])
def test_what_a_store_acknowledges_is_not_read_back(driver, request, tmp_path):
    name = uuid4().hex
    many_objects(tmp_path / "a", count=2, size=17 * MIB)
    place = Place(str(tmp_path / name)) if driver == "local" else through(driver, request, name)

    def read_back(*, copy, **how):
        with calls_to(copy) as calls:
            ckptio.copy(tmp_path / "a", copy.uri, dst_storage_options=copy.storage_options, **how)
        reads = [call for call in calls if call.method == "read_into"]
        return sum(call.nbytes for call in reads if call.key.startswith("data/"))

    total = sum(path.stat().st_size for path in objects(tmp_path / "a"))
    # The etags of S3 are digests of what it received; elsewhere only reading tells.
    expected = 0 if driver.startswith("s3") else total
    assert read_back(copy=place / "one") == expected
    assert read_back(copy=place / "two", read_back=False) == 0


def test_sound_objects_are_not_copied_again_and_damaged_ones_are(tmp_path):
    tree = many_objects(tmp_path / "a")
    assert ckptio.copy(tmp_path / "a", tmp_path / "b").objects == 6
    found = objects(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    found[1].unlink()
    found[2].write_bytes(found[2].read_bytes()[:-1])
    damaged = bytearray(found[4].read_bytes())
    damaged[-1] ^= 1
    found[4].write_bytes(damaged)
    kept = {path: path.stat().st_ino for path in (found[0], found[3], found[5])}
    report = ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert (report.objects, report.kept) == (3, 3)
    assert {path: path.stat().st_ino for path in kept} == kept
    back = ckptio.restore(tmp_path / "b")
    assert all((back[key] == tree[key]).all() for key in tree)


def test_copying_a_copy_again_checks_and_repairs_it(tmp_path):
    many_objects(tmp_path / "a", count=3)
    ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert ckptio.copy(tmp_path / "a", tmp_path / "b").kept == 3
    objects(tmp_path / "b")[1].unlink()
    report = ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert (report.objects, report.kept) == (1, 2)
    ckptio.open(tmp_path / "b").verify()


KILLED = """
import os, signal, threading
from ckptio.cli import main
from ckptio.uploading import ObjectUpload

write, one_at_a_time, done = ObjectUpload.write, threading.Lock(), []

def write_then_die(self, start, data):
    if not self._single and start == self.starts[-1]:
        threading.Event().wait()  # the large object is half there when the end comes
    with one_at_a_time:
        write(self, start, data)
        if self._single:
            done.append(self.key)
            print(self.key, flush=True)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

ObjectUpload.write = write_then_die
main()
"""


def as_arguments(flag, options):
    return [
        f"{flag}={key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in options.items()
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same checkpoint in each store, saved when it is asked for: five small objects, a large
    one."""
    found = {}

    def source(driver, request):
        if driver not in found:
            name = uuid4().hex
            place = (
                Place(str(tmp_path_factory.mktemp("source") / name))
                if driver == "local"
                else through(driver, request, name)
            )
            tree = {str(i): np.random.default_rng(i).bytes(MIB) for i in range(5)}
            tree["large"] = np.random.default_rng(9).integers(0, 256, 17 * MIB, np.uint8)
            ckptio.save(tree=tree, options=ckptio.SaveOptions(object_size=MIB), **place.to)
            found[driver] = place
        return found[driver]

    return source


PAIRS = [
    *((a, b) for a in ("local", *SERVED) for b in ("local", *SERVED)),
    *((plugged, "local") for plugged in PLUGGED),
    *(("local", plugged) for plugged in PLUGGED),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a}-to-{b}" for a, b in PAIRS])
def test_after_a_kill_the_next_copy_goes_on_from_there(source, target, sources, request, tmp_path):
    """The command is killed with three of six objects copied and the large one half."""
    pytest.importorskip("typer", reason="the extra ckptio[cli] is not installed")
    src = sources(source, request)
    name = uuid4().hex
    dst = Place(str(tmp_path / name)) if target == "local" else through(target, request, name)
    killed = subprocess.run(
        [
            *(sys.executable, "-c", KILLED, "cp", src.uri, dst.uri),
            *as_arguments("--src-option", src.storage_options),
            *as_arguments("--dst-option", dst.storage_options),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    copied = {*killed.stdout.split()}
    assert len(copied) == 3
    assert not ckptio.exists(**dst.to)

    with open_backend(**dst.to) as store:
        before = {key: store.head(key) for key in copied}
        assert {info.key for info in store.list("data")} == copied, "nothing torn is visible"
    with calls_to(dst) as calls:
        report = ckptio.copy(
            src.uri,
            dst.uri,
            src_storage_options=src.storage_options,
            dst_storage_options=dst.storage_options,
        )
    assert (report.objects, report.kept) == (3, 3)
    with ckptio.open(**dst.to) as checkpoint:
        checkpoint.verify()
        everything = {entry.key for entry in checkpoint.manifest.objects}
    written = {call.key for call in calls if call.method in ("put", "start_upload")}
    assert written == (everything - copied) | {"manifest.json"}
    with open_backend(**dst.to) as store:
        assert {key: store.head(key) for key in copied} == before


def test_a_source_that_lost_an_object_or_grew_one_is_refused_at_once(tmp_path):
    many_objects(tmp_path / "a", count=3)
    path = objects(tmp_path / "a")[2]
    sound = path.read_bytes()
    path.write_bytes(sound + b"more")
    with pytest.raises(ckptio.CorruptionError, match=path.name):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    path.unlink()
    with pytest.raises(ckptio.CorruptionError, match=f"{path.name} is missing"):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_only_ckptios_own_are_copied_as_they_are(tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "hf").mkdir()
    save_file({"w": np.ones(2)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ckptio.UnsupportedFormatError, match="convert"):
        ckptio.copy(tmp_path / "hf", tmp_path / "b")

"""A URI finds its driver; plugins may observe and wrap, and never break an outcome."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import ckptio
from ckptio import hooks
from ckptio.hooks import Location
from ckptio.memory import MemoryBackend
from ckptio.testing import FaultyBackend


@pytest.fixture
def register():
    """Register plugins for one test."""
    manager, registered = ckptio.plugin_manager(), []

    def register(plugin):
        registered.append(plugin)
        manager.register(plugin)

    yield register
    for plugin in registered:
        manager.unregister(plugin)


@pytest.fixture
def claims(monkeypatch):
    """Pretend that entry points are installed: {name: [value, …]}."""

    def claims(**values):
        from importlib.metadata import EntryPoint

        points = {
            name: tuple(EntryPoint(name, value, "ckptio.backends") for value in found)
            for name, found in values.items()
        }
        monkeypatch.setattr(hooks, "driver_entry_points", lambda: points)

    return claims


@pytest.mark.parametrize(
    ("uri", "scheme", "driver", "seen"),
    [
        ("s3://bucket/x", "s3", "s3", "s3://bucket/x"),
        ("S3://Bucket/X", "s3", "s3", "s3://Bucket/X"),
        ("s3+obstore://bucket/x", "s3", "s3+obstore", "s3://bucket/x"),
        ("memory://a/b c#d?e", "memory", "memory", "memory://a/b c#d?e"),
        ("file:///a/b", "file", "file", "file:///a/b"),
        ("/a/b", "file", "file", "/a/b"),
        ("/a/b:/c", "file", "file", "/a/b:/c"),
        (Path("/a/b"), "file", "file", "/a/b"),
    ],
)
def test_a_uri_names_scheme_and_driver(uri, scheme, driver, seen):
    assert Location.parse(uri) == Location(seen, scheme, driver)


def test_a_relative_path_is_local_and_survives_a_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Location.parse("runs/1").uri == str(tmp_path / "runs/1")


@pytest.mark.parametrize("uri", ["s3:/bucket/x", "gs:/b", Path("s3://bucket/x")])
def test_a_uri_that_lost_a_slash_is_refused_not_written_to_disk(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ckptio.InvalidURIError, match="lost a slash"):
        ckptio.save(uri, {"w": 1})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("uri", ["", b"/a"])
def test_what_is_no_uri_is_refused(uri):
    with pytest.raises(ckptio.InvalidURIError):
        ckptio.exists(uri)


def test_the_environment_chooses_a_schemes_driver(monkeypatch):
    monkeypatch.setenv("CKPTIO_DRIVERS", "s3=obstore, gs=other")
    assert Location.parse("s3://b/x").driver == "s3+obstore"
    assert Location.parse("gs://b/x").driver == "gs+other"
    assert Location.parse("az://b/x").driver == "az"
    assert Location.parse("s3+native://b/x").driver == "s3+native"


def test_an_unknown_scheme_is_named_with_those_that_are_known():
    with pytest.raises(ckptio.UnknownSchemeError, match=r"nosuch://.*memory"):
        ckptio.open("nosuch://x/y")
    with pytest.raises(ckptio.UnknownSchemeError, match=r"s3\+nosuch://"):
        ckptio.open("s3+nosuch://x/y")


def test_two_distributions_that_claim_a_scheme_are_both_named(claims):
    claims(clash=["one.driver", "two.driver"])
    with pytest.raises(ckptio.DriverConflictError, match=r"one\.driver.*two\.driver"):
        ckptio.open_backend("clash://x")


def test_a_driver_that_cannot_be_imported_says_why(claims):
    claims(broken=["no_such_module_anywhere"])
    with pytest.raises(ckptio.DriverUnavailableError, match=r"broken://.*no_such_module_anywhere"):
        ckptio.open_backend("broken://x")


def test_one_driver_may_serve_several_schemes(claims):
    claims(one=["ckptio.memory"], two=["ckptio.memory"])
    for scheme in ["one", "two"]:
        with pytest.raises(ckptio.UnknownSchemeError):  # the memory driver knows its own alone
            ckptio.open_backend(f"{scheme}://x")
    assert hooks._drivers["one"] is hooks._drivers["two"]


def test_options_that_a_driver_does_not_take_are_named(tmp_path):
    for uri in ["memory://x/y", tmp_path]:
        with pytest.raises(ckptio.InvalidOptionError, match="endpoint"):
            ckptio.exists(uri, storage_options={"endpoint": 1})


def test_ckptio_open_backend_can_be_implemented_by_a_registered_plugin(register):
    class Mine:
        @ckptio.hookimpl
        def ckptio_open_backend(self, uri, scheme):
            return MemoryBackend(uri) if scheme == "mine" else None

    register(Mine())
    report = ckptio.save("mine://a/b", {"w": 1})
    assert report.uri == "mine://a/b"
    assert ckptio.restore("mine://a/b") == {"w": 1}


def test_ckptio_wrap_backend_wraps_and_nests(register):
    seen = []

    class Wrap:
        @ckptio.hookimpl
        def ckptio_wrap_backend(self, backend):
            seen.append(type(backend).__name__)
            return FaultyBackend(backend)

    register(Wrap())
    register(Wrap())
    ckptio.save("memory://wrap/x", {"w": 1}, overwrite=True)
    assert seen == ["MemoryBackend", "FaultyBackend"]


def test_notifications_tell_the_story(register):
    heard = []

    class Listen:
        @ckptio.hookimpl
        def ckptio_save_started(self, uri, attempt):
            heard.append(("started", uri, len(attempt)))

        @ckptio.hookimpl
        def ckptio_save_committed(self, uri, report):
            heard.append(("committed", uri, report.leaves))

        @ckptio.hookimpl
        def ckptio_save_failed(self, uri, error):
            heard.append(("failed", uri, str(error)))

        @ckptio.hookimpl
        def ckptio_restore_finished(self, uri, report):
            heard.append(("restored", uri, report.leaves))

    class Full:
        @ckptio.hookimpl
        def ckptio_wrap_backend(self, backend):
            def full(call):
                if call.method == "put" and call.key.endswith("safetensors"):
                    raise ckptio.StorageFullError("full")

            return FaultyBackend(backend, full)

    register(Listen())
    ckptio.save("memory://notify/x", {"w": 1}, overwrite=True)
    ckptio.restore("memory://notify/x")
    register(Full())
    with pytest.raises(ckptio.StorageFullError):
        ckptio.save("memory://notify/y", {"w": 1}, overwrite=True)
    uri = "memory://notify/x"
    assert heard == [
        ("started", uri, 16), ("committed", uri, 1), ("restored", uri, 1),
        ("started", "memory://notify/y", 16), ("failed", "memory://notify/y", "full"),
    ]  # fmt: skip


def test_an_observer_that_fails_is_logged_and_changes_nothing(register, caplog):
    class Broken:
        @ckptio.hookimpl
        def ckptio_save_committed(self):
            raise RuntimeError("observer is broken")

    register(Broken())
    with caplog.at_level(logging.ERROR, "ckptio"):
        ckptio.save("memory://broken/x", {"w": 1}, overwrite=True)
    assert "observer is broken" in caplog.text
    assert ckptio.restore("memory://broken/x") == {"w": 1}

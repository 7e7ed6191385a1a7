"""How ckptio finds this plugin, and how options reach obstore."""

import subprocess
import sys

import ckptio
import numpy as np
import pytest
import servers

from ckptio_obstore.options import Config


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_each_scheme_is_served_beside_the_others(scheme):
    with ckptio.open_backend(f"{scheme}+obstore://bucket/run", _account(scheme)) as backend:
        assert type(backend).__module__ == "ckptio_obstore.backend"
        assert backend.uri == f"{scheme}://bucket/run"


def test_the_environment_makes_it_the_driver_of_the_plain_scheme(monkeypatch):
    monkeypatch.setenv("CKPTIO_DRIVERS", "s3=obstore")
    with ckptio.open_backend("s3://bucket/run") as backend:
        assert type(backend).__module__ == "ckptio_obstore.backend"


def _account(scheme):
    return {"account_name": "name", "anon": True} if scheme == "az" else {}


@pytest.mark.parametrize(
    ("uri", "options", "settings"),
    [
        (
            "s3://b",
            {"key": "k", "secret": "s", "token": "t", "client_kwargs": {"region_name": "r"}},
            {"access_key_id": "k", "secret_access_key": "s", "session_token": "t", "region": "r"},
        ),
        ("s3://b", {"anon": True}, {"skip_signature": True}),
        ("s3://b", {"anon": False, "unsigned_payload": True}, {"unsigned_payload": True}),
        ("gs://b", {"token": "anon", "project": "p"}, {"skip_signature": True}),
        ("gs://b", {"token": "/key.json"}, {"service_account": "/key.json"}),
        ("gs://b", {"token": {"type": "x"}}, {"service_account_key": '{"type": "x"}'}),
        ("az://c", {"account_name": "a", "sas_token": "t"}, {"account_name": "a", "sas_key": "t"}),
        (
            "az://c",
            {"connection_string": "AccountName=a;AccountKey=k==;EndpointSuffix=core.windows.net"},
            {
                "account_name": "a",
                "account_key": "k==",
                "endpoint": "https://a.blob.core.windows.net",
            },
        ),
    ],
)
def test_options_in_fsspecs_spelling_are_understood(uri, options, settings):
    assert Config.parse(uri, options).settings == settings


@pytest.mark.parametrize(
    "options",
    [{"nonsense": 1}, {"profile": "p"}, {"client_kwargs": {"nonsense": 1}}],
)
def test_options_that_mean_nothing_are_refused(options):
    name = "profile" if "profile" in options else "nonsense"
    with pytest.raises(ckptio.InvalidOptionError, match=name):
        ckptio.open_backend("s3+obstore://bucket", options)


def test_credentials_are_in_no_repr():
    with ckptio.open_backend("s3+obstore://bucket", {"key": "AKEY", "secret": "XYZ"}) as backend:
        assert "XYZ" not in repr(backend) + repr(backend._config)


def test_a_checkpoint_goes_there_and_back():
    tree = {"w": np.arange(6_000_000, dtype=np.float32), "b": np.ones(3)}
    with servers.moto() as url:
        options = {"key": "k", "secret": "s", "endpoint_url": url}
        _make_bucket(url)
        ckptio.save("s3+obstore://bucket/run", tree, storage_options=options)
        found = ckptio.restore("s3+obstore://bucket/run", storage_options=options)
    np.testing.assert_array_equal(found["w"], tree["w"])
    np.testing.assert_array_equal(found["b"], tree["b"])


def test_the_store_being_out_of_reach_is_worth_a_retry():
    [port] = servers.free_ports(1)
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
    with ckptio.open_backend("s3+obstore://bucket", options) as backend:
        with pytest.raises(ckptio.StoreUnavailableError, match=str(port)):
            backend.put("k", b"")
        with pytest.raises(ckptio.StoreUnavailableError):
            backend.head("k")


def test_leaving_with_an_open_upload_does_not_crash():
    with servers.moto() as url:
        _make_bucket(url)
        script = (
            "import ckptio\n"
            f"options = dict(key='k', secret='s', endpoint_url={url!r})\n"
            "backend = ckptio.open_backend('s3+obstore://bucket', options)\n"
            "upload = backend.start_upload('k', 20 << 20, 8 << 20)\n"
            "upload.write_part(0, bytes(8 << 20))\n"
        )
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def _make_bucket(url):
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=10).close()


def test_an_upload_that_breaks_says_so_at_once_and_is_not_tried_in_vain():
    part = 8 << 20
    with servers.moto() as url:
        _make_bucket(url)
        options = {"key": "k", "secret": "s", "endpoint_url": url}
        options["retry_config"] = {"max_retries": 0}
        backend = ckptio.open_backend("s3+obstore://bucket", options)
        upload = backend.start_upload("k", 12 * part, part)
        upload.write_part(0, bytes(part))
    with pytest.raises(ckptio.StorageError, match="the upload is lost") as caught:  # noqa: PT012
        for offset in range(part, 12 * part, part):
            upload.write_part(offset, bytes(part))
        upload.complete()
    assert not isinstance(caught.value, ckptio.StoreUnavailableError)
    upload.abort()

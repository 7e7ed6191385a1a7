"""The Azure driver keeps the backend contract, and promises of its own."""

import asyncio
import os
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import fsspec.asyn
import pytest
from adlfs import AzureBlobFileSystem
from azure.core.credentials import AccessToken
from azure.storage.blob import ContainerClient
from servers.azurite import AzureServer, azurite
from servers.process import ServerUnavailableError, unavailable

import ckptio
from ckptio.errors import CorruptionError
from ckptio.testing import BackendContract
from ckptio_backends import azure
from ckptio_backends.azure_account import Place


@pytest.fixture(scope="module")
def server():
    try:
        with azurite() as server:
            yield server
    except ServerUnavailableError as error:
        unavailable(error)


@pytest.fixture
def backend(server):
    uri = f"{server.uri}/{uuid4().hex}"
    with ckptio.open_backend(uri, server.storage_options()) as backend:
        yield backend


class TestAzure(BackendContract):
    @pytest.fixture(autouse=True)
    def beside(self, server):
        self.server = server

    @pytest.fixture
    def backend(self, backend):
        return backend

    def raw_put(self, backend, key, data):
        self.server.raw_put(backend.describe(key), data)

    def raw_get(self, backend, key):
        return self.server.raw_get(backend.describe(key))


REAL_URI = os.environ.get("CKPTIO_TEST_AZURE_URI", "").rstrip("/")
REAL_ACCOUNT = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")


@pytest.mark.skipif(
    not (REAL_URI and REAL_ACCOUNT),
    reason="CKPTIO_TEST_AZURE_URI and AZURE_STORAGE_CONNECTION_STRING name no scratch prefix",
)
class TestRealService(BackendContract):
    """With the account of the environment; a prefix of its own, deleted afterwards."""

    @pytest.fixture
    def backend(self):
        container = REAL_URI.removeprefix("az://").partition("/")[0]
        uri = f"{REAL_URI}/{uuid4().hex}"
        with (
            ContainerClient.from_connection_string(REAL_ACCOUNT, container) as client,
            ckptio.open_backend(uri) as backend,
        ):
            self.server = AzureServer(0, client)
            yield backend
            backend.delete([info.key for info in backend.list()])

    def raw_put(self, backend, key, data):
        self.server.raw_put(backend.describe(key), data)

    def raw_get(self, backend, key):
        return self.server.raw_get(backend.describe(key))


# What Azure alone has


def test_two_uploads_of_one_key_never_mix(server, backend):
    part = 64 << 10
    uploads = [backend.start_upload("k", 2 * part, part) for _ in range(2)]
    for offset in [0, part]:
        for upload, fill in zip(uploads, [b"a", b"b"], strict=True):
            upload.write_part(offset, fill * part)
    uploads[0].complete()
    assert server.raw_get(backend.describe("k")) == b"a" * 2 * part
    # The first commit discarded what the other had staged: it fails, and breaks nothing.
    with pytest.raises(ckptio.StorageError, match="parts of the upload are missing"):
        uploads[1].complete()
    assert server.raw_get(backend.describe("k")) == b"a" * 2 * part


def test_an_upload_without_one_of_its_parts_does_not_complete(backend):
    upload = backend.start_upload("k", 3 << 16, 1 << 16)
    for offset in [0, 2 << 16]:
        upload.write_part(offset, b"x" * (1 << 16))
    with pytest.raises(ckptio.StorageError, match=r"/k: parts of the upload are missing"):
        upload.complete()
    assert not backend.exists("k")
    upload.write_part(1 << 16, b"x" * (1 << 16))
    assert upload.complete().size == 3 << 16


def test_completing_again_keeps_the_object_and_its_content(server, backend):
    upload = backend.start_upload("k", 2 << 16, 1 << 16)
    for offset in [0, 1 << 16]:
        upload.write_part(offset, b"%d" % offset * 10)
    upload.complete()
    before = server.raw_get(backend.describe("k"))
    again = upload.complete()
    assert server.raw_get(backend.describe("k")) == before
    assert backend.head("k").etag == again.etag


def test_an_empty_upload_is_an_empty_object(server, backend):
    upload = backend.start_upload("k", 0, 1 << 16)
    upload.write_part(0, b"")
    assert upload.complete().size == 0
    assert server.raw_get(backend.describe("k")) == b""


def test_a_large_object_is_put_by_one_request(backend):
    # More than the SDK itself would put at once.
    data = memoryview(bytearray(70 << 20))
    data[-1] = 1
    assert backend.put("k", data, mode="create").size == len(data)
    assert (
        not backend._connections.get()
        .container.get_blob_client(backend.describe("k").split("/", 3)[3])
        .get_block_list("all")[0]
    )
    with pytest.raises(ckptio.AlreadyExistsError):
        backend.put("k", data, mode="create")
    tail = bytearray(2)
    backend.read_into("k", len(data) - 2, memoryview(tail))
    assert tail == b"\0\1"


def test_deletes_more_than_one_batch(server, backend):
    keys = [f"d/{i}" for i in range(300)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: backend.put(key, b"1"), keys))
    backend.delete([*keys, *(f"absent/{i}" for i in range(300))])
    assert [*backend.list()] == []


def test_lists_more_than_one_page(backend, monkeypatch):
    monkeypatch.setattr(azure, "_PAGE", 3)
    keys = sorted(f"{i % 7}/{i}" for i in range(20))
    for key in keys:
        backend.put(key, b"")
    assert [info.key for info in backend.list()] == keys
    assert [*backend.list_children()] == [f"{i}/" for i in range(7)]


def test_real_directories_are_not_objects(server, backend):
    # With a hierarchical namespace each directory is a blob too, told apart by its metadata.
    root = backend.describe().removeprefix(server.uri + "/")
    for name in ["run", "run/1", "run/empty"]:
        server.client.upload_blob(f"{root}/{name}", b"", metadata={"hdi_isfolder": "true"})
    server.client.upload_blob(f"{root}/run/1/x", b"1")
    server.client.upload_blob(f"{root}/marker/", b"")
    assert [info.key for info in backend.list()] == ["run/1/x"]
    assert [*backend.list_children()] == ["marker/", "run/"]
    assert [*backend.list_children("run")] == ["1/", "empty/"]
    assert not backend.exists("run/1")


@pytest.mark.parametrize(
    "key", ["back\\slash", "dot.", "dot./x", "tab\t", "a" * 1025, "/".join("a" * 255), "\ud800"]
)
def test_names_that_azure_would_change_are_refused(backend, key):
    for call in [
        lambda: backend.put(key, b""),
        lambda: backend.head(key),
        lambda: backend.start_upload(key, 1, 1),
        lambda: backend.delete(["fine", key]),
    ]:
        with pytest.raises(ckptio.InvalidKeyError, match="Azure cannot hold"):
            call()


def test_works_inside_a_running_event_loop(backend):
    async def main():
        backend.put("k", b"1")
        return backend.read("k"), [info.key for info in backend.list()]

    assert asyncio.run(main()) == (b"1", ["k"])


def test_sockets_are_released(server):
    def cycle():
        with ckptio.open_backend(f"{server.uri}/{uuid4().hex}", server.storage_options()) as it:
            it.put("k", b"1")
            assert it.read("k") == b"1"
            with pytest.raises(CorruptionError):
                it.read_into("k", 0, memoryview(bytearray(2)))

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


# Options and URIs are those of adlfs

HOST = "account.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("uri", "container", "root", "account"),
    [
        ("az://container/run/1", "container", "run/1", None),
        ("abfs://container", "container", "", None),
        (f"abfs://container@{HOST}/run/1/", "container", "run/1", "account"),
        (f"abfss://container@{HOST}", "container", "", "account"),
        ("az://container@account.blob.core.windows.net/run", "container", "run", "account"),
        (f"abfss://{HOST}/container/run/1", "container", "run/1", "account"),
        ("az://container@elsewhere.example/run", "container", "run", None),
        ("az://container/a?b=c", "container", "a?b=c", None),
        ("az://container/a#b%20c", "container", "a#b%20c", None),
    ],
)
def test_a_uri_names_what_it_names_to_adlfs(uri, container, root, account):
    place = Place.parse(uri.rstrip("/"))
    assert (place.container, place.root, place.account) == (container, root, account)
    path = "/".join(filter(None, [container, root]))
    assert AzureBlobFileSystem._strip_protocol(uri).rstrip("/") == path
    assert AzureBlobFileSystem._get_kwargs_from_urls(uri).get("account_name") == account


@pytest.mark.parametrize(
    "uri",
    ["az://", "az://UPPER/x", "az://ab", "az://c--d/x", "az://container/a//b", "az://con/a\\b"],
)
def test_a_uri_that_names_no_container_is_refused(uri):
    with pytest.raises(ckptio.InvalidURIError):
        ckptio.open_backend(uri, {"account_name": "account", "anon": True})


KEYED = {"account_name": "account", "account_key": "a2V5"}
SAS = {"sv": "2022-11-02", "sp": "r", "sig": "secret"}
SAS_TOKEN = "&".join(f"{k}={v}" for k, v in SAS.items())
PRINCIPAL = {"client_id": "c", "client_secret": "s", "tenant_id": "t"}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (KEYED, {}),
        ({}, {"ACCOUNT_NAME": "account", "ACCOUNT_KEY": "a2V5"}),
        ({"account_name": "other", "account_key": "b2s="}, {"ACCOUNT_NAME": "account"}),
        ({"account_name": "account", "sas_token": SAS_TOKEN}, {}),
        ({"account_name": "account", "sas_token": "?" + SAS_TOKEN}, {}),
        ({"account_name": "account", "credential": SAS_TOKEN}, {}),
        ({"account_name": "account"}, {"SAS_TOKEN": SAS_TOKEN}),
        ({**KEYED, "sas_token": SAS_TOKEN}, {}),
        ({"account_name": "account", "anon": True}, {}),
        ({"account_name": "account"}, {"ANON": "1"}),
        ({"account_name": "account", **PRINCIPAL}, {}),
        ({"account_name": "account", **PRINCIPAL, "anon": True}, {}),
        ({"account_name": "account", "anon": False}, {"ANON": "1"}),
        ({"account_name": "account"}, {}),
        ({"account_name": "account", "exclude_cli_credential": True}, {}),
        ({"account_name": "account", "anon": True, "account_host": "a.blob.core.example"}, {}),
        ({"connection_string": "AccountName=account;AccountKey=a2V5"}, {}),
        ({**KEYED, "connection_string": "AccountName=second;AccountKey=a2V5"}, {}),
        ({"account_name": "x"}, {"CONNECTION_STRING": "AccountName=second;AccountKey=a2V5"}),
        ({**KEYED, "location_mode": "secondary"}, {}),
        ({**KEYED, "blocksize": 1 << 20, "default_cache_type": "none", "asynchronous": False}, {}),
    ],
)
def test_options_open_the_account_that_they_open_to_adlfs(monkeypatch, options, environment):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    theirs = AzureBlobFileSystem(**options, skip_instance_cache=True)
    with ckptio.open_backend("az://container/x", options) as backend:
        ours = backend._connections.get().container
        service = theirs.service_client
        assert ours.url == service.get_container_client("container").url
        assert type(ours.credential).__name__ == type(service.credential).__name__
        for attribute in ["account_name", "account_key", "named_key", "signature"]:
            value = getattr(service.credential, attribute, None)
            assert getattr(ours.credential, attribute, None) == value


def test_what_adlfs_wrote_is_read_and_the_other_way_round(server, backend):
    theirs = AzureBlobFileSystem(**server.storage_options(), skip_instance_cache=True)
    theirs.pipe_file(backend.describe("from adlfs"), b"1")
    assert backend.read("from adlfs") == b"1"
    backend.put("to/adlfs", b"2")
    assert theirs.cat_file(backend.describe("to/adlfs")) == b"2"
    fsspec.asyn.sync(theirs.loop, theirs.service_client.close)


def test_an_unknown_option_is_named():
    with pytest.raises(ckptio.InvalidOptionError, match=r"acount_key, endpoint_url;"):
        ckptio.open_backend("az://container/x", {"endpoint_url": 1, "acount_key": "secret"})


def test_options_that_open_nothing_are_refused_in_words(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for uri, options, text in [
        ("az://container/x", {}, "no storage account for container 'container'"),
        (f"az://container@{HOST}/x", {"account_name": "other"}, "names the account 'account'"),
        ("az://container/x", {"connection_string": "no;sense"}, "malformed"),
        (
            "az://container/x",
            {"connection_string": "BlobEndpoint=https://?sig=hidden"},
            "Invalid URL",
        ),
        ("az://container/x", {"account_name": "a", "client_id": "c"}, "belong together"),
        ("az://container/x", {**KEYED, "location_mode": "moon"}, "location_mode"),
    ]:
        with pytest.raises(ckptio.InvalidOptionError, match=text) as caught:
            ckptio.open_backend(uri, options)
        assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_an_asynchronous_credential_works_as_it_does_for_adlfs():
    class Credential:
        async def get_token(self, *scopes, **_):
            return AccessToken(f"token for {scopes}", 2**31)

        async def close(self):
            pass

    options = {"account_name": "account", "credential": Credential()}
    with ckptio.open_backend("az://container/x", options) as backend:
        credential = backend._connections.get().container.credential
        assert credential.get_token("storage").token == "token for ('storage',)"


def test_without_the_sdk_the_error_says_what_to_install():
    code = """
import sys
sys.modules["azure.storage.blob"] = None
import ckptio
try:
    ckptio.open_backend("az://container/x")
except ckptio.DriverUnavailableError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'ckptio[azure]'" in done.stdout, done.stderr

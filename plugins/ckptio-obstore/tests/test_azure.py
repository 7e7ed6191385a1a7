"""On Azure Blob Storage, as Azurite plays it."""

from uuid import uuid4

import ckptio
import pytest
import servers
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient
from promises import ObstorePromises

CONTAINER = "scratch"


@pytest.fixture(scope="module")
def service():
    with servers.azurite() as url:
        text = (
            f"DefaultEndpointsProtocol=http;AccountName={servers.ACCOUNT};"
            f"AccountKey={servers.ACCOUNT_KEY};BlobEndpoint={url};"
        )
        with BlobServiceClient.from_connection_string(text) as client:
            client.create_container(CONTAINER)
            yield client, {"connection_string": text}


class TestAzurite(ObstorePromises):
    @pytest.fixture
    def backend(self, service):
        self.client, options = service
        with ckptio.open_backend(f"az+obstore://{CONTAINER}/{uuid4().hex}", options) as backend:
            yield backend

    def blob(self, backend, key):
        container, _, root = backend.uri.removeprefix("az://").partition("/")
        return self.client.get_blob_client(container, f"{root}/{key}")

    def raw_put(self, backend, key, data):
        self.blob(backend, key).upload_blob(data, overwrite=True)

    def raw_get(self, backend, key):
        try:
            return self.blob(backend, key).download_blob().readall()
        except ResourceNotFoundError:
            return None

    def test_a_missing_container_is_named(self, backend, service):
        uri = "az+obstore://no-such-container"
        refused = pytest.raises(ckptio.StorageError, match="no such bucket or container")
        with ckptio.open_backend(uri, service[1]) as other, refused:
            other.put("k", b"")

    def test_a_wrong_signature_is_refused_and_stays_secret(self, backend, service):
        url = service[1]["connection_string"].partition("BlobEndpoint=")[2].strip(";")
        options = {"account_name": servers.ACCOUNT, "sas_token": "sv=2020&sig=SECRET"}
        options["endpoint_url"] = url
        with ckptio.open_backend(f"az+obstore://{CONTAINER}", options) as other:
            with pytest.raises(ckptio.PermissionDeniedError) as caught:
                other.put("k", b"")
            assert "SECRET" not in str(caught.value) + repr(caught.value.__cause__)

"""On S3: moto, SeaweedFS, and where CKPTIO_TEST_S3_URI names a scratch prefix, the real one."""

import contextlib
import os
from uuid import uuid4

import boto3
import ckptio
import pytest
import servers
from botocore.config import Config
from botocore.exceptions import ClientError
from promises import ObstorePromises

BUCKET = "scratch"


class S3(ObstorePromises):
    @pytest.fixture
    def backend(self, service):
        self.client, bucket, options = service
        uri = f"s3+obstore://{bucket}/{uuid4().hex}"
        with ckptio.open_backend(uri, options) as backend:
            yield backend

    def place(self, backend, key):
        bucket, _, root = backend.uri.removeprefix("s3://").partition("/")
        return {"Bucket": bucket, "Key": f"{root}/{key}"}

    def raw_put(self, backend, key, data):
        self.client.put_object(**self.place(backend, key), Body=data)

    def raw_get(self, backend, key):
        try:
            with self.client.get_object(**self.place(backend, key))["Body"] as body:
                return body.read()
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise

    def test_an_aborted_upload_leaves_no_parts_behind(self, backend):
        part = self._part_size(backend)
        upload = backend.start_upload("gone", 3 * part, part)
        upload.write_part(0, b"x" * part)
        upload.write_part(part, b"x" * part)
        upload.abort()
        found = self.client.list_multipart_uploads(Bucket=self.place(backend, "gone")["Bucket"])
        keys = [upload["Key"] for upload in found.get("Uploads", [])]
        assert self.place(backend, "gone")["Key"] not in keys

    def test_a_missing_bucket_is_named(self, backend, service):
        uri = f"s3+obstore://no-such-{uuid4().hex}/run"
        with ckptio.open_backend(uri, service[2]) as other:
            with pytest.raises(ckptio.StorageError, match="no such bucket"):
                other.put("k", b"")
            with pytest.raises(ckptio.StorageError, match="no such bucket"):
                list(other.list())


@contextlib.contextmanager
def at(url, secret):
    options = {"key": "key", "secret": secret, "endpoint_url": url}
    options["client_kwargs"] = {"region_name": "us-east-1"}
    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="key",
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    with contextlib.closing(client):
        client.create_bucket(Bucket=BUCKET)
        yield client, BUCKET, options


@pytest.fixture(scope="module")
def moto():
    with servers.moto() as url, at(url, "secret123") as service:
        yield service


@pytest.fixture(scope="module")
def seaweedfs():
    with servers.seaweedfs() as url, at(url, "secret123") as service:
        yield service


class TestMoto(S3):
    @pytest.fixture
    def service(self, moto):
        return moto


class TestSeaweedFS(S3):
    forgets_directories = False  # it does so only later

    @pytest.fixture
    def service(self, seaweedfs):
        return seaweedfs

    def test_a_missing_bucket_is_named(self, backend, service):
        # This server makes the bucket at the first put.
        uri = f"s3+obstore://no-such-{uuid4().hex}/run"
        with ckptio.open_backend(uri, service[2]) as other:
            assert not other.exists("k")

    def test_a_wrong_secret_is_refused_and_stays_secret(self, backend, service):
        options = service[2] | {"secret": "not-the-secret"}
        with ckptio.open_backend(backend.uri.replace("s3:", "s3+obstore:"), options) as other:
            for call in (lambda: other.put("k", b""), lambda: other.head("k")):
                with pytest.raises(ckptio.PermissionDeniedError) as caught:
                    call()
                assert "not-the-secret" not in str(caught.value) + repr(caught.value.__cause__)
            assert "not-the-secret" not in repr(other) + repr(other._config)


class TestRealS3(S3):
    @pytest.fixture
    def service(self):
        uri = os.environ.get("CKPTIO_TEST_S3_URI", "")
        if not uri:
            pytest.skip("CKPTIO_TEST_S3_URI is not set")
        with contextlib.closing(boto3.client("s3")) as client:
            yield client, uri.removeprefix("s3://").rstrip("/"), {}

"""Errors of stores and drivers: a sentence with URL and remedy."""

from __future__ import annotations

import errno

import fsspec
import pytest

import ucpl
from tests.storage.test_sources import refused as raised
from ucpl.storage import objects
from ucpl.storage.error_mapping import store_error
from ucpl.storage.objects import OfFsspec, RequestCounts, with_retries
from ucpl.storage.urls import split

HEAD = "Generic S3 error: Error performing list request: Error performing GET http://127.0.0.1:9/b?list-type=2 in 4.7ms"
SAID = "Server returned non-2xx status code: {status}: <Error><Code>{code}</Code> <Message>{text}</Message></Error>"


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        (
            f"{HEAD} - {SAID.format(status='404 Not Found', code='NoSuchBucket', text='None is so')}\n\nDebug source: Generic",
            "404 NoSuchBucket: None is so",
            "AWS_ENDPOINT_URL",
        ),
        (
            f"{HEAD} - {SAID.format(status='403 Forbidden', code='InvalidAccessKeyId', text='Who is it')}",
            "403 InvalidAccessKeyId: Who is it",
            "AWS_SECRET_ACCESS_KEY",
        ),
        (f"{HEAD} - Server returned non-2xx status code: 503 Service Unavailable: busy", "503 busy", ""),
        (
            f"{HEAD}, after 2 retries, max_retries: 2, retry_timeout: 5s - HTTP error: error sending request",
            "HTTP error: error sending request (GET http://127.0.0.1:9/b)",
            "",
        ),
        (
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s, after 2 retries - none",
            "none (PUT http://169.254.169.254/latest/api/token)",
            "No credentials were found",
        ),
        ("", "Exception", ""),
    ],
)
def test_what_a_store_says_is_a_sentence(text: str, said: str, remedy: str) -> None:
    error = store_error("s3://b/run not listed", Exception(text), ", after 2 attempts in 1 s")
    assert error.strerror == f"s3://b/run not listed, after 2 attempts in 1 s: {said}"
    assert remedy in error.remedy and bool(remedy) == bool(error.remedy)


@pytest.mark.parametrize(
    ("scheme", "keys"), [("s3a", "AWS_ACC"), ("gs", "GOOGLE_"), ("abfs", "AZURE_"), ("sftp", "fsspec")]
)
def test_credentials_are_those_of_the_scheme(scheme: str, keys: str) -> None:
    error = store_error(f"{scheme}://b/run not listed", PermissionError(errno.EACCES, "no"))
    assert keys in error.remedy


def test_a_store_that_gives_nothing_is_refused(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request, with the URL: E685 for sources, E503 for targets."""

    def gone(*_: object, **__: object) -> None:
        raise TimeoutError("nobody there")

    monkeypatch.setattr(objects, "attempts", lambda: 2)
    monkeypatch.setattr(type(store), "find", gone)
    error = raised(lambda: ucpl.infer("memory://bucket/run"))
    assert error.diagnostics[0].code == "E685" and error.exit_status == 3 and error.is_of_the_disk
    assert error.diagnostics[0].message.startswith("memory://bucket/run not listed, after 2 attempts in ")
    to = raised(lambda: ucpl.convert("examples/checkpoint", "memory://bucket/out", to="zero1(dp=2)"))
    assert to.diagnostics[0].code == "E503" and "memory://bucket/out" in to.diagnostics[0].message


def test_a_request_is_made_again_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], [0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda s: now.__setitem__(0, now[0] + s))

    def call() -> None:
        asked[0] += 1
        now[0] += 50
        raise TimeoutError("late")

    with pytest.raises(OSError, match=r"after 3 attempts in 15\d s: late"):
        with_retries(call, "s3://b/run not read", RequestCounts())
    asked[0] = 0
    monkeypatch.setenv("UCPL_REMOTE_SECONDS", "1000")
    with pytest.raises(OSError, match="after 8 attempts"):
        with_retries(call, "s3://b/run not read", RequestCounts())
    assert asked[0] == 8


def test_what_is_gone_is_not_asked_for_again(store: fsspec.AbstractFileSystem) -> None:
    counted = RequestCounts()
    with pytest.raises(FileNotFoundError, match="memory://bucket/none: bytes 0 to 1 not read: there is no such object"):
        OfFsspec("memory://bucket", store, "/bucket", counted).read("none", 0, 1, "")
    assert counted.requests == 1


@pytest.mark.parametrize("url", ["s3://b/run", "az://b/run", "gs://b/run"])
def test_a_url_is_a_bucket_and_a_name(url: str) -> None:
    assert split(url) == (url, url.removesuffix("/run"), "run")
    assert split(url.removesuffix("run")) == (url.removesuffix("/run"), url.removesuffix("/run"), "")

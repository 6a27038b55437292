"""Errors of a store as sentences, with a remedy."""

from __future__ import annotations

import errno
import re
from typing import NoReturn

from ucpl.errors import Label, fail

__all__ = ["reject_source", "reject_target", "store_error", "server_message", "status_of"]

_STATUS = re.compile(r"status code:? (\d{3})(?: [A-Z][\w ]*)?:? ?")
_CODE = re.compile(r"<Code>\s*([^<]+?)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<]+?)\s*(?:</|$)")
_REQUEST = re.compile(r"Error performing ([A-Z]+) (\S+?)(?:\?\S*)? in \S+, after .*? - ")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_SERVER = {"s3": "AWS_ENDPOINT_URL and AWS_REGION", "az": "AZURE_STORAGE_ACCOUNT_NAME"}


class StoreError(OSError):
    """A permanent error. `strerror` is a complete sentence with the URL."""

    remedy = ""


def store_error(request: str, error: BaseException, tried: str = "") -> StoreError:
    """The error of a request.

    request: the requested object, by its URL.
    tried: the number of attempts.
    """
    made = StoreError(errno.EIO, f"{request}{tried}: {server_message(error)}")
    made.remedy = _remedy(request, error)
    return made


def status_of(error: BaseException) -> int:
    """Of HTTP; 0: there was none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found is not None else 0


def server_message(error: BaseException) -> str:
    """The message of a server, without the driver's additions.

    If it is empty: the server and the kind of error.
    """
    message_text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(message_text.partition("\n\nDebug")[0].split())
    found = _STATUS.search(text)
    if found is not None:
        code, message = _CODE.search(text), _MESSAGE.search(text)
        words = [one[1] for one in (code, message) if one is not None] or [text[found.end() :]]
        return ": ".join([f"{found[1]} {words[0]}".strip(), *words[1:]])[:400]
    request_match = _REQUEST.search(text)
    if request_match is not None:
        return f"{text[request_match.end() :]} ({request_match[1]} {request_match[2]})"[:400]
    return text[:400] or type(error).__name__


def _remedy(request: str, error: BaseException) -> str:
    """ "": the catalogue's."""
    text = str(error)
    kind = {"s3a": "s3", "gcs": "gs"}.get(scheme := request.partition(":")[0], scheme)
    if kind in ("azure", "abfs", "abfss", "adl"):
        kind = "az"
    keys = _KEYS.get(kind, "the credentials of its fsspec package")
    if "169.254.169.254" in text or "metadata.google" in text:
        return f"No credentials were found: set {keys}" + (
            ", or AWS_SKIP_SIGNATURE=true for public data." if kind == "s3" else "."
        )
    if isinstance(error, PermissionError) or status_of(error) in (401, 403):
        return (
            f"Check the credentials ({keys}) and their permissions: list and read, and for a target write and delete."
        )
    if status_of(error) in (301, 307, 308, 400, 404):
        server = _SERVER.get(kind)
        return "Check the name of the bucket" + (f", and {server}, which select the server." if server else ".")
    return ""


def reject_source(error: OSError, url: str) -> NoReturn:
    """Report a failed read.

    url: the requested object.
    Raises: UcplError E685, always.
    """
    text = error.strerror or str(error)
    remedy = error.remedy if isinstance(error, StoreError) else ""
    fail("E685", text if "://" in text else f"{url}: {text}", Label(url), remedy=remedy)


def reject_target(error: OSError, url: str) -> NoReturn:
    """Report a failed write.

    url: the target.
    Raises: UcplError E503, always.
    """
    remedy = error.remedy if isinstance(error, StoreError) else ""
    remedy = remedy or "Remove the cause (network, server, quota) and run the same command again."
    fail("E503", f"{url} cannot be written: {error.strerror or error}", Label(url), remedy=remedy)

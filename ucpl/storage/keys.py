"""The keys of a host, and the TLS contexts made from them.

A folder has `ca.crt`, `tls.crt` and `tls.key`. These are the names of a Kubernetes TLS secret, so a mounted one works
unchanged. URIs in the subjectAltName of a certificate are the names of its owner: `ucpl:d2` is domain 2, `ucpl:JOB/d2`
is domain 2 of the vault JOB only, `ucpl:reader` is a host without a domain.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import define

__all__ = ["AUTHORITY", "CERTIFICATE", "KEY", "PREFIX", "READER", "Keys", "Names", "any_name", "names_in", "names_of"]

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
PREFIX = "ucpl:"
READER = "reader"
Names: TypeAlias = frozenset[str]
_Stamp: TypeAlias = tuple[tuple[int, int, int, int], ...]


def names_of(job: str, who: str) -> Names:
    """URIs in the certificate of `who` of a vault."""
    return frozenset((f"{PREFIX}{who}", f"{PREFIX}{job}/{who}"))


def any_name(job: str, domains: int) -> Names:
    """URIs of all that may query the servers of a vault.

    They are its domains and the readers.
    """
    return frozenset[str]().union(*(names_of(job, who) for who in (READER, *(f"d{n}" for n in range(domains)))))


def names_in(certificate: Mapping[str, object] | None) -> Names:
    """Our names in a peer's certificate, as `SSLSocket.getpeercert` gives it."""
    found = (certificate or {}).get("subjectAltName", ())
    assert isinstance(found, tuple)
    return frozenset(text for kind, text in found if kind == "URI" and text.startswith(PREFIX))


@define(eq=False)
class Keys:
    """One host's. Certificates that are renewed in place are loaded again."""

    folder: Path
    _contexts: dict[bool, tuple[_Stamp, ssl.SSLContext]] = field(factory=dict)

    def context(self, *, serves: bool) -> ssl.SSLContext:
        """A TLS 1.3 context; both sides present a certificate of the authority.

        Raises: OSError, also as ssl.SSLError.
        """
        stamp = self._checked()
        known = self._contexts.get(serves)
        if known is None or known[0] != stamp:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # a certificate names a domain, wherever its host is
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.folder / AUTHORITY)
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password=lambda: "")
            if serves:
                context.num_tickets = 0  # nothing is resumed
            known = self._contexts[serves] = (stamp, context)
        return known[1]

    def _checked(self) -> _Stamp:
        """The current state of the files.

        Raises: OSError; PermissionError, if others can read or change a key or folder.
        """
        found = tuple(map(self._stamp, (AUTHORITY, CERTIFICATE, KEY)))
        status = os.stat(self.folder)
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(1, f"it belongs to user {status.st_uid}", str(self.folder))
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:  # a mounted secret has mode 1777
            mode = stat.S_IMODE(status.st_mode)
            what = f"its mode, {mode:04o}, lets other users replace its files: chmod 700 {self.folder}"
            raise PermissionError(1, what, str(self.folder))
        return found

    def _stamp(self, name: str) -> tuple[int, int, int, int]:
        path = self.folder / name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(22, "it is not a regular file", str(path))
        mode = stat.S_IMODE(status.st_mode)
        # As PostgreSQL has it: a secret that root mounts may be readable for the group.
        allowed = 0o700 if status.st_uid == os.geteuid() else 0o740
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(1, f"it belongs to user {status.st_uid}", str(path))
        if mode & 0o022 or (name == KEY and mode & ~allowed):
            what = "read or change" if name == KEY else "change"
            raise PermissionError(1, f"its mode, {mode:04o}, lets other users {what} it: chmod 600 {path}", str(path))
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def authority(self) -> bytes:
        """A digest of the certificate of the authority. Raises: OSError."""
        text = (self.folder / AUTHORITY).read_text()
        return blake2b("".join(text.split()).encode(), digest_size=32).digest()

    def names(self) -> Names:
        """The names in this host's own certificate. Raises: OSError.

        A TLS handshake with itself in memory reads them.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.context(serves=False).wrap_bio(to_client, to_server)
        server = self.context(serves=True).wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        return names_in(server.getpeercert())

    def demand(self, names: Names | None, who: str) -> None:
        """Check that this host's certificate is valid for one of these names.

        None: any of our names. Raises: UcplError E687.
        """
        try:
            found = self.names()
        except OSError as error:
            path = os.fsdecode(error.filename or self.folder)
            fail("E687", f"{path}: {_reason(error)}", Label(str(self.folder), where=path))
        if not found if names is None else not found & names:
            needed = "ucpl:d0, say," if names is None else " or ".join(sorted(names))
            names_text = ", ".join(sorted(found)) or f"no name that begins with {PREFIX}"
            what = f"{self.folder / CERTIFICATE} is not the certificate of {who}"
            fail("E687", what, Label(str(self.folder), f"it has {names_text}; {needed} is needed"))


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"it is not valid under {AUTHORITY}: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"{CERTIFICATE} and {KEY} cannot be used: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return error.strerror or str(error)

"""Keys and certificates of a vault: one authority, one folder per domain.

The folder is copied to the host of the domain.
"""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail
from ucpl.owned import make_owned, open_new
from ucpl.records import frozen
from ucpl.storage.keys import AUTHORITY, CERTIFICATE, KEY, PREFIX, READER

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, KeyUsage, Name

__all__ = ["AUTHORITY_KEY", "issue"]

AUTHORITY_KEY = "ca.key"  # of the authority; no host needs it
YEARS = 10
_DAY = dt.timedelta(days=1)  # clocks of hosts differ


def issue(folder: Path, domains: int) -> list[Path]:
    """Create the missing authority and the missing certificates.

    Each domain and the readers have one certificate. Existing ones are not replaced. Returns the new folders. Raises:
    UcplError E686, E690 if `cryptography` is not installed, OSError.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError:
        what = "keys and certificates need the package cryptography, which is not installed"
        fail("E690", what, Label("vault keys", where=str(folder)), remedy="pip install 'ucpl[vault]'")
    make_owned(folder)
    authority = _Authority.at(folder)
    made = []
    for who in (*(f"d{n}" for n in range(domains)), READER):
        if not os.path.lexists(folder / who):
            authority.make(folder, who)
            made.append(folder / who)
    return made


@frozen(eq=False)
class _Authority:
    certificate: Certificate
    key: EllipticCurvePrivateKey

    @classmethod
    def at(cls, folder: Path) -> _Authority:
        """The authority in a folder; it is created if missing.

        Raises: OSError, UcplError E687.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if not os.path.lexists(folder / AUTHORITY) and not os.path.lexists(folder / AUTHORITY_KEY):
            cls._make(folder)
        try:
            found = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
            key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            what = f"{folder} has no authority of a vault: {AUTHORITY} and {AUTHORITY_KEY}: {reason}"
            fail("E687", what, Label(str(folder)), remedy="name a new folder, or the one that was made first")
        if not isinstance(key, EllipticCurvePrivateKey):
            fail("E687", f"{folder / AUTHORITY_KEY} was not made by `ucpl vault keys`", Label(str(folder)))
        return cls(found, key)

    @staticmethod
    def _make(folder: Path) -> None:
        from cryptography import x509

        key = _new_key()
        name = _named("ucpl vault authority")
        certificate = (
            _begun(name, name, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
        )
        _write(folder, AUTHORITY, _signed(certificate, key))
        _write(folder, AUTHORITY_KEY, _text_of(key))

    def make(self, folder: Path, who: str) -> None:
        """Create the folder for a host; it gets its name when complete.

        Raises: OSError.
        """
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID as Use

        key = _new_key()
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _begun(_named(f"ucpl {who}"), self.certificate.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([Use.SERVER_AUTH, Use.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(PREFIX + who)]), critical=False)
            .add_extension(issuer, critical=False)
        )
        new = folder / f".{who}.new"
        os.mkdir(new, 0o700)
        _write(new, AUTHORITY, (folder / AUTHORITY).read_bytes())
        _write(new, CERTIFICATE, _signed(certificate, self.key))
        _write(new, KEY, _text_of(key))
        os.rename(new, folder / who)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _named(text: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(subject: Name, issuer: Name, key: EllipticCurvePrivateKey) -> CertificateBuilder:
    from cryptography import x509

    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + YEARS * 365 * _DAY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, authority: bool) -> KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: CertificateBuilder, key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _text_of(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(folder: Path, name: str, data: bytes) -> None:
    """Write a new file. Raises: OSError, if it exists."""
    with os.fdopen(open_new(folder / name), "wb") as file:
        file.write(data)

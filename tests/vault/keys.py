"""Keys of hosts, made once for all tests of a process."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from ucpl.storage.certificates import issue

DOMAINS = 8
_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def authority(which: str = "first") -> Path:
    """A folder as `ucpl vault keys` makes it; another authority for each name."""
    _kept.append(tempfile.TemporaryDirectory(prefix="ucpl-test-keys-"))
    folder = Path(_kept[-1].name) / "keys"
    issue(folder, DOMAINS)
    return folder


def keys_of(number: int) -> Path:
    return authority() / f"d{number}"


def forged(
    folder: Path,
    who: str,
    *,
    days: tuple[int, int] = (-1, 10),
    signer: Path | None = None,
    use: str = "both",
    by_itself: bool = False,
) -> Path:
    """Keys of `who` that this library would not make.

    days: the validity of the certificate, relative to now. signer: a folder whose `tls.key` signs like an authority.
    use: the purpose of the certificate. by_itself: its own key signs, in the name of the authority.
    """
    folder.mkdir()
    name, key = ("ca", "ca.key") if signer is None else ("tls", "tls.key")
    top = signer or authority()
    issuer = x509.load_pem_x509_certificate((top / f"{name}.crt").read_bytes())
    its_key, own = load_pem_private_key((top / key).read_bytes(), None), ec.generate_private_key(ec.SECP256R1())
    assert isinstance(its_key, ec.EllipticCurvePrivateKey)
    now, uses = dt.datetime.now(dt.UTC), ExtendedKeyUsageOID
    wanted = {"both": [uses.SERVER_AUTH, uses.CLIENT_AUTH], "server": [uses.SERVER_AUTH], "code": [uses.CODE_SIGNING]}[
        use
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who)]))
        .issuer_name(issuer.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=days[0]))
        .not_valid_after(now + dt.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(wanted), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"ucpl:{who}")]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(its_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .sign(own if by_itself else its_key, hashes.SHA256())
    )
    chain = made.public_bytes(Encoding.PEM) + (b"" if signer is None else issuer.public_bytes(Encoding.PEM))
    shutil.copy(authority() / "ca.crt", folder)
    (folder / "tls.crt").write_bytes(chain)
    (folder / "tls.key").touch(0o600)
    (folder / "tls.key").write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder

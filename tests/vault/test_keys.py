"""`ucpl vault keys`, and keys that a cluster hands out."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.vault.keys import authority, keys_of
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.storage.keys import Keys, names_of


def test_keys_are_private_and_made_once(tmp_path, capsys):
    folder = tmp_path / "keys"
    umask = os.umask(0)
    try:
        assert main(["vault", "keys", str(folder), "--hosts", "node0:7070,node1:7070", "--json"]) == 0
    finally:
        os.umask(umask)
    printed = json.loads(capsys.readouterr().out)
    assert printed["made"] == [str(folder / name) for name in ("d0", "d1", "reader")]
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert not (folder / "d0/ca.key").exists()
    assert Keys(folder / "d1").names() == {"ucpl:d1"}
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["vault", "keys", str(folder), "--domains", "3"]) == 0
    assert f"made       {folder / 'd2'}: for the host of this domain" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in before} == before
    assert Keys(folder / "d2").authority() == Keys(folder / "d0").authority()


def test_a_folder_without_its_authority_gets_no_keys(tmp_path, capsys):
    folder = tmp_path / "keys"
    shutil.copytree(authority(), folder)
    os.chmod(folder, 0o700)
    (folder / "ca.key").unlink()
    assert main(["vault", "keys", str(folder), "--domains", "9"]) == 2
    assert "error[E687]" in capsys.readouterr().err and not (folder / "d8").exists()
    os.chmod(folder, 0o770)
    assert main(["vault", "keys", str(folder)]) == 4
    assert "lets other users write to it" in capsys.readouterr().err
    assert main(["vault", "keys", str(tmp_path / "new"), "--domains", "2", "--hosts", "a,b,c"]) == 2
    assert not (tmp_path / "new").exists()


def test_without_cryptography_the_package_to_install_is_named(tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "cryptography":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["vault", "keys", str(tmp_path / "keys")]) == 2
    assert "pip install 'ucpl[vault]'" in capsys.readouterr().err


def test_keys_that_a_cluster_mounts_are_used_as_they_are(tmp_path):
    """Links into a folder that is replaced at each renewal."""
    mounted = tmp_path / "mounted"
    shutil.copytree(keys_of(1), mounted / "..2026")
    os.symlink("..2026", mounted / "..data")
    for name in ("ca.crt", "tls.crt", "tls.key"):
        os.symlink(f"..data/{name}", mounted / name)
    keys = Keys(mounted)
    keys.demand(names_of("job", "d1"), "d1")
    first = keys.context(serves=True)
    assert keys.context(serves=True) is first
    shutil.copytree(keys_of(2), mounted / "..2027")
    os.unlink(mounted / "..data")
    os.symlink("..2027", mounted / "..data")
    assert keys.names() == {"ucpl:d2"} and keys.context(serves=True) is not first
    with pytest.raises(UcplError, match=r"E687: .*is not the certificate of d1"):
        keys.demand(names_of("job", "d1"), "d1")


def test_a_certificate_may_be_of_one_vault_alone():
    assert names_of("job", "d1") == {"ucpl:d1", "ucpl:job/d1"}
    assert not names_of("job", "d1") & {"ucpl:other/d1", "ucpl:d10", "ucpl:d0"}


@pytest.mark.parametrize("change", ["cut", "empty", "folder", "pipe", "other text"])
def test_keys_that_are_none_are_named(tmp_path, change):
    folder = tmp_path / "keys"
    shutil.copytree(keys_of(0), folder)
    path = Path(folder / "tls.crt")
    data = path.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes({"cut": data[:100], "empty": b"", "other text": b"hello"}[change])
        os.chmod(path, 0o600)
    with pytest.raises(UcplError, match=r"E687: .*/keys"):
        Keys(folder).demand(None, "a host")


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o777, 0, "lets other users replace its files: chmod 700"),
        (0o703, 0, "lets other users replace its files"),
        (0o755, 65534, "belongs to user 65534"),
        (0o1777, 0, ""),
        (0o755, 0, ""),
        (0o775, 0, ""),
    ],
)
def test_a_folder_whose_files_others_can_replace_is_refused(tmp_path, mode, owner, said):
    if owner and os.geteuid():
        pytest.skip("needs another user")
    folder = shutil.copytree(keys_of(0), tmp_path / "keys")
    os.chmod(folder, mode)
    if owner:
        os.chown(folder, owner, owner)
    if not said:
        Keys(folder).demand(None, "a host")
        return
    with pytest.raises(UcplError, match=said) as caught:
        Keys(folder).demand(None, "a host")
    assert caught.value.diagnostics[0].code == "E687"

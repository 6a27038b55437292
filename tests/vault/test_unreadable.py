"""Folders of other users, which may not be looked into."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ucpl
from tests.vault.small import job
from ucpl.cli import main
from ucpl.vault import Vault
from ucpl.vault.server import Server

NOBODY = 65534


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that all can read; pytest's belong to one user."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def shut(path: Path) -> Iterator[None]:
    """As for another user, whose own it is not."""
    mode = path.stat().st_mode
    os.chmod(path, 0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(NOBODY)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        os.chmod(path, mode)


@pytest.mark.parametrize("inner", ["", "d0", "d0/job.json"])
@pytest.mark.parametrize("line", ["status", "verify", "scrub", "serve --domain 0"])
def test_a_vault_of_another_user_is_not_called_none(root, capsys, line, inner):
    home = Vault.make(root / "job").home
    os.chmod(home, 0o755)
    os.chmod(home / "d0", 0o755)
    action, *more = line.split()
    assert main(["vault", action, str(root), *more]) == 3  # import all modules as the privileged user
    capsys.readouterr()
    with shut(home / inner):
        assert main(["vault", action, str(home), *more]) == 3
        with pytest.raises(ucpl.UcplError, match=r"E692: .*permission denied"), Server(home, 0):
            pass
    err = capsys.readouterr().err
    assert f"error[E692]: {home} is not a vault: permission denied: {home / inner}" in err
    assert "run the command as this user" in err


def test_a_domain_that_may_not_be_looked_into_is_as_one_that_is_not_there(root, capsys):
    with job(root / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
    for path in ((root / "job"), *(root / "job").rglob("*")):
        os.chmod(path, 0o755)
    for action in ("status", "verify", "scrub", "gc"):  # import all modules as the privileged user
        assert main(["vault", action, str(root / "job")]) == 0
    assert main(["vault", "status", str(root)]) == 3
    capsys.readouterr()
    with shut(root / "job/d1"):
        assert main(["vault", "status", str(root / "job")]) == 0
        assert main(["vault", "verify", str(root / "job")]) == 1
        assert main(["vault", "scrub", str(root / "job")]) == 4
        printed = capsys.readouterr()
        assert main(["vault", "gc", str(root)]) == 0
    assert "step 1: " in printed.out and "d1: shard of rank 1: 1 chunks of 1 MiB, can be rebuilt" in printed.out
    if os.geteuid() == 0:
        assert f"error[E686]: {root / 'job'} is not safe from other users: it belongs to user 0" in printed.err
    else:
        assert f"error[E695]: {root / 'job/d1'} cannot be written: Permission denied" in printed.err
    assert f"passed     {root / 'job'}: permission denied: {root / 'job/d1'}" in capsys.readouterr().out


@pytest.mark.fault(
    "Vaults", "a vault or folder of another user", '"permission denied" with the folder (E692); `gc` skips it'
)
def test_gc_passes_over_what_may_not_be_looked_into(root, capsys):
    """One folder of another user used to hide all neighboring vaults."""
    private = root / "private"
    for path in (private, Vault.make(root / "job").home, root / "zfolder"):
        path.mkdir(exist_ok=True)
    os.chmod(root, 0o777)
    if os.geteuid() == 0:
        for path in (root / "job", *(root / "job").rglob("*")):
            os.chown(path, NOBODY, -1)
    for name, status in (("zfolder", 0), ("none", 3)):  # import all modules as the privileged user
        assert main(["vault", "gc", str(root / name)]) == status
    capsys.readouterr()
    with shut(private):
        assert main(["vault", "gc", str(private)]) == 3
        assert f"error[E692]: {private} is not a vault: permission denied: {private}" in capsys.readouterr().err
        assert main(["vault", "gc", str(root)]) == 0
        out = capsys.readouterr().out
        assert f"passed     {private}: permission denied" in out and f"removed    {root / 'job'}: " in out
        assert not (root / "job").exists()
        assert main(["vault", "gc", str(root)]) == 0
        assert f"nothing    {root} has no other vaults" in capsys.readouterr().out


def test_a_vault_that_may_be_read_and_not_removed_is_kept(root, capsys):
    home = Vault.make(root / "job").home
    for path in (home, *home.rglob("*")):
        os.chmod(path, 0o555)
    assert main(["vault", "gc", str(home / "d0")]) == 0  # import all modules as the privileged user
    capsys.readouterr()
    with shut(home / "make.lock"):
        assert main(["vault", "gc", str(home)]) == 0
    assert (
        f"kept       {home}: it cannot be removed: {home / 'make.lock'}: permission denied" in capsys.readouterr().out
    )
    for path in (home, home / "d0"):
        os.chmod(path, 0o755)

"""Objects in the place of a vault's file.

`scrub` and a starting server name the object and a remedy.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ucpl
from tests.vault.small import job
from ucpl.cli import main
from ucpl.runtime.failpoints import set_failpoints
from ucpl.vault import Vault
from ucpl.vault.inspect import scrub
from ucpl.vault.server import Server


@pytest.fixture
def saved(tmp_path) -> Path:
    """The vault of a job that ended; its domains have one generation."""
    with job(tmp_path / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
    return tmp_path / "job"


def put(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("elsewhere")
    else:
        os.mkfifo(path)


def arenas(home: Path) -> list[str]:
    """The arenas of the generation's slots."""
    return sorted(path.stem for path in (home / "d1").glob("*.s?.json"))


def demand_told(home: Path, path: Path, said: str, capsys) -> None:
    """Check that the verb and the server name the object.

    Raises: AssertionError.
    """
    what = f"E695: {path} cannot be written: {said}"
    assert main(["vault", "scrub", str(home)]) == 4
    err = capsys.readouterr().err
    assert what.replace("E695", "error[E695]") in err and f"move {path} away" in err
    with pytest.raises(ucpl.UcplError) as raised, Server(home, 1):
        pass
    assert what in str(raised.value) and f"move {path} away" in str(raised.value.diagnostics[0].remedy)


@pytest.mark.fault(
    "Vaults",
    "an obstacle in the place of a file that `scrub` rewrites; ENOSPC",
    "named (E695); after its removal all files are repaired",
)
@pytest.mark.parametrize("name", ["job.json", "commit.1.json", "r1.s", "p.s", "commit.lock"])
def test_a_folder_where_a_file_is_written_again_is_named(saved, name, capsys):
    found = next(one for one in (*arenas(saved), name) if one.startswith(name))
    if name == "commit.lock":
        (saved / "d1/commit.1.json").write_bytes(b"")
    put(saved / "d1" / found, "folder")
    demand_told(saved, saved / "d1" / found, "a folder is in its place", capsys)
    (saved / "d1" / found).rmdir()
    assert main(["vault", "scrub", str(saved)]) == 0


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_where_an_arena_is_rebuilt_is_named(saved, kind, capsys):
    assert len(arenas(saved)) == 2
    for found in arenas(saved):
        put(saved / "d1" / found, kind)
        demand_told(saved, saved / "d1" / found, f"a {kind} is in its place", capsys)
        (saved / "d1" / found).unlink()
        assert scrub(saved)[1] == []


def test_a_file_where_a_domain_should_be_is_named(saved):
    os.rename(saved / "d1", saved / "away")
    (saved / "d1").touch()
    with (
        pytest.raises(ucpl.UcplError, match=r"E695: .*/d1 cannot be written: a file is in its place"),
        Server(saved, 1),
    ):
        pass


def test_full_memory_names_the_file_and_asks_for_room(saved, capsys):
    path = saved / "d1" / arenas(saved)[0]
    path.unlink()
    try:
        set_failpoints("vault-room:1:enospc")
        with pytest.raises(ucpl.UcplError, match=f"E695: {path} cannot be written: No space left"), Server(saved, 1):
            pass
        set_failpoints("vault-room:1:enospc")
        assert main(["vault", "scrub", str(saved)]) == 4
        err = capsys.readouterr().err
        assert f"error[E695]: {path} cannot be written: No space left on device" in err and "Make room: " in err
    finally:
        set_failpoints("")
    assert scrub(saved) == (1, []) and Vault.at(saved).committed()

"""Ranks that write one target in a store together.

The objects are those of one process, each is sent once, and the manifest completes the target.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

import ucpl
import ucpl.api
from tests.ranks.test_apply import together
from tests.storage.conftest import EXAMPLE
from tests.storage.test_sources import refused
from tests.storage.test_targets import MANIFEST, TO, UNFINISHED, held
from ucpl.errors import UcplError
from ucpl.formats.opening import framework
from ucpl.planning.plan import Plan
from ucpl.runtime.counters import Report
from ucpl.runtime.execute import execute
from ucpl.runtime.options import RunOptions
from ucpl.runtime.process_group import ProcessGroup
from ucpl.storage.objects import OfFsspec
from ucpl.storage.resolve_url import resolve_target

URL = "memory://bucket/out"
Sent = list[str]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return ucpl.plan(str(EXAMPLE), TO)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Objects of all files that went up."""
    found: Sent = []
    before = OfFsspec.put_file

    def put_file(objects: OfFsspec, key: str, path: Path) -> None:
        found.append(key)
        before(objects, key, path)

    monkeypatch.setattr(OfFsspec, "put_file", put_file)
    return found


def run(size: int, plan: Plan, *, url: str = URL, bad: dict[int, Exception] | None = None, **how: bool) -> list[object]:
    """The result or error of each rank."""

    def act(rank: int, team: ProcessGroup) -> object:
        opened = ucpl.api.open_checkpoint(EXAMPLE)

        def progress(done: int, total: int) -> None:
            if bad and rank in bad:
                raise bad[rank]

        options = RunOptions(workers=1, progress=progress, **how)  # type: ignore[arg-type]
        return execute(plan, opened, framework("deepspeed"), resolve_target(url), options, team)

    return together(size, act)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_ranks_send_what_one_process_sends(store: fsspec.AbstractFileSystem, plan: Plan, sent: Sent, size: int) -> None:
    """The manifest is equal byte for byte.

    There may be more ranks than files.
    """
    whole = ucpl.apply(plan, EXAMPLE, "memory://bucket/one")
    alone = len(sent)
    ends = run(size, plan)
    assert [end for end in ends if not isinstance(end, Report)] == []
    one, many = held(store, "/bucket/one"), held(store)
    assert many == one and MANIFEST in many and UNFINISHED not in many
    names = [key.partition("/")[2] for key in sent[alone:]]
    assert sorted(names) == sorted(key.partition("/")[2] for key in sent[:alone]), "each file once"
    first = ends[0]
    assert isinstance(first, Report) and first.bytes_read_verify == whole.bytes_read_verify, "what others read counts"
    assert first.source_bytes_checked == whole.source_bytes_checked and first.bytes_written >= first.bytes_target > 0
    assert first.bytes_read_back >= sum(len(data) for name, data in one.items() if name.endswith(".pt"))
    assert all(isinstance(end, Report) and end.bytes_read < first.bytes_read for end in ends[1:] if size > 1)
    assert ucpl.verify(URL)
    again = run(size, plan, resume=True)
    assert all(isinstance(end, Report) and end.done_before for end in again)


def test_a_single_file_is_sent_by_one_of_them(store: fsspec.AbstractFileSystem, sent: Sent) -> None:
    plan = ucpl.plan(str(EXAMPLE), "plain()")
    url = "memory://bucket/one.pt"

    def act(rank: int, team: ProcessGroup) -> object:
        opened = ucpl.api.open_checkpoint(EXAMPLE)
        return execute(plan, opened, framework("plain"), resolve_target(url), RunOptions(workers=1), team)

    ends = together(3, act)
    assert all(isinstance(end, Report) for end in ends), ends
    assert len(sent) == 1
    ucpl.apply(plan, EXAMPLE, "memory://bucket/other.pt")
    assert store.cat_file("/bucket/one.pt") == store.cat_file("/bucket/other.pt")


@pytest.mark.fault(
    "Object stores",
    "ranks write a target in a store, and one fails",
    "all end; nothing counts; `--resume` with any number of ranks writes the same bytes",
)
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_fails_ends_all_and_what_is_left_does_not_count(
    store: fsspec.AbstractFileSystem, plan: Plan, who: int
) -> None:
    ends = run(3, plan, bad={who: OSError(5, "Input/output error")})
    errors = [end for end in ends if isinstance(end, UcplError)]
    assert len(errors) == 3, ends
    # E505: its objects were removed before it checked them, and before it heard of the other run.
    assert {error.diagnostics[0].code for error in errors} <= {"E503", "E505", "E621"}
    left = held(store)
    assert MANIFEST not in left and UNFINISHED in left, "what another was sending may come later: the mark stays"
    text = "\n".join(str(note) for note in errors[0].diagnostics[0].notes)
    assert "--resume clears it" in text, text
    assert refused(lambda: ucpl.api.open_checkpoint(URL)).diagnostics[0].code == "E681"
    ends = run(2, plan, resume=True)
    assert all(isinstance(end, Report) for end in ends), ends
    ucpl.apply(plan, EXAMPLE, "memory://bucket/one")
    assert held(store) == held(store, "/bucket/one")


def test_a_damaged_source_is_found_whichever_rank_read_it(
    store: fsspec.AbstractFileSystem, plan: Plan, tmp_path: Path
) -> None:
    """CRCs of members are combined from all readers' ranges.

    The hosts share no disk.
    """
    source = Path(shutil.copytree(EXAMPLE, tmp_path / "source"))
    for file in sorted(source.rglob("*optim_states.pt")):
        data = bytearray(file.read_bytes())
        where = len(data) // 2
        data[where] ^= 1
        file.write_bytes(data)

        def act(rank: int, team: ProcessGroup) -> object:
            opened = ucpl.api.open_checkpoint(source)
            return execute(plan, opened, framework("deepspeed"), resolve_target(URL), RunOptions(workers=1), team)

        ends = together(3, act)
        codes = {end.diagnostics[0].code for end in ends if isinstance(end, UcplError)}
        assert "E612" in codes and len(codes) <= 2, ends
        assert MANIFEST not in held(store)
        data[where] ^= 1
        file.write_bytes(data)
        store.store.clear()

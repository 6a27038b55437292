"""Checkpoints in a store are read like local ones.

The bytes and the rejections are the same, and only the required bytes are read.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

import ucpl
import ucpl.api
from tests.storage.conftest import EXAMPLE, counted
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.storage import cache_dirs, objects, sparse_files
from ucpl.storage.objects import OfFsspec
from ucpl.storage.resolve_url import resolve_source

Upload = Callable[..., str]
OF_THE_RUN = "ucpl/manifest.json"  # it knows the source's files by their times
SIZE = sum(file.stat().st_size for file in EXAMPLE.rglob("*") if file.is_file())


def files(top: Path) -> dict[str, bytes]:
    return {f.relative_to(top).as_posix(): f.read_bytes() for f in sorted(top.rglob("*")) if f.is_file()}


def bytes_of(top: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(top).items() if name != OF_THE_RUN}


def refused(call: Callable[[], object]) -> UcplError:
    with pytest.raises(UcplError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("to", ["zero3(dp=3)", "zero1(dp=2)"])
def test_a_remote_source_gives_the_bytes_of_a_local_one(upload: Upload, tmp_path: Path, to: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ucpl.convert(EXAMPLE, here, to=to)
    ucpl.convert(upload(), there, to=to)
    assert bytes_of(here) == bytes_of(there)


def test_a_plan_is_applied_to_a_remote_source(upload: Upload, tmp_path: Path) -> None:
    plan = ucpl.plan(upload(), "zero3(dp=3)")
    ucpl.apply(plan, EXAMPLE, tmp_path / "here")
    ucpl.apply(plan, upload(), tmp_path / "there")
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")


def test_verbs_take_urls_and_say_them(upload: Upload, capsys: pytest.CaptureFixture[str]) -> None:
    url = upload()
    for argv in (["inspect", url], ["verify", url], ["compare", str(EXAMPLE), url], ["infer", url]):
        assert main(argv) == 0, capsys.readouterr()
        printed = capsys.readouterr().out
        assert "ucpl-remote-" not in printed
    assert main(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == url
    assert main(["plan", "--from", url, "--to", "zero1(dp=2)"]) == 0
    assert main(["inspect", "memory://bucket/none"]) == 3
    assert "memory://bucket/none does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "plan --from {0} --to {0}",
        "plan --from {0} --to zero1(dp=2) -o memory://bucket/a.plan",
        "convert {0} out --to zero1(dp=2) --config memory://bucket/config.json",
        "convert {0} out --to memory://bucket/a.ucpl:job()",
        "apply memory://bucket/a.plan {0} out",
        "check memory://bucket/a.ucpl",
        "diff a.plan memory://bucket/a.plan",
    ],
)
def test_only_checkpoints_have_urls(upload: Upload, capsys: pytest.CaptureFixture[str], command: str) -> None:
    url = upload()
    assert main(command.format(url).split()) == 2
    assert "E680" in (printed := capsys.readouterr().err) and "memory://bucket/" in printed and "local" in printed


def test_a_spec_is_written_of_a_folder_in_a_store(
    upload: Upload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    save({"embed.weight": make(64, 0)}, tmp_path / "hf" / "model.safetensors")
    assert main(["import", "hf", str(tmp_path / "hf")]) == 0
    here = capsys.readouterr().out
    assert main(["import", "hf", upload(tmp_path / "hf", "bucket/hf")]) == 0
    assert capsys.readouterr().out == here


def test_what_is_needed_is_read_once(upload: Upload, tmp_path: Path) -> None:
    """No byte is read twice, and headers need no payload.

    A partial conversion reads only its part.
    """
    big = tmp_path / "big"
    state = {f"layer.{i}.weight": make(700_000, i) for i in range(4)}
    big.mkdir()
    save(state, big / "model.safetensors")
    url, size = upload(big, "bucket/big"), (big / "model.safetensors").stat().st_size
    shadow = resolve_source(url)
    ucpl.infer(shadow)
    looked = counted(shadow).read
    assert looked < 2000
    ucpl.convert(shadow, tmp_path / "all", to="dcp(fsdp=3)")
    assert counted(shadow).read <= size * 1.02
    part = resolve_source(url)
    ucpl.convert(part, tmp_path / "one", to="dcp(fsdp=2)", drop=["layer.0.weight", "layer.2.weight"])
    assert size / 2 < counted(part).read <= (size / 2) * 1.02


def test_the_requests_of_a_conversion_are_few(upload: Upload, tmp_path: Path) -> None:
    """Adjacent ranges are fetched together.

    27 stored tensors and four zip directories need fewer requests than there are members.
    """
    shadow = resolve_source(upload())
    ucpl.convert(shadow, tmp_path / "target", to="zero1(dp=2)")
    assert counted(shadow).requests < 30 and counted(shadow).read < SIZE


FIXTURES = EXAMPLE.parents[1] / "tests" / "fixtures"


def test_archives_of_a_file_come_together(upload: Upload) -> None:
    """148 chunks, each an archive in one of four files.

    They need no request each.
    """
    folder = FIXTURES / "dcp" / "fsdp2_tp_2x2"
    shadow = resolve_source(upload(folder))
    opened = ucpl.api.open_checkpoint(shadow)
    assert opened.extents == ucpl.api.open_checkpoint(folder).extents
    assert len(opened.extents) == 148 and counted(shadow).requests < 12


@pytest.mark.parametrize(
    "folder", ["universal/z3_dp4/global_step3_universal", "deepspeed/z1_dp4", "megatron/legacy_buckets", "dcp/uneven9"]
)
def test_headers_are_read_several_at_a_time(upload: Upload, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    under_way, most = [0], [0]
    read = OfFsspec.read

    def slow(self: OfFsspec, key: str, low: int, high: int, tag: str) -> memoryview:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.02)
        under_way[0] -= 1
        return read(self, key, low, high, tag)

    monkeypatch.setattr(OfFsspec, "read", slow)
    opened = ucpl.api.open_checkpoint(upload(FIXTURES / folder))
    assert most[0] >= 3
    assert opened.extents == ucpl.api.open_checkpoint(FIXTURES / folder).extents
    assert len(opened.opened) >= 4  # who looks for changes knows of all files


def test_a_store_that_fails_under_many_headers_is_reported_once(
    upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [0]

    def gone(self: object, path: str, **how: int) -> bytes:
        if not path.endswith(("/fp32.pt", "/exp_avg.pt", "/exp_avg_sq.pt")):
            return bytes(there(self, path, **how))
        asked[0] += 1
        raise TimeoutError("nobody there")

    there = fsspec.get_filesystem_class("memory").cat_file
    monkeypatch.setattr(objects, "attempts", lambda: 1)
    url = upload(FIXTURES / "universal" / "z3_dp4" / "global_step3_universal")
    shadow = resolve_source(url)
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", gone)
    error = refused(lambda: ucpl.api.open_checkpoint(shadow))
    assert error.diagnostics[0].code == "E685" and url in str(error) and 1 <= asked[0] <= 2 * 16


def test_without_room_for_what_was_read_it_is_read_again(
    upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_dirs, "room", lambda: 0)
    ucpl.convert(EXAMPLE, tmp_path / "here", to="zero3(dp=3)")
    ucpl.convert(upload(), tmp_path / "there", to="zero3(dp=3)")
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")


@pytest.mark.fault(
    "Object stores",
    "ENOSPC for the cache of fetched bytes",
    "fetched again, the same bytes; headers without room are an error",
)
def test_a_full_disk_keeps_nothing_more(upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payload is fetched again as needed.

    Headers must be stored, and report missing space.
    """
    ucpl.convert(EXAMPLE, tmp_path / "here", to="zero3(dp=3)")
    url = upload()
    plan = ucpl.plan(url, "zero3(dp=3)")
    opened = ucpl.api.open_checkpoint(url)
    tries = [0]

    def full(*_: object) -> None:
        tries[0] += 1
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(sparse_files, "_KEPT", [0])
    monkeypatch.setattr(sparse_files, "write_at", full)
    ucpl.apply(plan, opened, tmp_path / "there")
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")
    assert 1 <= tries[0] <= 4  # by threads that were at it, and then no more
    error = refused(lambda: ucpl.infer(url))
    first = error.diagnostics[0]
    assert first.code == "E501" and "ucpl-remote-" in first.message and url in first.message
    assert "UCPL_REMOTE_DIR" in first.remedy


@pytest.mark.fault("Object stores", "the source is written again or removed during the run", "refused, no target")
def test_a_source_that_changes_is_refused(
    upload: Upload, store: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change after the headers, or before publishing.

    No target exists then.
    """
    url = upload()
    name = next(key for key in store.store if key.endswith("_states.pt"))
    opened = ucpl.api.open_checkpoint(url)
    plan = ucpl.plan(url, "zero1(dp=2)")
    store.pipe_file(name, store.cat_file(name))  # the same bytes, another object
    error = refused(lambda: ucpl.apply(plan, opened, tmp_path / "target"))
    assert error.diagnostics[0].code == "E611" and url in str(error.diagnostics[0])
    again = ucpl.api.open_checkpoint(url)
    store.rm_file(name)
    error = refused(lambda: ucpl.apply(plan, again, tmp_path / "target"))
    assert error.diagnostics[0].code == "E610"
    assert os.listdir(tmp_path) == []


def test_damage_is_found(upload: Upload, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    url = upload()
    name = next(key for key in store.store if key.endswith("optim_states.pt"))
    data = bytearray(store.cat_file(name))
    data[len(data) // 2] ^= 1
    store.pipe_file(name, bytes(data))
    assert refused(lambda: ucpl.convert(url, tmp_path / "target", to="zero1(dp=2)")).exit_status == 3
    assert not ucpl.verify(url)


def test_names_that_no_folder_can_hold_are_refused(upload: Upload, store: fsspec.AbstractFileSystem) -> None:
    url = upload()
    store.store["/bucket/run/../up"] = store.store[next(iter(store.store))]
    assert refused(lambda: ucpl.infer(url)).diagnostics[0].code == "E683"


@pytest.mark.parametrize("url", ["nowhere://bucket/run", "s3://bucket/../up"])
def test_a_store_that_nobody_speaks_to_is_refused(url: str) -> None:
    assert refused(lambda: ucpl.infer(url)).diagnostics[0].code == "E680"


def test_an_incomplete_target_is_rejected(upload: Upload, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    ucpl.convert(EXAMPLE, tmp_path / "made", to="zero1(dp=2)")
    url = upload(tmp_path / "made", "bucket/made")
    assert ucpl.verify(url)
    name = next(key for key in store.store if key.endswith("_states.pt"))
    store.pipe_file(name, store.cat_file(name)[:-1])
    assert refused(lambda: ucpl.infer(url)).diagnostics[0].code == "E682"
    store.rm_file("/bucket/made/ucpl/manifest.json")
    store.pipe_file("/bucket/made/ucpl/unfinished.json", b"{}")
    assert refused(lambda: ucpl.infer(url)).diagnostics[0].code == "E681"
    step = next(p.name for p in (tmp_path / "made").iterdir() if p.name.startswith("global_step"))
    assert refused(lambda: ucpl.infer(f"{url}/{step}")).diagnostics[0].code == "E681"


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    assert resolve_source(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


def test_the_folder_of_a_process_goes_with_it_and_a_killed_ones_with_the_next(tmp_path: Path) -> None:
    code = "import os, signal; from ucpl.storage import cache_dirs; cache_dirs.fresh(); {}"
    here = {**os.environ, "UCPL_REMOTE_DIR": str(tmp_path)}

    def run(end: str) -> int:
        return subprocess.run([sys.executable, "-c", code.format(end)], env=here, check=False).returncode

    assert run("os.kill(os.getpid(), signal.SIGKILL)") < 0 and len(os.listdir(tmp_path)) == 1
    assert run("print()") == 0 and os.listdir(tmp_path) == []


def test_ranges_are_joined_as_far_as_it_costs_little() -> None:
    assert sparse_files._generously([(0, 100), (100, 200)]) == [(0, 200)]
    assert sparse_files._generously([(0, 1000), (1005, 2000), (2100, 3000)]) == [(0, 2000), (2100, 3000)]
    assert sparse_files._generously([]) == []


def make(count: int, seed: int) -> object:
    import torch

    return torch.arange(count, dtype=torch.float32) + seed * count


def save(state: dict[str, object], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, path)  # type: ignore[arg-type]

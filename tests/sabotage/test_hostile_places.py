"""Deceptive places.

Links, hard links and folders of others where a run writes, names that lead out, JSON of
no use. Nothing outside the source is read, and nothing outside the target is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from tests.cli.command import FIXTURES, digest, ucpl
from tests.runtime.test_execute import code_of
from tests.runtime.world import Stored, Torch, bits_of, copies, remade, write_source
from ucpl.cli.options import write_text
from ucpl.errors import UcplError
from ucpl.owned import followed
from ucpl.runtime import execute
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.options import RunOptions


@pytest.fixture(autouse=True)
def no_failpoints():
    yield
    set_failpoints("")


@pytest.fixture
def stopped(tmp_path: Path):
    """An interrupted run, with somebody's file and folder next to it."""
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (4000,), i)) for i, f in enumerate("ab")]
    source = write_source(tmp_path / "src", tensors)
    plan = copies(source, lambda tensor: f"below/{tensor.file}.pt")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").write_text("precious")

    def run(**more):
        how = RunOptions(memory=MEMORY_MIN, workers=1, **more)
        return execute(plan, source, Torch(), tmp_path / "out", how)

    set_failpoints("synced:1:interrupt")
    with pytest.raises(UcplError):
        run()
    set_failpoints("")
    return run, tmp_path / ".out.ucpl-work", tmp_path / "theirs"


def linked_folder(work: Path, theirs: Path) -> None:
    shutil.rmtree(work / "tree" / "below")
    (work / "tree" / "below").symlink_to(theirs)


def linked_work(work: Path, theirs: Path) -> None:
    shutil.copytree(work, theirs / "work")
    shutil.rmtree(work)
    work.symlink_to(theirs / "work")


def linked_tree(work: Path, theirs: Path) -> None:
    os.rename(work / "tree", theirs / "tree")
    (work / "tree").symlink_to(theirs / "tree")


def linked_file(work: Path, theirs: Path) -> None:
    path = sorted((work / "tree" / "below").iterdir())[0]
    path.unlink()
    path.symlink_to(theirs / "precious")


def second_name(work: Path, theirs: Path) -> None:
    path = sorted((work / "tree" / "below").iterdir())[0]
    path.unlink()
    os.link(theirs / "precious", path)


def pipe(work: Path, theirs: Path) -> None:
    path = sorted((work / "tree" / "below").iterdir())[0]
    path.unlink()
    os.mkfifo(path)


def of_another(work: Path, theirs: Path) -> None:
    os.chown(work, 65534, 65534)


@pytest.mark.fault(
    "Hostile input",
    "links, FIFOs or another user's folder in the place of an interrupted run",
    "not followed, status 4",
)
@pytest.mark.parametrize("trap", [linked_folder, linked_work, linked_tree, linked_file, second_name, pipe, of_another])
def test_what_was_put_where_a_run_continues_is_not_followed(stopped, trap: Callable[[Path, Path], None]) -> None:
    run, work, theirs = stopped
    if trap is of_another and os.geteuid() != 0:
        pytest.skip("needs another user")
    trap(work, theirs)
    before = digest(theirs)
    with pytest.raises(UcplError) as caught:
        run(resume=True)
    assert caught.value.diagnostics[0].code == "E503" and str(work) in str(caught.value.diagnostics[0])
    assert digest(theirs) == before and not work.with_name("out").exists()
    run()  # afresh: leftovers are cleared, and not their targets
    assert digest(theirs) == before and (work.with_name("out") / "below").is_dir() and not work.exists()


STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")


def of_a_stranger(path: Path) -> Path:
    for one in (path, *path.rglob("*")):
        os.chown(one, STRANGER, STRANGER, follow_symlinks=False)
        if not one.is_symlink():
            os.chmod(one, 0o777)
    return path


@as_root
@pytest.mark.parametrize("old", ["old", "old-part"])
def test_a_stranger_does_not_say_what_was_the_target_before(stopped, old: str) -> None:
    run, work, _ = stopped
    shutil.rmtree(work)
    (work / old).mkdir(parents=True)
    (work / old / "evil").write_text("evil")
    of_a_stranger(work)
    run()
    assert [path.name for path in work.with_name("out").iterdir()] != ["evil"] and not work.exists()
    assert os.stat(work.with_name("out")).st_uid == os.geteuid()


@pytest.mark.parametrize("kind", ["pipe", "file", "dangling link"])
def test_what_is_no_folder_in_the_place_of_the_work_is_removed(stopped, kind: str) -> None:
    run, work, theirs = stopped
    shutil.rmtree(work)
    if kind == "pipe":
        os.mkfifo(work)
    elif kind == "file":
        work.touch()
    else:
        work.symlink_to(theirs / "nothing")
    run()
    assert work.with_name("out").is_dir() and not os.path.lexists(work)
    assert [path.name for path in theirs.iterdir()] == ["precious"]


@as_root
def test_a_target_is_not_given_to_the_stranger_who_made_a_folder_of_its_name(stopped) -> None:
    """In a place for everybody.

    Elsewhere it keeps the owner and the mode of the replaced file.
    """
    run, work, _ = stopped
    target = work.with_name("out")
    for mode, owner in ((0o1777, os.geteuid()), (0o755, STRANGER)):
        os.chmod(target.parent, mode)
        target.mkdir()
        of_a_stranger(target)
        run(force=True)
        state = os.stat(target)
        assert (state.st_uid, bool(state.st_mode & 0o002)) == (owner, owner == STRANGER)
        shutil.rmtree(target)


@as_root
def test_a_text_is_not_written_through_the_link_of_a_stranger(tmp_path: Path) -> None:
    precious, place = tmp_path / "precious", tmp_path / "shared"
    place.mkdir()
    os.chmod(place, 0o1777)
    precious.write_text("precious")
    (tmp_path / "folder").mkdir()
    (place / "link").symlink_to(precious)
    (place / "dangling").symlink_to(tmp_path / "new")
    (place / "folder").symlink_to(tmp_path / "folder")
    of_a_stranger(place)
    os.chmod(place, 0o1777)
    os.chown(place, 0, 0)
    for name in ("link", "dangling", "folder/new", "../shared/link"):
        with pytest.raises(UcplError, match="user 65534 put a link there") as caught:
            write_text(place / name, "other")
        assert caught.value.diagnostics[0].code == "E179"
    assert precious.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "precious", "shared"] and not [
        *(tmp_path / "folder").iterdir()
    ]
    (place / "theirs").write_text("theirs")
    os.chown(place / "theirs", STRANGER, STRANGER)
    write_text(place / "theirs", "mine")
    assert os.stat(place / "theirs").st_uid == os.geteuid()


def test_a_text_is_written_through_links_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a/one").symlink_to("../c")
    (tmp_path / "round").symlink_to("round")
    write_text(tmp_path / "b/one", "text")
    assert (tmp_path / "c").read_text() == "text" and (tmp_path / "a/one").is_symlink()
    assert followed(tmp_path / "b/one") == Path(os.path.realpath(tmp_path / "c"))
    with pytest.raises(UcplError, match="links go round"):
        write_text(tmp_path / "round", "text")


@pytest.mark.fault("Hostile input", "the same while a run begins", "not followed, status 4")
@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_folder_put_there_while_a_run_begins_is_not_written_into(
    stopped, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the removal of the old one and the new one."""
    from ucpl.runtime.publish import Workplace

    run, work, theirs = stopped
    clear, before = Workplace.clear, digest(theirs)

    def and_link(self):
        clear(self)
        if not os.path.lexists(work):
            work.symlink_to(theirs) if kind == "link" else work.mkdir()

    monkeypatch.setattr(Workplace, "clear", and_link)
    with pytest.raises(UcplError) as caught:
        run()
    assert caught.value.diagnostics[0].code == "E503" and digest(theirs) == before


@pytest.mark.fault("Hostile input", "target files with `..`, absolute paths or names of ucpl's own folder", "refused")
@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/x", "ucpl/manifest.json", "UCPL/manifest.json", "./ucpl/x", "a\0b", ""]
)
def test_no_file_of_a_target_is_outside_of_it(tmp_path: Path, name: str) -> None:
    source = write_source(tmp_path / "src", [Stored("a", ("a",), "f32", bits_of("f32", (9,), 1))])
    plan = copies(source)
    plan = remade(plan, targets=tuple(evolve(t, file=name) for t in plan.targets))
    assert (
        code_of(lambda: execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=MEMORY_MIN, workers=1)))
        == "E507"
    )
    assert sorted(os.listdir(tmp_path)) == ["src"]


@pytest.mark.fault("Hostile input", "names that are one on the file system (case, Unicode forms)", "refused")
def test_names_that_a_file_system_takes_for_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if A and a, or two forms of é, are equal."""
    from ucpl.runtime.disk import Disk, use_disk

    class Folding(Disk):
        def open(self, path, flags, mode=0o666):
            if path.suffix == ".pt" and "tree" in path.parts:
                path = path.with_name(path.name.casefold())
            return super().open(path, flags, mode)

    tensors = [Stored(f, (f,), "f32", bits_of("f32", (9,), 1)) for f in ("A", "a")]
    source = write_source(tmp_path / "src", tensors)
    plan = copies(source, lambda tensor: f"{tensor.file}.pt")
    before = use_disk(Folding())
    try:
        assert (
            code_of(lambda: execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=MEMORY_MIN, workers=1)))
            == "E507"
        )
    finally:
        use_disk(before)
    assert sorted(os.listdir(tmp_path)) == ["src"]
    execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=MEMORY_MIN, workers=1))


# ---- texts of another user --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors", "x\0.safetensors"]
)
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"v": torch.ones(2)}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": name, "v": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = ucpl("convert", folder, tmp_path / "out.pt", "--to", "plain()")
    assert done.status == 3 and ("E385" in done.err or "\0" in name) and not (tmp_path / "out.pt").exists()


@pytest.mark.fault(
    "Hostile input",
    "an index or a layout with file names outside the folder",
    "refused; nothing outside is read or written",
)
@pytest.mark.parametrize("name", ["../secret.pt", "/secret.pt", "a/../../secret.pt", '{\\"..\\"}/secret.pt'])
@pytest.mark.parametrize("side", ["--from", "--to"])
def test_a_layout_does_not_lead_out(tmp_path: Path, name: str, side: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "secret.pt")
    inner = tmp_path / "inner"
    inner.mkdir()
    torch.save({"w": torch.zeros(2)}, inner / "w.pt")
    text = 'model m {{\n  w : 2\n}}\nlayout l(self) of m {{\n  framework torch()\n  files weights = "{0}"\n  w\n}}\n'
    (tmp_path / "in.ucpl").write_text(text.format("w.pt"))
    (tmp_path / "evil.ucpl").write_text(text.format(name))
    specs = {"--from": "in.ucpl:l()", "--to": "in.ucpl:l()"} | {side: "evil.ucpl:l()"}
    specs = {key: f"{tmp_path}/{value}" for key, value in specs.items()}
    before = digest(tmp_path / "secret.pt")
    done = ucpl("convert", inner, tmp_path / "out" / "deep", *(part for pair in specs.items() for part in pair))
    assert done.status != 0 and "internal error" not in done.err, done
    assert digest(tmp_path / "secret.pt") == before
    assert sorted(os.listdir(tmp_path)) == ["evil.ucpl", "in.ucpl", "inner", "secret.pt"]


JSONS = {
    "no numbers": '{"hidden_size": NaN, "n": Infinity, "m": -Infinity}',
    "huge whole numbers": '{"hidden_size": ' + "9" * 4000 + "}",
    "2^63": '{"hidden_size": 9223372036854775808, "num_hidden_layers": 9223372036854775807}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "keys twice": '{"hidden_size": 4, "hidden_size": 8}',
    "half a character": '{"model_type": "\\ud800"}',
    "nothing": "",
    "a byte order mark": "\ufeff{}",
}


@pytest.mark.fault(
    "Hostile input", "JSON with NaN, huge numbers, 100,000 brackets, half characters", "an error with a code"
)
@pytest.mark.parametrize("name", JSONS)
@pytest.mark.parametrize("where", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_json_of_no_use_next_to_weights_ends_in_our_own_words(tmp_path: Path, name: str, where: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / where).write_text(JSONS[name])
    for argv in (
        ("inspect", folder),
        ("import", "hf", folder),
        ("convert", folder, tmp_path / "out.pt", "--to", "plain()"),
    ):
        done = ucpl(*argv)
        assert done.status in (0, 1, 2, 3) and "internal error" not in done.err, done
        assert done.status == 0 or "error[" in done.err


@pytest.mark.parametrize("name", ["no numbers", "huge whole numbers", "2^63", "deep", "half a character", "nothing"])
def test_json_of_no_use_in_a_manifest_or_a_plan_ends_in_our_own_words(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "made"
    assert ucpl("convert", FIXTURES / "z1_dp2_sgdm", folder, "--to", "zero1(dp=3)").status == 0
    (folder / "ucpl" / "manifest.json").write_text(JSONS[name])
    (tmp_path / "x.plan").write_text(JSONS[name])
    for argv in (
        ("verify", folder),
        ("inspect", folder),
        ("apply", tmp_path / "x.plan", folder, tmp_path / "out"),
        ("show", tmp_path / "x.plan"),
    ):
        done = ucpl(*argv)
        assert done.status in (0, 1, 2, 3, 5) and "internal error" not in done.err, done

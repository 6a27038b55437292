"""Ranks that read a source in a store, each on its own.

Each reads its part, and all read the same checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
import ucpl.api
from tests.ranks.test_apply import together
from tests.storage.conftest import counted
from tests.storage.test_sources import bytes_of, make, save
from ucpl.errors import UcplError
from ucpl.formats.opening import framework
from ucpl.ranks.scattered_files import LocalFiles as Spread
from ucpl.ranks.scattered_files import one_folder
from ucpl.runtime.execute import execute
from ucpl.runtime.process_group import ProcessGroup
from ucpl.storage.resolve_url import resolve_source

Upload = Callable[..., str]


def test_ranks_read_their_own_parts_of_a_store(upload: Upload, tmp_path: Path) -> None:
    """Each byte once in the complete job, in even shares."""
    (tmp_path / "src").mkdir()
    save({f"layer.{i}.weight": make(40_000, i) for i in range(12)}, tmp_path / "src" / "model.safetensors")
    url, size = upload(tmp_path / "src"), 12 * 40_000 * 4
    plan = ucpl.plan(url, "dcp(fsdp=3)")
    ucpl.apply(plan, url, tmp_path / "one")
    shadows = [resolve_source(url) for _ in range(3)]

    def act(rank: int, team: ProcessGroup) -> object:
        with one_folder(team, cast(Spread, team), shadows[rank]) as folder:
            assert folder == shadows[rank]
            opened = ucpl.api.open_checkpoint(folder)
            return execute(plan, opened, framework("dcp"), tmp_path / "all", team=team)

    ends = together(3, act)
    assert [end for end in ends if isinstance(end, UcplError)] == []
    assert bytes_of(tmp_path / "all") == bytes_of(tmp_path / "one")
    read = [counted(shadow).read for shadow in shadows]
    assert size <= sum(read) <= 1.02 * size and min(read) > 0.25 * size, read


@pytest.mark.fault("Object stores", "ranks see two checkpoints at one URL", "refused before any byte moves")
def test_a_source_that_ranks_see_differently_is_refused(
    upload: Upload, store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    url = upload()
    first = resolve_source(url)
    store.pipe_file("/bucket/run/latest", store.cat_file("/bucket/run/latest"))  # the same bytes, another object
    shadows = [first, resolve_source(url)]

    def act(rank: int, team: ProcessGroup) -> object:
        with one_folder(team, cast(Spread, team), shadows[rank]) as folder:
            return folder

    for end in together(2, act):
        assert isinstance(end, UcplError) and end.diagnostics[0].code == "E625"
        assert url in str(end.diagnostics[0])


def test_a_model_is_filled_from_a_store(upload: Upload, tmp_path: Path) -> None:
    """Only the requested bytes, several tensors per request."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    (tmp_path / "folder").mkdir()
    save(dict(state), tmp_path / "folder" / "model.safetensors")
    url, size = upload(tmp_path / "folder"), os.stat(tmp_path / "folder" / "model.safetensors").st_size
    for value in model.parameters():
        torch.nn.init.zeros_(value)
    reader = ucpl.load_into(model, None, url)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    asked = counted(reader._checkpoint.root)
    assert asked.read <= 1.02 * size and asked.requests < 10
    some = {"model": {"3.weight": torch.zeros(64, 64), "9.weight": torch.zeros(64, 64)}}
    part = ucpl.StorageReader(url)
    load(some, storage_reader=part, no_dist=True)
    assert torch.equal(some["model"]["9.weight"], state["9.weight"])
    assert counted(part._checkpoint.root).read < 0.2 * size


def test_a_box_of_a_tensor_is_read_by_its_rows(upload: Upload, tmp_path: Path) -> None:
    """A row range reads only its rows.

    A column range is not contiguous; it is read once, with the bytes in between.
    """
    weight = torch.arange(256 * 1024, dtype=torch.float32).view(256, 1024)
    (tmp_path / "folder").mkdir()
    save({"weight": weight}, tmp_path / "folder" / "model.safetensors")
    url = upload(tmp_path / "folder")

    for offsets, lengths in (((64, 0), (32, 1024)), ((0, 512), (256, 64))):
        reader = ucpl.StorageReader(url)
        goal = torch.zeros(256, 1024)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"model.weight": goal}, reader.read_metadata())
        index = MetadataIndex("model.weight", torch.Size((0, 0)))
        item = ReadItem(
            LoadItemType.TENSOR, index, torch.Size(offsets), index, torch.Size(offsets), torch.Size(lengths)
        )
        before = counted(reader._checkpoint.root).read
        reader.read_data(LoadPlan([item]), planner).wait()
        rows, columns = (slice(low, low + n) for low, n in zip(offsets, lengths, strict=True))
        assert (
            torch.equal(goal[rows, columns], weight[rows, columns])
            and int((goal != 0).sum()) <= lengths[0] * lengths[1]
        )
        asked = lengths[0] * 1024 * 4
        assert counted(reader._checkpoint.root).read - before <= 1.02 * asked

"""`dp_zero_gather_scatter`: the optimizer of a rank as one object, with complete buffers.

The sources are folders that Megatron-Core wrote in buckets. Each is saved a second time with the buckets of a rank
joined as `DistributedOptimizer.get_parameter_state_dp_zero` joins them: end to end, without the padding behind a bucket.
Both must give one checkpoint. A real folder of Megatron-Core 0.11 is read in the same way.
"""

from __future__ import annotations

import io
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
BUCKET = re.compile(
    r"(?P<lead>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<gbuf>\d+)"
    r"\.dtype_\((?P<dtypes>.*)\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)


def step_of(name: str) -> Path:
    """The folder with `.metadata`: a run has it below its tracker."""
    return next((FIXTURES / name).rglob(".metadata")).parent


def objects_in(folder: Path, said: Metadata, key: str) -> object:
    place = said.storage_data[MetadataIndex(key)]
    raw = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    (value,) = torch.load(io.BytesIO(raw), weights_only=False)
    return value


def joined(source: Path, folder: Path, *, turned: bool = False) -> Path:
    """Write the folder with each rank's buckets in one object.

    turned: the first two parameters of a buffer change places.
    """
    shutil.copytree(source, folder)
    said = FileSystemReader(folder).read_metadata()
    found = {key: match for key in said.state_dict_metadata if (match := BUCKET.fullmatch(key)) is not None}
    tensors = {key: torch.zeros(said.state_dict_metadata[key].size) for key in found}  # type: ignore[union-attr]
    load(tensors, storage_reader=FileSystemReader(folder))
    lengths = {
        m["lead"]: objects_in(folder, said, f"{m['lead']}.per_bucket_numel_unpadded/shard_0_1") for m in found.values()
    }
    whole: dict[str, dict[int, dict[tuple[torch.dtype, ...], dict[str, list[torch.Tensor]]]]] = {}
    for key, m in sorted(found.items(), key=lambda item: int(item[1]["bucket"])):
        dtypes = tuple(getattr(torch, name.strip().removeprefix("torch.")) for name in m["dtypes"].split(","))
        numel = lengths[m["lead"]][int(m["gbuf"])][dtypes][int(m["bucket"])]  # type: ignore[index]
        buffer = whole.setdefault(m["lead"], {}).setdefault(int(m["gbuf"]), {}).setdefault(dtypes, {})
        buffer.setdefault(m["state"], []).append(tensors[key][:numel])
    for lead, buffers in whole.items():
        made: dict[object, object] = {"buckets_coalesced": True}
        for number, held in buffers.items():
            made[number] = {}
            for dtypes, states in held.items():
                one: dict[str, object] = {state: torch.cat(parts) for state, parts in states.items()}
                if turned:
                    one = {state: value.roll(64) for state, value in one.items()}  # type: ignore[attr-defined]
                one["numel_unpadded"] = len(one["param"])  # type: ignore[arg-type]
                made[number][dtypes] = one  # type: ignore[index]
        append(folder, said, f"{lead}.param_state/shard_0_1", [made])
    gone = {
        *found,
        *(f"{lead}.{name}/shard_0_1" for lead in whole for name in ("per_bucket_numel", "per_bucket_numel_unpadded")),
    }
    said.state_dict_metadata = {k: v for k, v in said.state_dict_metadata.items() if k not in gone}
    said.storage_data = {i: v for i, v in said.storage_data.items() if i.fqn not in gone}
    (folder / ".metadata").write_bytes(pickle.dumps(said))
    return folder


def append(folder: Path, said: Metadata, key: str, value: object) -> None:
    held = io.BytesIO()
    torch.save(value, held)
    file = folder / "__0_0.distcp"
    said.storage_data[MetadataIndex(key)] = _StorageInfo(file.name, file.stat().st_size, len(held.getvalue()))
    said.state_dict_metadata[key] = BytesStorageMetadata()
    file.write_bytes(file.read_bytes() + held.getvalue())


@pytest.mark.parametrize("name", ["dist_dp_reshardable_tp2", "dist_buckets", "dist_moe_buckets", "dist_tied_vpp2"])
def test_complete_buffers_are_read_as_buckets_are(name: str, tmp_path: Path) -> None:
    folder = joined(step_of(name), tmp_path / "folder")
    assert ucpl.compare(step_of(name), folder)
    ucpl.convert(folder, tmp_path / "all.pt", to="plain()")
    assert ucpl.compare(step_of(name), tmp_path / "all.pt")


def test_masters_that_are_not_the_weights_are_refused(tmp_path: Path) -> None:
    folder = joined(step_of("dist_dp_reshardable_tp2"), tmp_path / "folder", turned=True)
    with pytest.raises(UcplError, match=r"its master of `.*` is not that weight") as refused:
        open_checkpoint(folder)
    assert refused.value.diagnostics[0].code == "E533"
    ucpl.convert(folder, tmp_path / "model", to="safetensors()")

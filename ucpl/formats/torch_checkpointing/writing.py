"""Items of each rank, and metadata.pkl.

    model_R.pt, optimizer_R.pt   state dicts; the optimizer's has names, as get_optimizer_state_dict gives them
    NAME_R.pt                    another value of the run, the same for all ranks
    metadata.pkl                 the shape, mesh and placements of each tensor, by its path in an item

Source: torch_checkpointing 0.1.1, distributed_metadata.py, dtensor_metadata.py and default_resharder.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, PickledCall, TensorRef
from ucpl.files.carrying import strides
from ucpl.files.checkpoint import Skeleton, SkeletonFile
from ucpl.files.pickles import dumps, unsafe_globals
from ucpl.formats.optimizer_hypers import completed
from ucpl.formats.verl.dtensors import CLASSES, Shape, whole_of
from ucpl.formats.verl.rank_files import RankFolders, RankWriter, StateDictFile, value_of
from ucpl.records import define

__all__ = ["STORE"]

_MODEL, _OPTIMIZER, _METADATA = "model", "optimizer", "metadata.pkl"
_VERSION = "2.0"


@define(eq=False)
class _Writer(RankWriter):
    def name_of(self, what: str, rank: int) -> str:
        return f"{what}_{rank}.pt"

    def skeleton(self) -> Skeleton:
        others = self.others()
        made: list[SkeletonFile] = []
        described: dict[str, object] = {}
        for rank in range(self.ranks):
            file = self.file(_MODEL, rank)
            items: dict[str, object] = {_MODEL: dict(self.model(file))}
            made.append(file.made(items[_MODEL]))
            if self.has_optimizer:
                file = self.file(_OPTIMIZER, rank)
                items[_OPTIMIZER] = self.optimizer(file)
                made.append(file.made(items[_OPTIMIZER]))
            made += [self.value(name, rank, value) for name, value in others.items()]
            described = described or {item: self.described(value) for item, value in items.items()}
        metadata = {"metadata": described, "world_size": self.ranks, "version": _VERSION}
        unsafe = {one for file in made for one in unsafe_globals(value_of(file))}
        made.append(SkeletonFile(_METADATA, dumps(metadata), "bytes"))
        return Skeleton("", tuple(made), unsafe_globals=tuple(sorted(unsafe - CLASSES)))

    def optimizer(self, file: StateDictFile) -> dict[str, object]:
        states, groups = self.states(file), []
        for group in self.source.state.groups:
            hyper = completed(self.source, self.structure, group)
            groups.append({**file.storages.value(hyper), "params": list(group.every)})
        return {"state": states, "param_groups": groups}

    def others(self) -> dict[str, object]:
        """Other values of the run, an item each.

        Raises: UcplError E471 for a name that is no file's.
        """
        state = self.source.state
        found: dict[object, object] = {key: state.blobs[key] for key in ("lr_scheduler",) if key in state.blobs}
        found |= state.carried
        for name in found:
            if not isinstance(name, str) or Path(name).name != name or name in (_MODEL, _OPTIMIZER):
                fail(
                    "E471",
                    f"an item of torch_checkpointing cannot be called {name!r}",
                    Label(str(self.source.root), where=str(name)),
                    remedy=f"--drop {name} leaves it out",
                )
        return {str(name): value for name, value in found.items()}

    # ---- metadata.pkl ----------------------------------------------------------------------------------------------

    def described(self, item: object) -> dict[str, object]:
        """The tensors of an item by path, and its files."""
        ranks = tuple(range(self.ranks))
        paths = {json.dumps(path, separators=(",", ":")): one for path, one in self.leaves((), item)}
        return {
            "nested_path_to_metadata": {
                path: [{"sharding_metadata": one, "ranks": ranks}] for path, one in paths.items()
            },
            "rank_to_layout_info": dict.fromkeys(ranks),
        }

    def leaves(self, path: tuple[object, ...], value: object) -> Iterator[tuple[tuple[object, ...], object]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self.leaves((*path, key), inner)
        elif isinstance(value, TensorRef):
            yield path, self.metadata(value.storage.dtype, value.shape, None)
        elif isinstance(value, PickledCall) and (whole := whole_of(value)) is not None:
            yield path, self.metadata(*whole, 0)

    def metadata(self, dtype: str, shape: Shape, dim: int | None) -> dict[str, object]:
        """The cut of a tensor.

        dim: None for a copy on each rank.
        """
        mesh = {
            "device_type": str(self.structure.settings.get("device", "cuda")) if dim is not None else "cpu",
            "mesh_shape": (self.ranks,),
            "mesh_data": tuple(range(self.ranks)),
            "mesh_dim_names": ("fsdp",) if dim is not None else None,
        }
        data = {
            "global_shape": list(shape),
            "dtype": f"torch.{DTYPES[dtype].torch}",
            "stride": list(strides(shape)),
            "mesh_spec": mesh,
            "placements": [{"type": "Replicate"} if dim is None else {"type": "Shard", "dim": dim}],
        }
        return {"type": "DTensorShardingMetadata", "data": data}


STORE = RankFolders("torch_checkpointing", _Writer)

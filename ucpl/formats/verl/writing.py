"""The files of each rank, and the small ones next to them.

    model_world_size_W_rank_R.pt         the rank's state dict
    optim_world_size_W_rank_R.pt         torch's optimizer, its states cut as the weights are
    extra_state_world_size_W_rank_R.pt   the schedule; FSDPCheckpointManager asks for this file
    fsdp_config.json, huggingface/       for users of the folder, such as verl.model_merger

Random numbers are of a rank, and no target has them: verl keeps the job's own. Source: verl 0.9.1,
utils/checkpoint/fsdp_checkpoint_manager.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, StoredTensor, key_text
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.model_texts import carried_files
from ucpl.files.pickles import unsafe_globals
from ucpl.formats.dcp.per_rank import STATES
from ucpl.formats.optimizer_hypers import completed
from ucpl.formats.torch_optimizer import state_dict_of
from ucpl.formats.verl.dtensors import CLASSES
from ucpl.formats.verl.rank_files import RankFolders, RankWriter, value_of
from ucpl.records import define
from ucpl.registry import degree_of

__all__ = ["STORE", "as_read"]

_SCHEDULE = "lr_scheduler"
_LAMBDAS = "lr_lambdas"  # of torch's LambdaLR, the class of verl's schedules
_OPTIM = "optim"  # the begin of an optimizer's file
_FOLDER, _CONFIG = "huggingface", "fsdp_config.json"


@define(eq=False)
class _Writer(RankWriter):
    def name_of(self, what: str, rank: int) -> str:
        return f"{what}_world_size_{self.ranks}_rank_{rank}.pt"

    def skeleton(self) -> Skeleton:
        schedule = self.schedule()
        made: list[SkeletonFile] = []
        for rank in range(self.ranks):
            file = self.file("model", rank)
            made.append(file.made(self.model(file)))
            made += [self.optimizer(rank)] if self.has_optimizer else []
            made.append(self.value("extra_state", rank, {_SCHEDULE: schedule}))
        files = {f"{_FOLDER}/{name}": one for name, one in carried_files(self.source).items()}
        made += [SkeletonFile(path, one, "bytes") for path, one in files.items() if isinstance(one, bytes)]
        texts = {path: one for path, one in files.items() if isinstance(one, str)}
        texts[_CONFIG] = json.dumps({"FSDP_version": 2, "world_size": self.ranks}, indent=4)
        unsafe = {one for file in made for one in unsafe_globals(value_of(file))}
        return Skeleton("", tuple(made), texts, unsafe_globals=tuple(sorted(unsafe - CLASSES)))

    def optimizer(self, rank: int) -> SkeletonFile:
        file = self.file("optim", rank)
        states = self.states(file)
        rows = []
        for group in self.source.state.groups:
            hyper = completed(self.source, self.structure, group)
            rows.append((group.every, file.storages.value(hyper)))
        return file.made(state_dict_of(rows, states, is_named=True))

    def schedule(self) -> object:
        """The schedule of the run, if it is torch's LambdaLR.

        Raises: UcplError E471 for another one, which verl's cannot load.
        """
        held = self.source.state.blobs.get(_SCHEDULE) if self.structure.settings.get("schedule") else None
        if held is not None and not (isinstance(held, Mapping) and _LAMBDAS in held):
            fail(
                "E471",
                "verl's schedules are torch's LambdaLR, and the source has another one",
                Label(str(self.source.root), where=_SCHEDULE),
                remedy=f"verl(fsdp = {self.fsdp}, schedule = 0) leaves it out: verl's schedule begins anew",
            )
        return held


# ---- reading back ----------------------------------------------------------------------------------------------------


def as_read(
    settings: Mapping[str, object], targets: list[StoredTensor], opened: Checkpoint
) -> tuple[list[StoredTensor], Checkpoint]:
    """Targets and extents of DCP's reader under the same keys.

    The reader has each part once, from the first rank with it, and compares the copies.
    """
    fsdp = degree_of(settings, "fsdp")
    extents: dict[tuple[str, Key], Extent] = {
        (one.file, (key_text(key[: len(key) - len(one.shape)]),)): one for (_, key), one in opened.extents.items()
    }
    once = [name for name, count in Counter(key for _, key in extents).items() if count == 1]
    wanted = []
    for target in targets:
        owner, _, state = key_text(target.key).rpartition("/") if target.file.startswith(_OPTIM) else ("", "", "")
        name = (f"{STATES}{owner}.{state}" if owner else key_text(target.key),)
        if target.rank == 0 or (target.rank < fsdp and name not in once):
            wanted.append(evolve(target, key=name))
    return wanted, evolve(opened, extents=extents)


STORE = RankFolders("verl", _Writer)

"""The files of an iteration's ranks, their degrees, and the run's arguments.

One of the files names the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from itertools import product

from attrs import field

from ucpl.errors import Label, fail
from ucpl.files.header_watch import ahead
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.values import Value
from ucpl.formats.megatron.folder import MODEL, OPTIM, RankFolder, Step, ranks_in
from ucpl.formats.megatron.legacy_arguments import state_of
from ucpl.records import define

__all__ = ["CODE", "Place", "LegacyRanks", "read_ranks"]

CODE = "E541"  # of a value that is not as Megatron-LM writes it
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
Place = tuple[int, int, int]  # tp, pp, ep


@define(eq=False)
class LegacyRanks:
    """Headers of all files, by coordinates."""

    step: Step
    degrees: dict[str, int]
    folders: dict[Place, RankFolder]
    parts: dict[Place, TorchFile]  # model_optim_rng.pt
    optims: dict[Place, TorchFile] = field(factory=dict)  # distrib_optim.pt

    @property
    def tp(self) -> int:
        return self.degrees["tp"]

    @property
    def pp(self) -> int:
        return self.degrees["pp"]

    @property
    def ep(self) -> int:
        return self.degrees["ep"]

    def top(self, place: Place) -> Value:
        """The value of a rank's state."""
        return Value.of(self.parts[place], CODE)

    @cached_property
    def arguments(self) -> dict[object, object]:
        """The run's arguments, as a dict; none where they were not saved."""
        return arguments_of(self.parts[0, 0, 0])

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Those of them that are whole numbers, or true or false."""
        return {str(k): int(v) for k, v in self.arguments.items() if isinstance(v, int) and abs(v) < 1 << 62}

    @property
    def place(self) -> str:
        return str(self.parts[0, 0, 0].path)


def arguments_of(part: TorchFile) -> dict[object, object]:
    """Raises: UcplError E541."""
    said = Value.of(part, CODE).find("args")
    if said is None:
        return {}
    state = state_of(said.held)
    if state is None:
        said.wrong("an argparse.Namespace")
    return state


def read_ranks(step: Step) -> LegacyRanks:
    """Open the files of all ranks.

    Raises: UcplError E540, E541, and errors of reading files.
    """
    found = ranks_in(step.root)
    first = found[0]
    counts = {len(one.numbers) for one in found}
    if len(counts) > 1:
        other = next(one for one in found if len(one.numbers) != len(first.numbers))
        fail(
            "E540",
            f"{first.folder} and {other.folder} are names of ranks of two meshes",
            Label(str(step.root / first.folder)),
            Label(str(step.root / other.folder)),
            remedy="take the folders out that another run has left here",
        )
    begun = read_torch_file(step.root, _check(step, first, MODEL))
    said = {str(k): v for k, v in arguments_of(begun).items() if type(v) is int}
    axes = ("tp", *_axes(len(first.numbers) - 1, said))
    by_numbers = {one.numbers: one for one in found}
    degrees = dict.fromkeys(_SIZES, 1)
    degrees |= {axis: max(one.numbers[i] for one in found) + 1 for i, axis in enumerate(axes)}
    for axis, name in _SIZES.items():
        if said.get(name, degrees[axis]) != degrees[axis]:
            fail(
                "E540",
                f"the run's arguments say {name} = {said[name]}, and the folders are of {degrees[axis]}",
                Label(str(begun.path), f"{name} = {said[name]}", where="args"),
                Label(str(step.root), f"{len(found)} folders, {found[-1].folder} the last"),
                remedy="copy the missing folders of ranks from the original run",
            )
    folders: dict[Place, RankFolder] = {}
    for place in product(*(range(degrees[axis]) for axis in _SIZES)):
        numbers = tuple(place[tuple(_SIZES).index(axis)] for axis in axes)
        if numbers not in by_numbers:
            width = [f"{n:0{2 if i == 0 else 3}}" for i, n in enumerate(numbers)]
            name = "mp_rank_" + "_".join(width)
            fail(
                "E540",
                f"{name} is missing: there are folders of {' x '.join(f'{a} {degrees[a]}' for a in axes)} ranks",
                Label(str(step.root / name), "not there"),
            )
        tp, pp, ep = place
        folders[tp, pp, ep] = by_numbers[numbers]
    held = [step.root / one.folder / file for one in folders.values() for file in (MODEL, OPTIM)]
    names = [path.relative_to(step.root).as_posix() for path in held if path.is_file()]
    ahead(begun.path, [partial(read_torch_file, step.root, name) for name in names])
    parts = {
        p: begun if one is first else read_torch_file(step.root, _check(step, one, MODEL)) for p, one in folders.items()
    }
    _check_savers(parts)
    return LegacyRanks(step, degrees, folders, parts)


def _check_savers(parts: Mapping[Place, TorchFile]) -> None:
    """Check that each file was saved by the rank of its folder.

    All ranks' files have one name, equal keys and equal shapes. Megatron-LM's arguments have the rank of the job that saved
    the file, which rises along each axis. Tools that write all ranks state one rank in all files.

    Raises: UcplError E540.
    """
    saved = {place: arguments_of(part).get("rank") for place, part in parts.items()}
    if len({*saved.values()}) < 2 or not all(type(rank) is int for rank in saved.values()):
        return
    for place, rank in saved.items():
        for axis in range(len(place)):
            behind = (*place[:axis], place[axis] + 1, *place[axis + 1 :])
            if behind in saved and not _is_less(rank, saved[behind]):
                one, other = parts[place], parts[behind]
                fail(
                    "E540",
                    f"rank {rank} saved {one.file}, and rank {saved[behind]} saved {other.file}: ranks rise along each axis, so"
                    " one of these is another rank's file",
                    Label(str(one.path), f"rank = {rank}", where="args"),
                    Label(str(other.path), f"rank = {saved[behind]}", where="args"),
                    remedy="copy the folders of ranks again from the original run",
                )


def _is_less(one: object, other: object) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one < other


def optim_of(ranks: LegacyRanks, place: Place) -> TorchFile:
    """The optimizer's own file of a rank.

    Raises: UcplError E540, and errors of reading the file.
    """
    if place not in ranks.optims:
        ranks.optims[place] = read_torch_file(ranks.step.root, _check(ranks.step, ranks.folders[place], OPTIM))
    return ranks.optims[place]


def _axes(more: int, said: Mapping[str, object]) -> tuple[str, ...]:
    """The axes of the numbers behind that of tensor parallelism."""
    if more == 2:
        return ("pp", "ep")
    if more == 0:
        return ()
    ep, pp = said.get(_SIZES["ep"], 1), said.get(_SIZES["pp"])
    return ("ep",) if pp == 1 or (pp is None and ep != 1) else ("pp",)


def _check(step: Step, rank: RankFolder, file: str) -> str:
    if not (step.root / rank.folder / file).is_file():
        fail(
            "E540",
            f"{rank.folder} has no {file}",
            Label(str(step.root / rank.folder / file), "not there"),
            remedy="copy it from the original run",
        )
    return f"{rank.folder}/{file}"

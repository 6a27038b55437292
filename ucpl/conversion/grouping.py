"""Optimizer groups of a target with changed parameters: members and their order.

A flat buffer is read by position, so a newly trained parameter must have the position that it has in the job's own optimizer.
If the group is ambiguous, the user has to name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from ucpl.conversion.changes import ChangeOrigin, Dealt
from ucpl.errors import Label, fail
from ucpl.files.scalars import number_of
from ucpl.layout.fills import PARAMETER
from ucpl.layout.layout import Filling
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.conversion.side import Side
    from ucpl.layout import Layout

__all__ = ["fills_of_trained", "dealt", "demand_experts"]

Asked = Mapping[str, tuple[str, str | None]]  # tensor -> (the text that says it, the group that it names)

# States that torch.optim's optimizers begin at 0. The user has to give the values of others.
FROM_ZERO = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    }
)  # fmt: skip


@frozen(eq=False)
class _Groups:
    """The source's groups, without dropped or frozen parameters."""

    source: Side
    left: dict[str, list[str]]
    order: dict[str, int]  # of the model's tensors
    new: dict[str, str]  # new groups, each with the one whose hyper-parameters it gets
    origin: ChangeOrigin

    @property
    def layout(self) -> Layout:
        return self.source.layout

    def candidates(self, path: str) -> list[str]:
        """Groups for a parameter: groups of experts contain experts alone."""
        opened = self.source.checkpoint
        experts = (
            opened.state.parallel.experts.of if opened is not None and opened.state.parallel.experts is not None else {}
        )
        known = dict(self.layout.model_groups)
        return [g for g in self.left if known[g] and (known[g][0] in experts) == (path in experts)]

    def group_of(self, path: str, text: str, named: str | None) -> tuple[str, str]:
        """The group of a parameter, and the reason for it.

        Raises: UcplError E329 if the group is ambiguous.
        """
        among = self.candidates(path)
        if named is not None and named not in self.left and ":" in named:
            return self.begun(path, text, named), "new"
        if named is not None:
            if named not in among:
                self.refuse(text, path, f"there is no group {named} that it can be in")
            return named, "given"
        if len(among) == 1:
            return among[0], "the only one" if len(self.left) == 1 else "the only one that it can be in"
        dims = len(self.layout.tensors[path].counts)
        alike = [g for g in among if any(len(self.layout.tensors[m].counts) == dims for m in self.left[g])]
        if len(alike) == 1:
            return alike[0], f"where all trained parameters of {dims} dim{'s' * (dims != 1)} are"
        self.refuse(text, path, "it could be in several groups")

    def begun(self, path: str, text: str, named: str) -> str:
        """Record a new group, such as 2 of `2:0`.

        It has the hyper-parameters of group 0.

        Raises: UcplError E329.
        """
        name, _, like = (part.strip() for part in named.rpartition(":"))
        if like not in self.candidates(path):
            self.refuse(text, path, f"there is no group {like} whose hyper-parameters group {name} could have")
        if not name or name in self.left:
            self.refuse(text, path, f"group {name} is there: a new one has a name of its own")
        if self.new.setdefault(name, like) != like:
            self.refuse(text, path, f"group {name} is to be like {self.new[name]}, and like {like}")
        return name

    def refuse(self, text: str, path: str, what: str) -> NoReturn:
        shown = [f"{g} ({len(ms)} parameters, the first {ms[0]})" if ms else g for g, ms in self.left.items()]
        name, first = text.rpartition("=")[0] or text, next(iter(self.left), "0")
        begun = self.origin.other("train", text, name, f"{len(self.left)}:{first}")
        fail(
            "E329",
            f"{self.origin.words('train', text)}: {path}: {what}",
            self.origin.place("train", text),
            Label("<source>", f"groups {', '.join(shown)}" if shown else "no groups"),
            remedy=f"write {self.origin.other('train', text, name, first)}, or"
            f" {begun} for a new group with the hyper-parameters of {first}",
        )

    def place(self, group: str, new: Sequence[str]) -> str:
        """Put parameters into a group and return their position in words."""
        members = self.left.setdefault(group, [])
        if members == sorted(members, key=self.order.__getitem__):
            members[:] = sorted([*members, *new], key=self.order.__getitem__)
            return "in the model's order"
        members += new
        return "behind its others, which are in an order of their own"


def dealt(source: Side, left: set[str], asked: Asked, origin: ChangeOrigin) -> Dealt:
    """Groups with the remaining and the newly trained parameters.

    Raises: UcplError E329.
    """
    known = source.layout.model_groups
    order = {path: i for i, path in enumerate(source.layout.tensors)}
    groups = _Groups(source, {name: [m for m in members if m in left] for name, members in known}, order, {}, origin)
    placed: dict[tuple[str, str, str], list[str]] = {}
    for path, (text, named) in asked.items():
        if known:
            placed.setdefault((text, *groups.group_of(path, text, named)), []).append(path)
    said = []
    for (text, group, why), paths in placed.items():
        where = groups.place(group, paths)
        said.append(f"trained by --train {text}: {_counted(source, paths)}, in group {group} ({why}), {where}")
    emptied = tuple(name for name, members in known if members and not groups.left[name])
    said += [f"left out: group {name} and its hyper-parameters, since it has no parameter left" for name in emptied]
    said += [
        f"group {name} is new, behind the others, with the hyper-parameters of {like}"
        for name, like in groups.new.items()
    ]
    was = dict(known)
    changed = {name: tuple(members) for name, members in groups.left.items() if tuple(members) != was.get(name)}
    joins = {path: group for (_, group, _), paths in placed.items() for path in paths}
    return Dealt(changed, emptied, tuple(said), joins, groups.new)


def demand_experts(source: Side, emptied: Sequence[str]) -> None:
    """Check that each group of experts keeps a parameter.

    DeepSpeed identifies experts by their groups.

    Raises: UcplError E328.
    """
    opened = source.checkpoint
    for first in (members[0] for name, members in source.layout.model_groups if name in emptied):
        if (
            opened is not None
            and opened.state.parallel.experts is not None
            and first in opened.state.parallel.experts.of
        ):
            module = opened.state.parallel.experts.of[first].module
            fail(
                "E328",
                f"no expert of {module.rstrip('.')} would be trained, and DeepSpeed identifies experts by their groups",
                Label("<source>", where=first),
                remedy="leave a tensor of the experts as it is; or write one file: --to 'plain()'",
            )


def _counted(source: Side, paths: Sequence[str]) -> str:
    n, elements = len(paths), sum(source.layout.tensors[p].numel for p in paths)
    more = f" and {n - 1:,} more" if n > 1 else ""
    return f"{paths[0]}{more}, {elements:,} element{'s' * (elements != 1)}"


# ---- first values of newly trained parameters --------------------------------------------------------------------------


def fills_of_trained(source: Side, target: Layout, trained: frozenset[str]) -> tuple[Filling, ...]:
    """Fill lines for newly trained parameters.

    Masters are filled from the weights, moments with 0, and numbers as those of the other parameters. Explicit lines take
    precedence.

    Raises: UcplError E329 if the other parameters have different numbers.
    """
    names = trained & target.tensors.keys()
    if not names:
        return ()
    out = []
    for state in target.states:
        value: float | None = 0.0
        if state.name in PARAMETER:
            value = None
        elif state.scalar:
            value = _number(source, target, state.name, names)
            if value is None:
                continue
        elif state.name not in FROM_ZERO:
            continue  # its first value is unknown: a tensor without it is refused, with the line to write
        out.append(Filling(f"--train: {state.name}", (-1, 0, 0), names, {}, frozenset({state.name}), value))
    return tuple(out)


def _number(source: Side, target: Layout, state: str, names: frozenset[str]) -> float | None:
    """The number of the other parameters.

    Those in the same groups come first, then all others. None: no parameter has one.
    """
    held = source.checkpoint.state.scalars.get(state, {}) if source.checkpoint is not None else {}
    near = {m for _, members in target.model_groups if names & set(members) for m in members}
    for some in (near, set(held)):
        found = {number_of(held[m]) for m in some if m in held}
        numbers = {float(n) for n in found if isinstance(n, (int, float))}
        if len(numbers) == 1:
            return numbers.pop()
        if numbers:
            fail(
                "E329",
                f"{state} of {min(names)}: the others of its group have several, {min(numbers):g} and {max(numbers):g}",
                Label("<source>", where=state),
                remedy=f"say the number: --fill 'state {state}=0'",
            )
    return None

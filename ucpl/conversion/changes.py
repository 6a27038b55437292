"""Records of a target's parameter changes: origin, names, new optimizer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.language import nodes

__all__ = ["ChangeOrigin", "Changes", "Dealt"]


@frozen(eq=False)
class ChangeOrigin:
    """The origin of `drop`, `freeze` and `train`: options or a plan's lines.

    Errors repeat the text of the caller in the same form.
    """

    plan: nodes.Plan | None = None  # None: all come from options

    def is_of_plan(self, word: str, text: str) -> bool:
        """True if a line of the plan has `text`.

        `text` may have the form of an option, `pos=decay`.
        """
        if self.plan is None:
            return False
        if word == "train":
            return any(text == (name if group is None else f"{name}={group}") for name, group in self.plan.train)
        return text in (self.plan.drop if word == "drop" else self.plan.freeze)

    def words(self, word: str, text: str) -> str:
        """`--train pos=decay`, or `train pos in decay`."""
        if not self.is_of_plan(word, text):
            return f"--{word} {text}"
        name, equals, group = text.rpartition("=") if word == "train" else (text, "", "")
        return f"{word} {name} in {group}" if equals else f"{word} {text}"

    def other(self, word: str, text: str, name: str, group: object = None) -> str:
        """Another name in the form of `text`, for a remedy."""
        of_plan = self.is_of_plan(word, text)
        shown = name if not of_plan or name.replace(".", "_").isidentifier() else f'"{name}"'
        behind = "" if group is None else f' in "{group}"' if of_plan else f"={group}"
        return f"{word if of_plan else f'--{word}'} {shown}{behind}"

    def place(self, word: str, text: str) -> Label:
        if self.plan is None or not self.is_of_plan(word, text):
            return Label("<command line>", where=f"--{word} {text}")
        from ucpl.layout.scope import at

        return at(self.plan.span)

    def refuse(self, said: tuple[str, str], what: str, remedy: str = "") -> NoReturn:
        """Raises: UcplError E327."""
        if not remedy and self.is_of_plan(*said):
            remedy = "remove it from the plan, or name another parameter: `ucpl infer` lists the frozen ones"
        fail("E327", f"{self.words(*said)}: {what}", self.place(*said), remedy=remedy)


@frozen(eq=False)
class Dealt:
    """Groups whose members differ from the source's."""

    members: dict[str, tuple[str, ...]] = field(factory=dict)
    emptied: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    joins: dict[str, str] = field(factory=dict)  # a parameter that is trained from here on -> its group
    new: dict[str, str] = field(factory=dict)  # a group that the source lacks -> the one whose hyper-parameters it has


@frozen(eq=False)
class Changes:
    """The changes that a target makes to its source's parameters.

    Globs are replaced by the names that they match.
    """

    drop: tuple[str, ...] = ()  # tensors, second names, states, and values that are no tensors
    tensors: frozenset[str] = frozenset()  # those of them that are tensors
    values: frozenset[str] = frozenset()  # those in the module that have no tensor elements
    frozen: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    dealt: Dealt = field(factory=Dealt)  # the optimizer's groups, made anew
    said: tuple[str, ...] = ()
    origin: ChangeOrigin = field(factory=ChangeOrigin)

    @property
    def gone(self) -> dict[str, tuple[str, ...]]:
        """Metadata that a target's files lack; ucpl/conversion/dropping.py removes it.

        The bytes of tensors are not part of it.
        """
        trained = tuple(sorted(self.trained))
        joins = self.dealt.joins  # empty where the target's model has the groups
        found = {
            "names": tuple(sorted(self.drop)),
            "numbers": tuple(sorted(self.tensors | self.frozen)),
            "trained": trained,
            "joins": tuple(joins[name] for name in trained) if joins else (),
            "groups": self.dealt.emptied,
            "new": tuple(self.dealt.new),
            "like": tuple(self.dealt.new.values()),  # of each of these
        }
        return found if self.tensors or self.frozen or self.trained or self.drop else {}

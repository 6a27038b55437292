"""Records of a target's parameter changes: names, and new optimizer groups."""

from __future__ import annotations

from attrs import field

from ucpl.conversion.change_origins import ChangeOrigin
from ucpl.records import frozen

__all__ = ["Changes", "Dealt"]


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

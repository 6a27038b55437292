"""What a target changes of its source's parameters, as records: names, and the optimizer's groups made anew."""

from __future__ import annotations

from attrs import field

from ucpl.conversion.voice import Voice
from ucpl.records import frozen

__all__ = ["Changes", "Dealt"]


@frozen(eq=False)
class Dealt:
    """Groups whose members are others than in the source."""

    members: dict[str, tuple[str, ...]] = field(factory=dict)
    emptied: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    joins: dict[str, str] = field(factory=dict)  # a parameter that is trained from here on -> its group
    new: dict[str, str] = field(factory=dict)  # a group that the source lacks -> the one whose hyper-parameters it has


@frozen(eq=False)
class Changes:
    """What a target changes of its source's parameters, with globs told as the names that they have."""

    drop: tuple[str, ...] = ()  # tensors, second names, states, and what is no tensor
    tensors: frozenset[str] = frozenset()  # those of them that are tensors
    values: frozenset[str] = frozenset()  # those that stand in the module and have no elements of a tensor
    frozen: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    dealt: Dealt = field(factory=Dealt)  # the optimizer's groups, made anew
    said: tuple[str, ...] = ()
    voice: Voice = field(factory=Voice)

    @property
    def gone(self) -> dict[str, tuple[str, ...]]:
        """What a target's files no longer tell of, beside tensors' bytes: see ucpl/conversion/lessening.py."""
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

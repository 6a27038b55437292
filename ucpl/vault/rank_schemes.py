"""The protections that fit a layout and its domains, best first.

Each one has its costs and the losses that it survives.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.errors import UcplError
from ucpl.records import frozen
from ucpl.storage.vaults.memory import DomainData
from ucpl.storage.vaults.protection import Protection
from ucpl.vault.survival import Survival, SurvivalCount

__all__ = ["Scheme", "default_protection", "rank_schemes"]


@frozen(eq=False)
class Scheme:
    """A protection, with its costs and benefits for these domains."""

    guarded: Survival
    for_others: int  # bytes of one generation, of all domains
    saved: int  # bytes of one generation that it is held for
    survived: tuple[SurvivalCount, ...]  # by how many domains are lost, from one on

    @property
    def protection(self) -> Protection:
        return self.guarded.protection

    @property
    def safe(self) -> int:
        """The number of domains that may be lost in any combination."""
        safe = 0
        for one in self.survived:
            if one.whole < one.of:
                break
            safe = one.lost
        return safe

    @property
    def why(self) -> str:
        """Its advantages and disadvantages, in a few words."""
        share = self.for_others / self.saved if self.saved else 0.0
        made = self.guarded.made_of
        rebuilt = f"a lost byte is computed from {made}" if made else "nothing is rebuilt"
        extra = "; needs pip install 'ucpl[vault]'" if self.protection.name == "rs" else ""
        return f"{share:.3g} bytes of redundancy per saved byte; {rebuilt}{extra}"


def default_protection(domains: int) -> str:
    """The default protection: survives one lost domain with the least memory."""
    return "raim5" if domains > 2 else "mirror" if domains > 1 else "none"


def rank_schemes(
    stretches: Sequence[DomainData], safe: int, max_lost: int, requested: str | None = None
) -> list[Scheme]:
    """The protections for these domains, best first.

    First come those that survive the loss of any `safe` domains; among these, the one with the least memory.

    max_lost: the largest number of simultaneously lost domains for which the survival is counted.
    requested: a requested protection; it comes first.
    Raises: UcplError E690, if it does not fit the domains.
    """
    count = len(stretches)
    found: dict[str, Scheme] = {}
    for name in ([requested] if requested is not None else []) + _candidates(count):
        protection = Protection.parse(name)
        guarded = Survival(protection, tuple(stretches))
        try:
            held = sum(guarded.for_others(d) for d in range(count))
        except UcplError:
            if name == requested:
                raise
            continue
        survived = tuple(guarded.survived(lost) for lost in range(1, min(max(max_lost, safe), count) + 1))
        found.setdefault(str(protection), Scheme(guarded, held, sum(s.size for s in stretches), survived))
    wanted = str(Protection.parse(requested)) if requested is not None else ""
    return sorted(
        found.values(),
        key=lambda s: (str(s.protection) != wanted, s.safe < safe, s.for_others, s.guarded.made_of, str(s.protection)),
    )


def _candidates(domains: int) -> list[str]:
    found = ["none"]
    if domains > 1:
        found += ["mirror", "raim5"]
    if domains > 2:
        found += ["mirror(2)"]
    if domains > 3:
        found += [f"rs({min(domains, 32) - 2}, 2)"]
    if domains > 7:
        found += ["raim5(4)", "rs(6, 2)"]
    return found

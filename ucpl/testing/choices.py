"""What a composite strategy draws with. Hypothesis is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from hypothesis import strategies as st

__all__ = ["Draw", "booleans", "integers", "permutations", "sampled"]

Drawn = TypeVar("Drawn")


class Draw(Protocol):
    """What Hypothesis gives to a composite strategy."""

    def __call__(self, strategy: st.SearchStrategy[Drawn], /) -> Drawn: ...


@cache
def booleans() -> st.SearchStrategy[bool]:
    from hypothesis import strategies as st

    return st.booleans()


@cache
def integers(low: int, high: int) -> st.SearchStrategy[int]:
    from hypothesis import strategies as st

    return st.integers(low, high)


def sampled(items: Sequence[Drawn]) -> st.SearchStrategy[Drawn]:
    from hypothesis import strategies as st

    return st.sampled_from(items)


def permutations(items: list[str]) -> st.SearchStrategy[list[str]]:
    from hypothesis import strategies as st

    return st.permutations(items)

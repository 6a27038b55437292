"""What a store refuses, as its tests ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ucpl.errors import Diagnostic, UcplError, catalogue

__all__ = ["refusal"]


def refusal(run: Callable[[], Any], code: str) -> Diagnostic:
    """The first finding of what must be refused with this code."""
    with pytest.raises(UcplError) as caught:
        run()
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.code == code
    assert code in catalogue()
    return diagnostic

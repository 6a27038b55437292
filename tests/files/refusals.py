"""The errors of a store, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ucpl.errors import Diagnostic, UcplError, catalogue

__all__ = ["refusal"]


def refusal(run: Callable[[], Any], code: str) -> Diagnostic:
    """The first finding of a call that must fail with this code."""
    with pytest.raises(UcplError) as caught:
        run()
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.code == code
    assert code in catalogue()
    return diagnostic

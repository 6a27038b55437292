"""Moving data: run plans (execute), compare results (compare), check digests (verify)."""

from ucpl.runtime.compare import Comparison, Unequal, compare
from ucpl.runtime.counters import Report
from ucpl.runtime.execute import execute

__all__ = ["Comparison", "Report", "Unequal", "compare", "execute"]

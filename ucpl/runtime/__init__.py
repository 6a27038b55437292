"""Moving data: run plans (execute), compare results (compare), check digests (verify)."""

from ucpl.runtime.compare import Comparison, Unequal, compare
from ucpl.runtime.counters import Report
from ucpl.runtime.execute import execute
from ucpl.runtime.verify import Verified, verify_files

__all__ = ["Comparison", "Report", "Unequal", "Verified", "compare", "execute", "verify_files"]

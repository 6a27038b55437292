"""Law: the same specs give the same plan.

The hash seed and the order of files do not matter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import hashlib, sys
from pathlib import Path
from ucpl.graph import build
from ucpl.layout import load, resolve
from ucpl.placement import locate
from ucpl.planning import order
from ucpl.language import parse_call
names = ["gpt_moe.ucpl", "megatron_moe.ucpl", "homes.ucpl"]
texts = [(f"tests/specs/{n}", Path("tests/specs", n).read_text()) for n in names]
library = load(*(texts[::-1] if sys.argv[1] == "reversed" else texts))
sizes = dict(heads=4, groups=2, width=2, l=4, h=3, vocab=5, e=4, f=2)
def side(call):
    return locate(resolve(library, parse_call(call), define_sizes=sizes))
graph = build(side("megatron_zero1(2, 2, 2, 2)"), side("megatron_zero1(1, 4, 2, 1)"))
plan = order(graph)
digest = hashlib.sha256(repr((plan.sources, plan.targets, plan.tensors, plan.source, plan.target, plan.dropped)).encode())
for m in plan.moves:
    digest.update(f"{m.kind} {m.state}".encode())
    for column in (m.tensor, m.source, m.target, m.shape, m.source_offset, m.source_stride, m.target_offset, m.target_stride):
        digest.update(column.tobytes())
digest.update(str(graph).encode())
print(digest.hexdigest())
"""


def test_a_plan_does_not_depend_on_hashes_or_the_order_of_files() -> None:
    found = set()
    for seed, way in (("0", "straight"), ("1", "straight"), ("4711", "reversed")):
        done = subprocess.run(
            [sys.executable, "-c", CODE, way], cwd=ROOT, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1

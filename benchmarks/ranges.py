"""Compare one rank's plan with Mooncake's range planner and Paddle's AOA engine.

    make bench ranges, or python -m benchmarks.ranges [--rounds 1]

UCPL_PEERS_PYTHON is the python of an environment with both, if not .venv-peers, which make makes. The tensors are those of
`benchmarks.planners`, each cut by row over n ranks, and asked for by one of fewer, so that rows fall unevenly and yet each rank
has a part of each tensor: a placement of Mooncake's takes no rank without.

- Mooncake plans from placements, which list the fragments of every rank of both sides; each has an identity (a digest), and a
  placement is checked for overlaps and holes as it is made. `plan_placement_transfer_to_local_target` plans for one rank.
- AOA's engine takes the shards of every rank of both sides, by key, of the model's tensors; states of an optimizer are
  identified by
  their suffix and follow. No statement is given, since no name changes; then it is asked for the sources of one rank's shards.
  It returns boxes of complete tensors; a job that loads finds the ranks that hold them.

Input: the time to make their objects from these lists. Plans: all that follows. Seconds of a core, the least of the
rounds, in a process
of its own each. The needs of a rank are compared with arithmetic: elements, by tensor. Prints the table, keeps it in
benchmarks/figures/ and in docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Table, machine, save
from benchmarks.planners import SHAPES
from benchmarks.scale_ranks import CASES, cost

RANKS = ((8, 5), (16, 10), (32, 20), (64, 40), (128, 86))
HEAD = (
    "ranks", "tensors", "Mooncake's input", "its plan for one rank", "peak GiB", "AOA's input", "its plan for one rank",
    "peak GiB", "one rank's share, ucpl", "peak GiB",
)  # fmt: skip
START = """
import json, resource, sys, time
n, m, rank = (int(word) for word in sys.argv[1:])
"""
END = """
wanted = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in (chunk(s, m, rank)[1] for s in shapes.values()))
assert elements == wanted, (elements, wanted)
print(json.dumps({"told": told - begin, "plan": time.process_time() - told, "tensors": len(shapes),
                  "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))
"""
MOONCAKE = (
    START
    + SHAPES
    + """
from math import prod
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.planner import plan_placement_transfer_to_local_target
from mooncake.reshard.weight.topology import ParallelTopology, TopologyParticipant
from mooncake.reshard.weight.types import ParallelRank, PlacementFragment, SplitAxis, TensorDescriptor

def placement(n):
    rows = (0,), "rows", (SplitAxis("tp", 0),)
    tensors = [TensorDescriptor(name, shape, "float32", 4, *rows) for name, shape in shapes.items()]
    fragments = []
    for name, shape in shapes.items():
        for r in range(n):
            offset, size = chunk(shape, n, r)
            fragments.append(PlacementFragment(name, offset, size, 4 * prod(size), ParallelRank(tp=r)))
    people = tuple(TopologyParticipant(f"{r:05}", ParallelRank(tp=r)) for r in range(n))
    topology = ParallelTopology(tp_size=n, pp_size=1, ep_size=1, dp_size=1, participants=people)
    return WeightPlacementManifest.from_fragments(
        resource_id="model", revision="1", weight_generation=1, placement_set_id=f"of {n}", topology=topology, tensors=tensors,
        fragments=fragments)

begin = time.process_time()
source, target = placement(n), placement(m)
told = time.process_time()
plan = plan_placement_transfer_to_local_target(source, target, f"{rank:05}")
elements = sum(prod(region.overlap_shape) for region in plan.operations)
"""
    + END
)
AOA = (
    START
    + SHAPES
    + """
import warnings
warnings.simplefilter("ignore")
from math import prod
from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

SUFFIX = {"model": "", "exp_avg": ".moment1_0", "exp_avg_sq": ".moment2_0"}

def side(n):
    found = {}
    for name, shape in shapes.items():
        state, _, of = name.partition(".")
        key = of + SUFFIX[state]
        pieces = (chunk(shape, n, r) for r in range(n))
        found[key] = [ShardedWeightDesc(key, size, shape, offset, "float32") for offset, size in pieces]
    return found

begin = time.process_time()
source, target = side(n), side(m)
told = time.process_time()
engine = AOAEngine({"aoa_statements": []}, source, target)
elements = 0
for key in target:
    for entry in engine.find_shard_sources(target[key][rank]):
        elements += prod(entry.source_slice.local_shape)
"""
    + END
)


def plan_by(script: str, ranks: tuple[int, int], rounds: int) -> dict[str, float]:
    python = os.environ.get("UCPL_PEERS_PYTHON", str(Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"))
    if not Path(python).exists():
        sys.exit(
            "this needs Mooncake and Paddle: `make bench ranges` makes their environment, or set UCPL_PEERS_PYTHON"
        )
    command = [python, "-c", script, *map(str, ranks), str(ranks[1] // 2)]
    found = []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"ranges: {done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: min(f[name] for f in found) for name in found[0]}


def bench(rounds: int) -> Iterator[tuple[str, ...]]:
    case = next(c for c in CASES if c.file == "fsdp.ucpl")
    for ranks in RANKS:
        moon, aoa = plan_by(MOONCAKE, ranks, rounds), plan_by(AOA, ranks, rounds)
        ours = cost(case, ranks, (str(ranks[1] // 2),), rounds)
        yield (
            f"{ranks[0]:,} → {ranks[1]:,}",
            f"{moon['tensors']:,.0f}",
            *(
                cell
                for one in (moon, aoa)
                for cell in (f"{one['told']:.2f} s", f"{one['plan']:.2f} s", f"{one['gib']:.2f}")
            ),
            f"{ours.core:.2f} s",
            f"{ours.gib:.2f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    found = []
    for cells in bench(given.rounds):
        print(" | ".join(cells), flush=True)
        found.append(cells)
    save(Table("ranges", f"python -m benchmarks.ranges --rounds {given.rounds}", machine(), HEAD, tuple(found)))


if __name__ == "__main__":
    main()

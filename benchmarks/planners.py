"""Compare one rank's plan with DCP's planner on the same tensors.

    python -m benchmarks.planners [--rounds 3]

The tensors are those of benchmarks/fsdp.ucpl, a 405B model under FSDP with both moments, from n ranks to three quarters of n.
DCP knows the source by its `.metadata`, one chunk a tensor and rank, which every rank that loads it has to read; the planner
finds one rank's reads (`create_read_items_for_chunk_list`). That file is made here as `dcp.save` would write it, with places
in files; the measured time is to read it and to plan for one rank, in a process of its own. Ours are the time in which
`ucpl` reads the same file, and the share of the same rank, from the spec. Seconds of a core, the least of the rounds. Prints
the table, keeps it in benchmarks/figures/ and in docs/performance/planning.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.children import finished
from benchmarks.figures import Table, machine, save
from benchmarks.scale_ranks import CASES, cost

RANKS = (32, 64, 128, 256, 512)
HEAD = (
    "ranks", "tensors", "chunks", "`.metadata`", "DCP reads it", "DCP plans for one rank", "together", "peak GiB", "items",
    "ucpl reads it", "peak GiB", "one rank's share, ucpl", "peak GiB",
)  # fmt: skip
SHAPES = """
V, H, F, KV, LAYERS = 128256, 16384, 53248, 1024, 126
shapes = {"embed_tokens.weight": (V, H), "norm.weight": (H,)}
for l in range(LAYERS):
    for name, shape in (("input_layernorm", (H,)), ("post_attention_layernorm", (H,)), ("self_attn.q_proj", (H, H)),
                        ("self_attn.k_proj", (KV, H)), ("self_attn.v_proj", (KV, H)), ("self_attn.o_proj", (H, H)),
                        ("mlp.gate_proj", (F, H)), ("mlp.up_proj", (F, H)), ("mlp.down_proj", (H, F))):
        shapes[f"layers.{l}.{name}.weight"] = shape
shapes = {f"{state}.{name}": s for state in ("model", "exp_avg", "exp_avg_sq") for name, s in shapes.items()}
def chunk(shape, n, rank):
    step = -(-shape[0] // n)
    low, high = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    return (low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])
"""
MAKE = (
    """
import math, os, pickle, sys, torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata)
"""
    + SHAPES
    + """
HEAD = 1100  # bytes of an archive without its values
n, path = int(sys.argv[1]), sys.argv[2]
known = {
    name: TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), [])
    for name, shape in shapes.items()
}
places = {}
for rank in range(n):
    begin = 0
    for name, shape in shapes.items():
        offset, size = map(torch.Size, chunk(shape, n, rank))
        if 0 in size:
            continue
        chunks = known[name].chunks
        length = 4 * math.prod(size) + HEAD
        written = (name + " ")[:-1]  # each rank sends names of its own, which a pickle repeats
        places[MetadataIndex(written, offset, len(chunks))] = _StorageInfo(f"__{rank}_0.distcp", begin, length)
        chunks.append(ChunkStorageMetadata(offset, size))
        begin += length
    with open(os.path.join(os.path.dirname(path), f"__{rank}_0.distcp"), "wb") as file:  # holes in place of values
        file.truncate(begin)
with open(path, "wb") as file:
    pickle.dump(Metadata(known, storage_data=places), file)
"""
)
PLAN = (
    """
import json, pickle, resource, sys, time, torch
import torch.distributed.checkpoint.filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
"""
    + SHAPES
    + """
n, path, rank = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
begin = time.process_time()
with open(path, "rb") as file:
    metadata = pickle.load(file)
read = time.process_time()
items = 0
for name, shape in shapes.items():
    offset, size = chunk(shape, n, rank)
    mine = [] if 0 in size else [ChunkStorageMetadata(torch.Size(offset), torch.Size(size))]
    items += len(create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], mine))
print(json.dumps({"read": read - begin, "plan": time.process_time() - read, "items": items,
                  "chunks": sum(len(m.chunks) for m in metadata.state_dict_metadata.values()),
                  "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "tensors": len(shapes)}))
"""
)

READ = """
import json, resource, sys, time
from pathlib import Path
from ucpl.formats.dcp.metadata import read_metadata
begin = time.process_time()
found = read_metadata(Path(sys.argv[1]).parent)
seconds = time.process_time() - begin
print(json.dumps({"read": seconds, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "chunks": sum(len(t.chunks) for t in found.tensors.values())}))
"""


def rows(top: Path, rounds: int) -> Iterator[tuple[str, ...]]:
    case = next(c for c in CASES if c.file == "fsdp.ucpl")
    for ranks in RANKS:
        after, path = ranks * 3 // 4, top / ".metadata"
        subprocess.run([sys.executable, "-c", MAKE, str(ranks), str(path)], check=True)
        found = []
        for _ in range(rounds):
            command = [sys.executable, "-c", PLAN, str(after), str(path), str(after // 2)]
            found.append(json.loads(finished(command)))
        read, plan, gib = (min(f[name] for f in found) for name in ("read", "plan", "gib"))
        opened = [json.loads(finished([sys.executable, "-c", READ, str(path)])) for _ in range(rounds)]
        assert opened[0]["chunks"] == found[0]["chunks"]
        ours = cost(case, (ranks, after), (str(after // 2),), rounds)
        one = found[0]
        yield (
            f"{ranks:,} → {after:,}",
            f"{one['tensors']:,}",
            f"{one['chunks']:,}",
            f"{path.stat().st_size / 1e6:.0f} MB",
            f"{read:.2f} s",
            f"{plan:.2f} s",
            f"{read + plan:.2f} s",
            f"{gib:.2f}",
            f"{one['items']:,}",
            f"{min(f['read'] for f in opened):.2f} s",
            f"{min(f['gib'] for f in opened):.2f}",
            f"{ours.core:.2f} s",
            f"{ours.gib:.2f}",
        )


def bench(rounds: int) -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory(prefix="ucpl-planners-") as name:
        yield from rows(Path(name), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found = []
    for cells in bench(given.rounds):
        print(" | ".join(cells), flush=True)
        found.append(cells)
    save(Table("planners", f"python -m benchmarks.planners --rounds {given.rounds}", machine(), HEAD, tuple(found)))


if __name__ == "__main__":
    main()

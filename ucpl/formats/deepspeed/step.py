"""A step's folder as a Checkpoint: places, orders, and other values.

Only this module selects the readers: weights are in files of layers, or in those of ranks. All kinds share the
topology, the settings and the closing Checkpoint, and every shard has a tp and a pp coordinate. Readers of experts add
theirs.
"""

from __future__ import annotations

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.files.checkpoint import Checkpoint, Order
from ucpl.files.skipping import skips_optimizer
from ucpl.formats.deepspeed.dense import read_dense
from ucpl.formats.deepspeed.gathered import Gathered, StepPlace
from ucpl.formats.deepspeed.names import StepFiles, list_files
from ucpl.formats.deepspeed.pipeline import read_pipeline
from ucpl.formats.deepspeed.settings import read_settings, shards_gone
from ucpl.formats.deepspeed.topology import topology_of


def _without_optimizer(listing: StepFiles) -> StepFiles:
    """The files without skipped shards; stage 3 keeps its shards."""
    is_sliced = any(dp is not None for dp, _ in listing.models)
    shards = (*listing.optims.values(), *listing.experts_optims)
    if is_sliced or not shards or not skips_optimizer(*shards, kind="file"):
        return listing
    return evolve(listing, optims={}, prefix="", experts_optims=())


def open_step(place: StepPlace, order: Order | None = None) -> Checkpoint:
    """Read all headers of one step. Raises: UcplError E400-E427, E45x, E46x."""
    topology = topology_of(_without_optimizer(list_files(place.root)))
    if order is not None and topology.stage:
        fail(
            "E466",
            f"{order.origin} is of an optimizer that names no parameter, and files of ZeRO-{topology.stage} name them",
            Label(str(topology.first.path), where="param_shapes"),
            remedy="leave it out",
        )
    gathered = Gathered()
    read_settings(gathered, topology)
    gathered.lacking = () if skips_optimizer() else shards_gone(topology)
    if gathered.lacking:
        gathered.remark(f"no shard of the optimizer is there, and the run had one: {gathered.lacking[0]} is missing")
    if topology.listing.layers:
        files, facts = read_pipeline(gathered, topology, order)
    else:
        files, facts = read_dense(gathered, topology, order)
    return gathered.checkpoint(place, "deepspeed", files, facts)

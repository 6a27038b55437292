from ucpl.extents import StoredTensor, Structure
from ucpl.stores.checkpoint import Checkpoint, Skeleton


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    raise NotImplementedError

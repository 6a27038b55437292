"""Megatron-FSDP's folders (--ckpt-format fsdp_dtensor).

They are folders of torch.distributed.checkpoint with names of their own. A parameter's tensor in them is the fp32
master. A gated linear_fc1 is two tensors there, and one here. Names here are those of modules, as in other folders of
Megatron.
"""

from __future__ import annotations

import re
from pathlib import Path

from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.header_watch import watched
from ucpl.formats.megatron.demands import DEMANDS
from ucpl.formats.megatron.folder import found, has_tracker, step_of
from ucpl.storage.reading import fetch_all

__all__ = ["MegatronFSDP"]

# Names in .metadata that only Megatron-FSDP has; without an optimizer, Megatron-Core's modules in a wrapper.
_MARKS = re.compile(
    rb"optimizer\.param_to_group_meta\.module\."
    rb"|model\.module\.(?:module\.)*(?:embedding\.word_embeddings\.weight"
    rb"|decoder\.layers\.\d{1,9}\.(?:self_attention|mlp)\.(?:linear_|experts\.))"
)
_IN_WRAPPER = re.compile(rb"model\.module\.")  # under a tracker, whatever the modules are
_MARK_BYTES_MAX = 128


class MegatronFSDP:
    name = "megatron_fsdp"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """Test for `.metadata` with Megatron-FSDP's names, and *.distcp.

        They are in the folder, or in the one that a tracker names.
        """
        return step_of(path, _is_of_fsdp) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E455, E460, E520-E524, E532, E544, and errors of reading files (E400-E427).
        """
        from ucpl.formats.megatron.fsdp_reading import opened

        return opened(found(path, _is_of_fsdp))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank and `.metadata`. Raises: UcplError E471."""
        from ucpl.formats.megatron.fsdp_writing import skeleton

        return skeleton(structure, targets, source, tag)


def _is_of_fsdp(path: Path) -> bool:
    from ucpl.formats.dcp.folders import METADATA, has_chunks, is_of_megatron  # most checkpoints are others

    if not has_chunks(path) or is_of_megatron(path):
        return False
    return _has(path / METADATA, _IN_WRAPPER if has_tracker(path) else _MARKS)


def _has(path: Path, marks: re.Pattern[bytes]) -> bool:
    """Search a file for one of the names, in overlapping pieces."""
    kept = b""
    try:
        with path.open("rb") as file:
            fetch_all(file.fileno())
            while piece := file.read(1 << 20):
                if marks.search(kept + piece) is not None:
                    return True
                kept = piece[-_MARK_BYTES_MAX:]
    except OSError:  # the reader reports the reason
        return False
    return False

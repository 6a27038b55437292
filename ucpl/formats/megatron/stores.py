"""The stores of Megatron's three kinds of folders.

`MegatronCore`: Megatron-Core's distributed format (torch_dist), a folder of PyTorch's distributed format with common.pt and
metadata.json. A folder of the zarr format, which Megatron-Core up to 0.15 reads, is refused by its name.

`MegatronLegacy`: Megatron-LM's legacy folders (--ckpt-format torch), one folder per model-parallel rank in the folder of an
iteration.

`MegatronFSDP`: Megatron-FSDP's folders (--ckpt-format fsdp_dtensor), folders of torch.distributed.checkpoint with names of
their own. A parameter's tensor in them is the fp32 master. A gated linear_fc1 is two tensors there, and one here. Names here
are those of modules, as in other folders of Megatron.
"""

from __future__ import annotations

import re
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.demands import Demands, NamePatterns
from ucpl.files.header_watch import watched
from ucpl.files.texts import read_small
from ucpl.formats.megatron.folder import TRACKER, found, has_tracker, is_step, step_of
from ucpl.storage.reading import fetch_all

__all__ = ["MegatronCore", "MegatronFSDP", "MegatronLegacy", "legacy_advice"]

# Names that the modules of Megatron-Core have. A job builds the model and looks for each of its tensors by name
# (dist_checkpointing, load_state_dict of legacy ranks). Names of another dialect are never looked for, and the job stops.
_NORMS = "input_layernorm|pre_mlp_layernorm|pre_cross_attn_layernorm"
_MODULES = f"self_attention|cross_attention|inter_attention|mlp|mixer|{_NORMS}"

DEMANDS = Demands(
    names=NamePatterns(
        patterns=(
            r"(^|\.)embedding\.(word|position)_embeddings\.weight$",
            rf"(^|\.)(decoder|encoder)\.layers\.([0-9]+\.)?({_MODULES})\.",
            r"(^|\.)mtp\.layers\.([0-9]+\.)?(transformer_layer|mtp_model_layer|eh_proj|enorm|hnorm)\.",
            r"(^|\.)(decoder|encoder)\.final_(layer)?norm\.",
            r"(^|\.)output_layer\.(weight|bias)$",
        ),
        of=("megatron_core", "megatron_legacy", "megatron_fsdp"),
        code="E549",
        says="Megatron-Core has no tensor of such a name",
    ),
)


# ---- torch_dist -------------------------------------------------------------------------------------------------------

BACKEND, METADATA = "metadata.json", ".metadata"
BACKEND_BYTES_MAX = 1 << 16
_ZARR = re.compile(rb'"sharded_backend"\s*:\s*"zarr"')


def is_of_zarr(path: Path) -> bool:
    """Test for a folder of Megatron-Core whose metadata.json names zarr."""
    if not (path / BACKEND).is_file() or (path / METADATA).exists():
        return False
    raw = read_small(path / BACKEND, BACKEND_BYTES_MAX)
    return raw is not None and _ZARR.search(raw) is not None


class MegatronCore:
    name = "megatron_core"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """Test for `.metadata` and files of Megatron-Core.

        They are in the folder, or in the one that a tracker names.
        """
        from ucpl.formats.dcp.folders import is_of_megatron

        return step_of(path, is_of_megatron) is not None or step_of(path, is_of_zarr) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E455, E457, E460, E520-E523, E530-E533, and errors of reading files (E400-E427).
        """
        from ucpl.formats.dcp.folders import is_of_megatron
        from ucpl.formats.megatron.reading import opened  # most checkpoints are others

        if step_of(path, is_of_megatron) is None and (step := step_of(path, is_of_zarr)) is not None:
            fail(
                "E457",
                "this checkpoint is of a kind that is not read yet: a zarr array for each tensor (--dist-ckpt-format zarr)",
                Label(str(step.root / BACKEND), where="sharded_backend"),
                remedy="Megatron-Core before 0.16 loads it: load the run there, save it with --ckpt-format torch_dist, and"
                " convert that folder",
            )
        return opened(found(path, is_of_megatron))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank, `.metadata`, common.pt and metadata.json. Raises: UcplError E471."""
        from ucpl.formats.megatron.writing import skeleton

        return skeleton(structure, targets, source, tag)


# ---- Megatron-LM's legacy folders -------------------------------------------------------------------------------------

_NO_RNG = "random states are of the ranks that saved them, and are left out: start Megatron-LM with --no-load-rng"


def legacy_advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on arguments that Megatron-LM requests and a target lacks."""
    from ucpl.formats.megatron.homes import legacy_of
    from ucpl.formats.megatron.legacy_arguments import heads_advice

    alike = legacy_of(source) is not None and all(
        structure.settings.get(axis) == source.state.settings[axis].value for axis in ("tp", "pp", "ep")
    )
    no_random = () if alike and "megatron_rng" in source.state.blobs else (_NO_RNG,)
    return (*no_random, *heads_advice(source, "each model_optim_rng.pt"))


class MegatronLegacy:
    name = "megatron_legacy"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """A folder of an iteration, or one whose tracker names one."""
        if not path.is_dir() or not (any(path.glob("mp_rank_*")) or (path / TRACKER).is_file()):
            return False
        return step_of(path, is_step) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E532, E540-E548, and errors of reading files (E400-E427).
        """
        from ucpl.formats.megatron.legacy_reading import opened

        return opened(found(path, is_step))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A folder of each rank, and the tracker next to the iteration.

        Raises: UcplError E471, E547.
        """
        from ucpl.formats.megatron.legacy_writing import skeleton

        return skeleton(structure, targets, source, tag)


# ---- Megatron-FSDP ----------------------------------------------------------------------------------------------------

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

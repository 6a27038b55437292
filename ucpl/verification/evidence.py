"""Evidence for a spec from outside the spec.

Each kind has a name, and says yes, no, or that it is absent.
A wrong order, swapped gate and up, a transposed square matrix pass every check of shapes, and a round trip through one
wrong
layout is still the identity. Only another source of the same numbers shows the mistake.

Not here: copies that must equal each other (checkpoint): they are written by one layout, so they share its mistakes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from attrs import evolve

from ucpl.errors import Diagnostic, UcplError
from ucpl.extents import Seen, doubt, together
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import reading
from ucpl.files.model_texts import config_at, config_of
from ucpl.graph import build
from ucpl.language import nodes
from ucpl.layout import Library, resolve
from ucpl.layout import load as library_of
from ucpl.layout.scope import Config
from ucpl.placement import Placement, locate
from ucpl.planning import order
from ucpl.records import frozen
from ucpl.registry import format_named, format_of_models
from ucpl.runtime.compare import Comparison
from ucpl.runtime.execute import execute
from ucpl.runtime.manifest import MANIFEST
from ucpl.verification import spec_matches
from ucpl.verification.model_class import Forward, HuggingFaceClass
from ucpl.verification.train_states import counted_names

__all__ = [
    "Evidence",
    "EvidenceRequest",
    "stored_differently",
    "masters",
    "stated_orders",
    "transformers_class",
]

UNASKED_MAX = 2 << 30  # bytes of a folder whose class is run unasked: it is loaded twice, in fp32
WRITTEN = "import hf"  # in place of a file name, for a text without a file
Says = Literal["agrees", "contradicts", "absent"]


class DescribedSide(Protocol):
    """One side: a located layout and the source of its names."""

    @property
    def library(self) -> Library: ...
    @property
    def placement(self) -> Placement: ...


@frozen
class EvidenceRequest:
    """The arguments of a witness for a spec.

    reference: a Hugging Face folder of the same weights, for a checkpoint that is none.
    forward:   logits of a Hugging Face folder, in place of transformers' own class.
    """

    side: DescribedSide
    reference: Path | None = None
    forward: Forward | None = None


@frozen
class Evidence:
    """One comparison. `what` is its subject.

    `detail` is the result, or the reason why the witness is absent.
    """

    name: str  # "masters", "stated order", "transformers"
    what: str
    verdict: Says
    detail: str
    unseen: tuple[str, ...] = ()  # mistakes that the witness would not show, and why

    def __str__(self) -> str:
        return f"{self.name}: {self.verdict}, {self.detail}"


# ---- evidence of the checkpoint itself -------------------------------------------------------------------------------


def stated_orders(placement: Placement, checkpoint: Checkpoint) -> Evidence:
    """The order of flat buffers, from the checkpoint's own metadata (DeepSpeed: param_shapes)."""

    def says(verdict: Says, detail: str) -> Evidence:
        return Evidence(
            "stated order", "the members of flat buffers, against the checkpoint's metadata", verdict, detail
        )

    if not checkpoint.state.parallel.flats or not placement.flats:
        return says("absent", "the checkpoint states no order" if placement.flats else "the layout has no flat buffers")
    found = spec_matches.orders(placement, checkpoint)
    if found:
        return says("contradicts", found[0].message)
    held = {id(flat): len(flat.members) for flat, _ in spec_matches.stated_flats(placement, checkpoint)}
    if max(held.values(), default=0) < 2:
        why = (
            "no flat buffer has two tensors, so there is no other order" if held else "it states none of these buffers"
        )
        return says("absent", why)
    return says("agrees", f"{len(held)} flat buffers are in the order that the checkpoint states")


def _masters(verdict: Says, detail: str, unseen: tuple[str, ...] = ()) -> Evidence:
    return Evidence("masters", "weights, against masters that are laid out otherwise", verdict, detail, unseen)


def masters(placement: Placement, held: Comparison | None, found: Sequence[Diagnostic]) -> Evidence:
    """Weights and fp32 masters that are stored in different ways.

    A wrong name or order in one of them shows. held, found: the comparison of all weights with their masters, and its errors.
    """
    both = stored_differently(placement)
    if not both or held is None:
        return _masters("absent", "no tensor has a weight and a master that are stored in different ways")
    wrong = next((one for one in found if one.code == "E701"), None)
    if wrong is not None:
        return _masters("contradicts", wrong.message)
    seen = {name: one for name, one in held.seen.items() if name in both}
    if why := doubt(together(seen.values()), "weights with masters that are laid out otherwise"):
        return _masters("absent", why)
    constant = sorted(name for name, one in seen.items() if not one.varies)
    unseen = (f"all elements are equal in {counted_names(constant)}, so that no order shows",) if constant else ()
    count = len(seen) - len(constant)
    return _masters("agrees", f"weights of {count} tensors are their masters, stored in another way, rounded", unseen)


def stored_differently(placement: Placement) -> set[str]:
    """Tensors whose weight and master are stored in different ways.

    A mistake in one of the lines shows in the other.
    """
    lying = {state: _lying(placement, state) for state in ("weight", "fp32")}
    both = lying["weight"].keys() & lying["fp32"].keys()
    return {placement.tensors[n] for n in both if lying["weight"][n] != lying["fp32"][n]}


def _lying(placement: Placement, state: str) -> dict[int, list[tuple[bool, tuple[int, ...]]]]:
    """The storage of one state of each tensor, by its number.

    Alone or in a group's flat buffer, and the shapes.
    """
    names = frozenset(placement.tensors)
    found: dict[int, list[tuple[bool, tuple[int, ...]]]] = {}
    for part in placement.parts:
        if part.state == state:
            by_itself = part.label in names or any(block.owned is not None for block in part.homes.blocks)
            for number, home in sorted({*zip(part.pieces.tensor.tolist(), part.pieces.home.tolist(), strict=True)}):
                found.setdefault(number, []).append((by_itself, part.homes[home].shape))
    return {number: sorted(some) for number, some in found.items()}


# ---- a framework's class -----------------------------------------------------------------------------------------------


def transformers_class(
    side: DescribedSide, checkpoint: Checkpoint, *, reference: Path | None = None, forward: Forward | None = None
) -> Evidence:
    """Logits of config.json's class, loaded from the folder and through the spec.

    Through the spec means: read by the side's layout, written as a Hugging Face folder by the shipped spec of the same
    model, else by the layout that `import hf` writes for the folder, if that has the same tensors. For a reference, a
    spec with names of its own writes the folder itself: two layouts with one mistake each would not agree.
    """

    def says(verdict: Says, detail: str) -> Evidence:
        return Evidence("transformers", "logits of the class, loaded as it is and through the spec", verdict, detail)

    folder = reference or (checkpoint.top if format_named(checkpoint.format).has_model_files else None)
    if folder is None:
        return says("absent", "there is no Hugging Face folder of the same weights")
    size = sum(extent.storage_bytes for extent in checkpoint.extents.values())
    if reference is None and size > UNASKED_MAX:
        return says("absent", f"the class would load {size >> 20:,} MiB twice: --reference {folder} asks for it")
    config = config_of(checkpoint) or _config_at(folder)
    if config is None:
        return says("absent", "there is no config.json, so no class is named")
    known_as = _shipped_layout(side.placement) or _written_layout(side, folder, config, asked=reference is not None)
    if known_as is None and reference is not None:
        known_as = _own_layout(side, config)
        if known_as is not None and (checkpoint.top / MANIFEST).is_file():
            return says(
                "absent",
                "ucpl wrote these files by a spec, whose mistakes do not show on the way back: verify files of the framework",
            )
    if known_as is None:
        return says("absent", _unknown(side, folder))
    library, call = known_as
    own = side.library.known.get(side.placement.layout.name)
    if own is not None and own.file.name.startswith("specs/") and reference is None:
        return says("absent", "the layout is itself the shipped one: give a reference folder in another dialect")
    theirs = library.layout(call.name)
    if own is not None and reference is None and theirs.file.name == WRITTEN and own.node == theirs.node:
        return says("absent", "`import hf` writes the same layout: give a reference folder in another dialect")
    if forward is None:
        forward = _forward()
        if forward is None:
            return says("absent", "transformers is not installed")
    target = locate(resolve(library, call, config=config))
    try:
        plan = order(build(side.placement, target, dtype_of=checkpoint.dtype_of))
    except UcplError as error:
        return says("contradicts", f"the folder's tensors cannot be made of it: {error.diagnostics[0].message}")
    with tempfile.TemporaryDirectory(prefix="ucpl-witness-") as place:
        made = Path(place) / "through-the-spec"
        execute(plan, checkpoint, format_of_models().store(), made)
        if not (made / "config.json").exists():
            (made / "config.json").write_text(json.dumps(config))
        try:
            wanted, found = forward(folder), forward(made)
        except Exception as error:  # a class of transformers, or the caller's function: it raises whatever it likes
            return says("absent", f"the class does not run: {type(error).__name__}: {str(error)[:200]}")
    if wanted.shape == found.shape and np.array_equal(wanted, found, equal_nan=True):
        seen = Seen.of(wanted)
        if why := doubt(seen, "logits"):
            return says("absent", why)
        return evolve(
            says("agrees", f"{wanted.size:,} logits are equal, bit for bit"),
            unseen=(
                *((f"{seen.odd:,} of {wanted.size:,} logits are NaN or infinite",) if seen.odd else ()),
                *(forward.silent(folder) if isinstance(forward, HuggingFaceClass) else ()),
            ),
        )
    worst = float(np.nanmax(np.abs(wanted - found))) if wanted.shape == found.shape else float("nan")
    return says("contradicts", f"the logits differ, by up to {worst:.3g}")


def _config_at(folder: Path) -> Config | None:
    """The config of a folder that only its class may read."""
    with reading(folder):
        folder.stat()
    return config_at(folder)


def _shipped_layout(placement: Placement) -> tuple[Library, nodes.Call] | None:
    """The `hf` layout of the shipped spec of the side's model.

    It has the same name, tensors and dims.
    """
    from ucpl.resources import spec_files, spec_text

    mine = placement.layout
    for name, _ in spec_files():
        library = library_of((f"specs/{name}", spec_text(name)))
        known = library.known.get(mine.model_name)
        if known is None or not isinstance(known.node, nodes.Model) or known.file.name != f"specs/{name}":
            continue
        for call in (nodes.Call("hf"), nodes.Call("mixtral")):
            if _has_all(library, call, placement, mine.config):
                return library, call
    return None


def _written_layout(
    side: DescribedSide, folder: Path, config: Config, *, asked: bool
) -> tuple[Library, nodes.Call] | None:
    """The `hf` layout that `import hf` writes for a folder.

    The class is asked only for a user's own text, or if a reference is given: layouts of any model have the names of
    the files, and need no evidence.
    """
    own = side.library.known.get(side.placement.layout.name)
    if not asked and (own is None or own.file.name.startswith("specs/")):
        return None
    from ucpl.inference.hf import import_hf  # loaded where a class is asked, and nowhere else

    try:
        library = library_of((WRITTEN, import_hf(folder)))
    except UcplError:
        return None
    call = nodes.Call("hf")
    return (library, call) if _has_all(library, call, side.placement, config) else None


def _unknown(side: DescribedSide, folder: Path) -> str:
    """The reason why no text has the side's tensors.

    For a spec of the user, with the names to write.
    """
    name, written = side.placement.layout.model_name, side.library.known.get(side.placement.layout.name)
    text = f"no shipped spec has model `{name}` and its tensors, and `import hf` does not write them for {folder}"
    if written is None or written.file.name.startswith("specs/"):
        return text
    return (
        f"{text}. Name tensors and dims as `ucpl import hf {folder}` does, or verify files of ranks that the framework"
        " wrote, with --reference"
    )


def _own_layout(side: DescribedSide, config: Config) -> tuple[Library, nodes.Call] | None:
    """Another layout of the side's model, of a Hugging Face folder.

    It can have names of its own: the two layouts share them.
    """
    mine = side.placement.layout
    for known in tuple(side.library.known.values()):  # reading a base of one adds to them
        node = known.node
        if not isinstance(node, nodes.Layout) or node.of != mine.model_name or node.name == mine.name:
            continue
        call = nodes.Call(node.name)
        if any(p.default is None for p in node.parameters) or not _has_all(side.library, call, side.placement, config):
            continue
        if format_named(resolve(side.library, call, config=config).framework).has_model_files:
            return side.library, call
    return None


def _has_all(library: Library, call: nodes.Call, placement: Placement, config: Config) -> bool:
    """Return True if a layout stores all of the side's model.

    Tensor for tensor.
    """
    mine = placement.layout
    try:
        theirs = resolve(library, call, config=config)
    except UcplError:
        return False
    stored = {path for entry in theirs.entries for path in entry.paths}
    same = {p: t.dims for p, t in theirs.tensors.items()} == {p: t.dims for p, t in mine.tensors.items()}
    return same and stored == set(mine.tensors)


def _forward() -> Forward | None:
    """transformers' own class, in fp32 on the processor; None if not installed."""
    return HuggingFaceClass() if HuggingFaceClass.is_installed() else None

"""infer: the model and the layout of an existing checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.extents.account import entries_of
from ucpl.extents.parallel_facts import Experts
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import config_of
from ucpl.inference.blocks import scalings_of
from ucpl.language import nodes, print_expr, print_file
from ucpl.language.source import why_too_large, why_unwritten
from ucpl.language.words import is_dotted, quote
from ucpl.layout import Layout, Library, expand, load, resolve
from ucpl.layout.folded_names import folded
from ucpl.layout.scope import Value
from ucpl.placement import Placement, locate
from ucpl.placement.flats import Stated
from ucpl.placement.sharding import TP
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.resources import VERSION

if TYPE_CHECKING:
    from ucpl.inference.parallel import Note
    from ucpl.layout.entries import Kin
    from ucpl.placement import Part

StateDtypes = dict[str, dict[str, str]]  # state -> tensor -> dtype

MODEL_NAME = "checkpoint"
LAYOUT_NAME = "stored"


@frozen(eq=False)
class Inferred:
    """A checkpoint's model, and its layout."""

    checkpoint: Checkpoint
    library: Library
    model: nodes.Model
    call: nodes.Call
    inherited: dict[str, tuple[Value, str]]
    layout: Layout
    placement: Placement

    def text(self) -> str:
        """The closed .ucpl text, which needs no other file and converts identically.

        Raises: UcplError E011, E017.
        """
        names = [*(tensor.name for tensor in self.checkpoint.state.tensors), *self.checkpoint.state.aliases]
        if why := why_unwritten(names, in_keys=True):
            self._reject("E017", why)
        text = print_file(nodes.File("inferred.ucpl", VERSION, self._written()))
        if why := why_too_large(text):
            self._reject("E011", why)
        passed = [one for one in self.checkpoint.not_read if one.is_optimizer]
        entries = entries_of(("not read", one.kind, one.name, one.why) for one in passed)
        lines = (" ".join(f"not read: {entry}".splitlines()) for entry in entries)

        notes = "".join(f"\n# {line}" for line in (*packed_notes(self.checkpoint), *lines))
        return text.replace("\n", f"\n{notes}\n" if notes else "\n", 1)

    def _reject(self, code: str, why: str) -> NoReturn:
        remedy = "convert without a text: inferred layouts need none"
        fail(code, f"{why}: no text can say it", Label(str(self.checkpoint.top), "has it"), remedy=remedy)

    def call_text(self) -> str:
        """The call of the text's layout, with its remaining parameters."""
        arguments = ", ".join(f"{p.name} = {print_expr(p.default)}" for p in self._written()[1].parameters if p.default)
        return f"{LAYOUT_NAME}({arguments})"

    def _written(self) -> tuple[nodes.Model, nodes.Layout]:
        """Model and layout, with folded names."""
        layout = expand(self.library, self.call, self.model, name=LAYOUT_NAME, inherited=self.inherited, is_named=False)
        return folded(self.model, layout)


def infer(checkpoint: Checkpoint, *, fold: bool = False, kin: Kin | None = None, with_scales: bool = True) -> Inferred:
    """The model and layout of an opened checkpoint.

    fold: tensors that are stored alike are one in its placement. kin: see `resolve`. with_scales: the placement knows them;
    it needs none where nothing is cut. Raises: UcplError if the language cannot describe its framework.
    """
    library = load()
    settings = inherited_settings(checkpoint)
    call = nodes.Call(layout_name(checkpoint))
    model = model_of(checkpoint, {}, with_scales=with_scales)
    notes: tuple[Note, ...] = ()
    of = format_named(checkpoint.format)
    if (is_described := of.describes(checkpoint)) or is_model_parallel(checkpoint):  # most checkpoints need neither
        from ucpl.inference import parallel, ranks

        base = parallel.Base(library, call, model, settings)
        made = of.stored(base, checkpoint) if is_described else ranks.stored(base, checkpoint)
        library, call, notes = made.library, made.call, made.notes
    layout = resolve(library, call, model=model, inherited=settings, notes=notes, fold=fold, kin=kin)
    placement = locate(layout, stated=stated_of(checkpoint))
    dtypes = state_dtypes(checkpoint, placement)
    if any(dtype != "f32" for of in dtypes.values() for dtype in of.values()):
        model = model_of(checkpoint, dtypes, with_scales=with_scales)
        layout = resolve(library, call, model=model, inherited=settings, notes=notes, fold=fold, kin=kin)
        placement = locate(layout, stated=stated_of(checkpoint))
    if not with_scales and scalings_of(checkpoint):
        if any(degree > 1 for mesh in layout.meshes for degree in mesh.degrees):
            return infer(checkpoint, fold=fold, kin=kin)
        model = model_of(checkpoint, dtypes)
    return Inferred(checkpoint, library, model, call, settings, placement.layout, placement)


def is_model_parallel(checkpoint: Checkpoint) -> bool:
    """Test whether a checkpoint is parallel beyond data parallelism."""
    tp = checkpoint.state.settings.get(TP)
    apart = checkpoint.state.parallel.pipeline is not None or checkpoint.state.parallel.experts is not None
    if apart or (tp is not None and tp.value != 1):
        return True
    return any(
        one.dim is not None and one.rows > one.shape[one.dim] for one in checkpoint.state.parallel.shardings.values()
    )


def layout_name(checkpoint: Checkpoint) -> str:
    """The shipped layout that describes a checkpoint."""
    settings = {name: setting.value for name, setting in checkpoint.state.settings.items()}
    return format_named(checkpoint.format).layout_name(settings)


def inherited_settings(checkpoint: Checkpoint) -> dict[str, tuple[Value, str]]:
    """Values that layouts may take over from a checkpoint, with their origins."""
    out: dict[str, tuple[Value, str]] = {}
    for name, setting in checkpoint.state.settings.items():
        value = setting.value
        if value is not None:
            out[name] = (int(value) if isinstance(value, bool) else value, setting.origin)
    cut = next((one for one in checkpoint.state.parallel.shardings.values() if one.dim is not None), None)
    if cut is not None and "tp_rule" not in out:
        out.setdefault("shaped", (1, f"{cut.origin}: AutoTP's engines cut tensors that have their shape"))
    return out


def model_of(checkpoint: Checkpoint, dtypes: StateDtypes, *, with_scales: bool = True) -> nodes.Model:
    """The model statement: tensors in order, aliases, groups of the optimizer, states."""
    experts = checkpoint.state.parallel.experts
    items: list[nodes.ModelItem] = [*_bindings({t.name: t.shape for t in checkpoint.state.tensors}, experts)]
    shapes = {t.shape for t in checkpoint.state.tensors}
    plain = {shape: tuple(nodes.Dimension(None, n) for n in shape) for shape in shapes}
    scales = scalings_of(checkpoint)
    for t in checkpoint.state.tensors:
        kind = t.kind if t.kind in ("buffer", "frozen") else "parameter"
        dims = _named_dims(t.name, t.shape, experts) or plain[t.shape]
        scaling = scales.get(t.name)
        kind, scaling = "frozen" if scaling else kind, scaling if with_scales else None
        items.append(nodes.Tensor(t.name, dims, t.dtype or None, kind, None, scaling))  # type: ignore[arg-type]
    items += [nodes.Alias(alias, owner) for alias, owner in checkpoint.state.aliases.items()]
    groups = checkpoint.state.groups
    items += [nodes.Group(g.name, members=g.members) for g in groups if g.members]
    trained = [t for t in checkpoint.state.tensors if t.kind == "parameter" and t.name not in scales]
    holders: dict[str, set[str]] = {}
    for t in trained:
        for s in t.states:
            holders.setdefault(s, set()).add(t.name)
    by_holders: dict[tuple[str, tuple[nodes.TypedOf, ...], tuple[str, ...] | None], list[str]] = {}
    for state, names in holders.items():
        limited: tuple[str, ...] | None = None
        if len(names) < len(trained):
            limited = tuple(g.name for g in groups if g.members and set(g.members) <= names)
        by_holders.setdefault((*_typed(dtypes.get(state, {})), limited), []).append(state)
    items += [nodes.State(tuple(s), dtype, False, of, typed) for (dtype, typed, of), s in by_holders.items()]
    scalars = [s for s in checkpoint.state.scalars if s not in holders]
    if scalars:
        items.append(nodes.State(tuple(scalars), "f32", True, None))
    return nodes.Model(MODEL_NAME, tuple(items))


def _typed(dtypes: dict[str, str]) -> tuple[str, tuple[nodes.TypedOf, ...]]:
    """The type that most tensors have, and the others with theirs."""
    counted = Counter(dtypes.values())
    most = max(counted, key=lambda dtype: counted[dtype], default="f32")
    rest: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        if dtype != most:
            rest.setdefault(dtype, []).append(name)
    return most, tuple(nodes.TypedOf(dtype, tuple(names)) for dtype, names in rest.items())


def stated_of(checkpoint: Checkpoint) -> Stated:
    """Flats as the checkpoint states them, for `group g = from FILE "key"`."""

    def stated(file: str, key: str, here: dict[str, int]) -> list[list[tuple[str, tuple[int, ...]]]]:
        flats = [
            f for f in checkpoint.state.parallel.flats if all(here.get(a, v) == v for a, v in f.coordinates.items())
        ]
        last = key.rpartition("/")[2]
        if last.isascii() and last.isdigit() and len(last) <= 9:
            flats = [f for f in flats if f.bucket == int(last)]
        return [list(f.members) for f in sorted(flats, key=lambda f: f.bucket)]

    return stated


def state_dtypes(checkpoint: Checkpoint, placement: Placement) -> StateDtypes:
    """The dtype of each state of each tensor, from the files.

    Raises: UcplError E330 if one tensor's state has two.
    """
    stated = checkpoint.by_texts
    out: StateDtypes = {}
    for part in placement.parts:
        if part.state == "weight":
            continue
        one: dict[int, str] = {}
        for number, home in enumerate(part.homes):
            if (extent := stated.get((home.file, tuple(map(str, home.key))))) is not None:
                one[number] = extent.dtype
        for tensor, number in _holders(part, one):
            home, dtype = part.homes[number], one[number]
            by_tensor, name = out.setdefault(part.state, {}), placement.tensors[tensor]
            if by_tensor.setdefault(name, dtype) != dtype:
                fail(
                    "E330",
                    f"{part.state} of `{name}` is stored as {by_tensor[name]} and as {dtype}",
                    Label(home.file, dtype, where=key_text(home.key)),
                )
    return out


def _holders(part: Part, dtypes: dict[int, str]) -> Iterable[tuple[int, int]]:
    """(tensor, stored tensor) of a part.

    If all stored tensors have one dtype, there is one of these per tensor.
    """
    if len(set(dtypes.values())) == 1:
        first = next(iter(dtypes))
        return [(tensor, first) for tensor in part.tensors]
    pairs = {*zip(part.pieces.tensor.tolist(), part.pieces.home.tolist(), strict=True)}
    return sorted(pair for pair in pairs if pair[1] in dtypes)


def _named_dims(name: str, shape: tuple[int, ...], experts: Experts | None) -> tuple[nodes.Dimension, ...]:
    """The dims of AutoEP's experts, which have names; none for other tensors."""
    if experts is None or name not in experts.of or not experts.of[name].is_fused:
        return ()
    return tuple(nodes.Dimension(one) for one in _dim_names(shape))


def _bindings(shapes: dict[str, tuple[int, ...]], experts: Experts | None) -> tuple[nodes.Dims, ...]:
    """The sizes of these names."""
    found = {
        one: n
        for name, shape in shapes.items()
        if experts is not None and name in experts.of and experts.of[name].is_fused
        for one, n in zip(_dim_names(shape), shape, strict=True)
    }
    return (nodes.Dims(tuple(nodes.Binding(name, nodes.Number(n)) for name, n in found.items())),) if found else ()


def _dim_names(shape: tuple[int, ...]) -> list[str]:
    return [f"expert_{'rows' if i == 0 else f'columns_{i}' if i > 1 else 'columns'}_{n}" for i, n in enumerate(shape)]


# ---- packed weights --------------------------------------------------------------------------------------------------


_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = 16  # bytes of a block of 32 elements
_WORDS = {"gptq": ("qweight", "qzeros", "g_idx"), "awq": ("qweight", "qzeros")}


def packed_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Lines of remarks, without their sign; none of most checkpoints."""
    return (*_of_mxfp4(checkpoint), *_of_integers(checkpoint))


def _of_mxfp4(checkpoint: Checkpoint) -> Iterator[str]:
    """Pairs of u8 tensors, [..., g, 16] and [..., g], as numbers.

    The lines are of the first pair.
    """
    tensors = {t.name: t for t in checkpoint.state.tensors}
    pairs = []
    for name, blocks in tensors.items():
        scales = tensors.get(name.removesuffix(_BLOCKS) + _SCALES) if name.endswith(_BLOCKS) else None
        if scales is not None and blocks.dtype == scales.dtype == "u8" and blocks.shape == (*scales.shape, _HALF):
            pairs.append((name.removesuffix(_BLOCKS), scales.shape))
    if not pairs:
        return
    path, shape = pairs[0]
    count = "One pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
    dims = [f"d{i}" for i in range(len(shape) - 1)]
    sizes = ", ".join(f"{d} = {n}" for d, n in zip(dims, shape, strict=False))
    rows = " ".join(dims)
    name, scale = _path(path), _path(path + _SCALES)
    yield f"{count} of *{_BLOCKS} and *{_SCALES}: mxfp4, two elements in a byte and a scale for 32. Here they are bytes, which"
    yield 'move as they stand. Lines that cut them or make numbers of them ("Two elements in a byte"), of the first:'
    yield f"  dim {sizes}{', ' * bool(dims)}h = {32 * shape[-1]}, g = {shape[-1]}, k = 32"
    yield "  index h = (g k)"
    yield f"  {name} : {rows} h  dtype f4_e2m1fn"
    yield f"  {scale} : {rows} g  dtype f8_e8m0fnu is scale({name}, 32)"
    yield "and in the layout:"
    yield f"  {name} = {rows} g k  dtype u8 as {quote(path + _BLOCKS)}"
    yield f"  {scale} = {rows} g  dtype u8 as {quote(path + _SCALES)}"


def _of_integers(checkpoint: Checkpoint) -> Iterator[str]:
    """GPTQ and AWQ: integers of a few bits in 32-bit words."""
    config = config_of(checkpoint)
    said = config.get("quantization_config") if config is not None else None
    method = said.get("quant_method") if isinstance(said, dict) else None
    words = _WORDS.get(method, ()) if isinstance(method, str) else ()
    found = [t.name for t in checkpoint.state.tensors if t.name.rpartition(".")[2] in words]
    if not found or not isinstance(said, dict):
        return
    bits = said.get("bits") if isinstance(said.get("bits"), int) else "a few"
    ends = ", ".join(f"*.{w}" for w in words)
    yield f"{len(found)} tensors of {method}, {ends}: integers of {bits} bits, several in a word of 32, for which the language"
    yield "has no type. They are words here: they move as they stand, or cut along dims that are not packed; no numbers"
    yield "are made of them."


def _path(name: str) -> str:
    return name if is_dotted(name) else quote(name)

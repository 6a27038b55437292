"""A model with Megatron-Core's names as a legacy folder at any degrees.

This covers cuts, stages, experts, and gradient buffers. It does not use the source's places, so any source with tensors
of these names is possible. Layers are dealt to stages in equal runs, as Megatron deals them; as `stages` says
(num_layers_in_first_pipeline_stage and the like); or as a folder of as many stages has them. The optimizer is the
distributed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Sharding
from ucpl.formats.dcp.layouts import without_dims
from ucpl.formats.megatron import legacy_names as names
from ucpl.formats.megatron.homes import BufferRun, Legacy, LegacyHome, legacy_of
from ucpl.formats.megatron.legacy_buffers import ALIGNED
from ucpl.formats.megatron.legacy_layouts import lines
from ucpl.formats.megatron.orders import by_modules
from ucpl.inference.parallel import TARGET, Base, Extended, Note, extended, origins
from ucpl.inference.stages import STAGES, arguments, with_argument
from ucpl.language import nodes
from ucpl.language.printer import print_expr
from ucpl.layout import Layout, resolve
from ucpl.layout.scope import Scope
from ucpl.records import define, frozen

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

MASTER = "fp32"
_STATES = frozenset({MASTER, "exp_avg", "exp_avg_sq"})
_GRADIENTS = {"bf16": "f32", "f32": "f32", "f16": "f16"}  # Megatron-LM's default dtypes of accumulation


def target(base: Base, source: Checkpoint | None) -> Extended:
    """The layout of a target.

    Raises: UcplError E542, E543, E547 if the model cannot be split over so many ranks.
    """
    made = DealtModel.of(base, source)
    base = made.base
    legacy = made.legacy()
    shardings = {name: made.dialect.sharding(name, legacy.tp) for name in made.shapes} if legacy.tp > 1 else {}
    made.shardings = shardings
    legacy = evolve(legacy, runs=tuple(made.runs(legacy)))
    items = lines(legacy, shardings, made.states)
    notes: list[Note] = [*origins(shardings)]
    notes += made.notes()
    if legacy.runs:
        notes.append(("optimizer", "distributed, a bucket for each buffer", "as without --overlap-grad-reduce"))
    aliases = [i for i in base.model.items if isinstance(i, nodes.Alias) and i.path != names.OUTPUT]
    if aliases:
        refuse(f"`{aliases[0].path}` is a second name of `{aliases[0].owner}`, which Megatron has for no tensor", base)
    return evolve(extended(base, TARGET, (), items), notes=tuple(notes))


def with_whole(base: Base) -> Extended:
    """The shipped layout with a line for each tensor without dims."""
    entries = [
        nodes.Entry(name, (), (nodes.Rest(),), (nodes.Clause("as", ("{name}",)),), None)
        for name in sorted(without_dims(base.model, buffers=True))
    ]
    return extended(base, TARGET, (), entries) if entries else Extended(base.library, base.call)


def refuse(message: str, base: Base, remedy: str = "") -> NoReturn:
    fail("E547", message, Label("<call>", where=base.call.name), remedy=remedy)


@frozen
class Buffer:
    """A gradient buffer of one rank.

    number: among those of its optimizer there; members: in order of registration.
    """

    stage: int
    chunk: int  # the virtual stage
    is_expert: bool
    number: int
    dtypes: str  # "(torch.bfloat16, torch.float32)"
    members: tuple[str, ...]


@define(eq=False)
class DealtModel:
    """The place of each tensor of a model at a call's degrees."""

    base: Base
    layout: Layout  # the shipped one over the model: for shapes and dtypes
    shapes: dict[str, tuple[int, ...]]
    dialect: names.NameRules
    states: set[str]
    trained: set[str]
    is_tied: bool
    degrees: dict[str, int]
    sizes: tuple[
        int, ...
    ] = ()  # layers of each virtual stage, in their order: those of all stages, then the second ones
    sizes_from: str = "Megatron's equal runs"
    chunk: dict[str, int] = field(factory=dict)
    shardings: dict[str, Sharding] = field(factory=dict)
    experts: dict[str, int] = field(factory=dict)  # of each layer that has some, by prefix

    @classmethod
    def of(cls, base: Base, source: Checkpoint | None) -> DealtModel:
        """The places of all tensors.

        Raises: UcplError E542, E543, E547 if the model cannot be split over so many ranks.
        """
        base, said = with_stages(base)
        degrees = {axis: base.asked(axis) for axis in ("tp", "pp", "ep", "vpp")}
        for axis, n in degrees.items():
            if n < 1:
                refuse(f"{axis} = {n}: a degree is 1 or more", base)
        whole = with_whole(base)
        layout = resolve(whole.library, whole.call, model=base.model, config=base.config, inherited=base.inherited)
        shapes = {path: t.counts for path, t in layout.tensors.items()}
        # Legacy files have the order in which modules register parameters.
        if legacy_of(source) is None:
            shapes = {name: shapes[name] for name in by_modules(tuple(shapes))}
        numbers = {} if source is None else numbers_of(source)
        states = states_of(base)
        if states - _STATES:
            more = ", ".join(sorted(states - _STATES))
            refuse(
                f"Megatron's distributed optimizer has fp32, exp_avg and exp_avg_sq, and the source has {more}",
                base,
                f"--drop {more}",
            )
        check_moments(base, states)
        other = next((name for name in shapes if names.is_of_chunks(name)), None)
        if other is not None:
            refuse(
                f"`{other}` is a name of torch_dist, with all layers in one tensor or with half of a linear_fc1, and a folder"
                " of ranks has none such",
                base,
                "convert to megatron_core(), which keeps these names, and that folder to this target",
            )
        aliases = {i.path for i in base.model.items if isinstance(i, nodes.Alias)}
        is_tied = names.EMBEDDING in shapes and names.OUTPUT not in shapes
        if names.OUTPUT not in aliases and numbers.get("untie_embeddings_and_output_weights"):
            is_tied = False
        blocks = "" if source is None else blocks_of(source)
        dialect = names.NameRules(shapes, 1, numbers, "<call>", blocks)
        trained = {path for path, t in layout.tensors.items() if t.kind == "parameter" and not names.is_buffer(path)}
        made = cls(base, layout, shapes, dialect, states, trained, is_tied, degrees)
        made.demand(numbers)
        made.deal(said, source)
        return made

    def demand(self, numbers: dict[str, int]) -> None:
        """Raises: UcplError E547."""
        tp, ep = self.degrees["tp"], self.degrees["ep"]
        for word in ("num_query_groups", "num_attention_heads"):
            heads = numbers.get(word)
            if heads and heads % tp:
                refuse(f"{word} = {heads} do not divide by tp = {tp}", self.base)
        prefixes = {found[0] for name in self.shapes if (found := names.layer_of(name)) is not None}
        if len(prefixes) > 1 and self.stages > 1:
            refuse(
                f"{' and '.join(sorted(prefixes))} are two stacks of layers, and stages of both are not dealt",
                self.base,
            )
        if self.is_ahead and self.is_tied and self.degrees["pp"] > 1:
            refuse(
                "Megatron-Core does not save a tied head with layers of multi-token prediction on several stages",
                self.base,
                "pp = 1",
            )
        if self.degrees["vpp"] > 1 and self.degrees["pp"] == 1:
            refuse(f"vpp = {self.degrees['vpp']} on one stage", self.base, "virtual stages need pp = 2 or more")
        found_experts: dict[str, int] = {}
        for prefix, number in filter(None, map(names.expert_of, self.shapes)):
            found_experts[prefix] = max(found_experts.get(prefix, 0), number + 1)
        if ep > 1 and not found_experts:
            refuse(f"ep = {ep}, and the model has no experts", self.base, "ep = 1")
        for prefix, n in found_experts.items():
            if n % ep:
                refuse(f"{n} experts of {prefix} do not divide by ep = {ep}", self.base)
        self.experts = found_experts
        for name in self.shapes:
            if ep > 1 and names.is_expert(name) and names.expert_of(name) is None:
                refuse(
                    f"`{name}` has several experts in one tensor, and no part of it is one rank's", self.base, "ep = 1"
                )

    @property
    def stages(self) -> int:
        return self.degrees["pp"] * self.degrees["vpp"]

    def deal(self, said: tuple[int, ...] | None, source: Checkpoint | None) -> None:
        """Layers to virtual stages. Raises: UcplError E547."""
        count = max((found[1] + 1 for name in self.shapes if (found := names.layer_of(name)) is not None), default=0)
        of = f"pp = {self.degrees['pp']}" + (f" by vpp = {self.degrees['vpp']}" if self.degrees["vpp"] > 1 else "")
        if said is not None:
            self.sizes, self.sizes_from = said, "given"
            if len(said) != self.stages or sum(said) != count:
                refuse(
                    f"stages = {list(said)} are {len(said)} stages with {sum(said)} layers, and the model has {count} on {of}",
                    self.base,
                    "a number of layers for each virtual stage: those of all stages, then the second ones",
                )
            return
        legacy = legacy_of(source)
        if legacy is not None and (legacy.pp, legacy.vpp) == (self.degrees["pp"], self.degrees["vpp"]):
            self.sizes, self.sizes_from = sizes_in(legacy), "as the source's"
            if sum(self.sizes) == count and len(set(self.sizes)) > 1:
                return
        if count % self.stages or (self.stages > 1 and not count):
            refuse(
                f"{count} layers do not divide by {of}",
                self.base,
                "stages = [...] says how many each has (as num_layers_in_first_pipeline_stage)" if count else "pp = 1",
            )
        self.sizes, self.sizes_from = (count // self.stages,) * self.stages, "Megatron's equal runs"

    def notes(self) -> Iterator[Note]:
        if self.stages > 1:
            is_even = len(set(self.sizes)) == 1
            text = f"{self.sizes[0]} in each of {self.stages}" if is_even else str(list(self.sizes))
            yield "layers of stages", text, self.sizes_from

    def place_of(self, layer: int) -> tuple[int, int, int]:
        """(virtual stage, stage, number there) of a layer."""
        for place, size in enumerate(self.sizes):
            if layer < size:
                return place // self.degrees["pp"], place % self.degrees["pp"], layer
            layer -= size
        raise AssertionError("layers are as many as stages have")

    def legacy(self) -> Legacy:
        """Homes of all tensors."""
        d = self.degrees
        homes: dict[str, tuple[LegacyHome, ...]] = {}
        has_layers = False
        for name in self.shapes:
            local, ep = name, None
            chunk, stage = (d["vpp"] - 1, d["pp"] - 1) if has_layers else (0, 0)
            if (layer := names.layer_of(name)) is not None:
                has_layers = True
                chunk, stage, number = self.place_of(layer[1])
                local = names.with_layer(local, number)
            elif name.startswith("embedding."):
                chunk, stage = 0, 0
            elif name.startswith(("output_layer.", "decoder.final")):
                chunk, stage = d["vpp"] - 1, d["pp"] - 1
            if d["ep"] > 1 and (expert := names.expert_of(name)) is not None:
                own = self.experts[expert[0]] // d["ep"]
                ep = expert[1] // own
                local = names.with_expert(local, expert[1] % own)
            self.chunk[name] = chunk
            homes[name] = (LegacyHome(stage, (self.model(chunk), local), ep),)
        if d["pp"] > 1 and names.EMBEDDING in homes and (self.is_ahead or self.is_tied):
            # Multi-token prediction has an embedding in its own module, which is also the head if that is tied.
            local = names.EMBEDDING if self.is_ahead else names.OUTPUT
            homes[names.EMBEDDING] += (LegacyHome(d["pp"] - 1, (self.model(d["vpp"] - 1), local)),)
        chained = d["ep"] > 1
        return Legacy(d["tp"], d["pp"], d["ep"], d["vpp"], "distributed", homes, chained=chained)

    @property
    def is_ahead(self) -> bool:
        """True if the model has layers of multi-token prediction."""
        return any(map(names.is_ahead, self.shapes))

    def model(self, chunk: int) -> str:
        return f"model{chunk}" if self.degrees["vpp"] > 1 else "model"

    def runs(self, legacy: Legacy) -> list[BufferRun]:
        """The gradient buffers of every stage.

        By virtual stage, then dtype, with the parameters in reverse. Raises: UcplError E547 if the embedding that
        stages share moves the parameters behind it off a multiple of 64.
        """
        out = []
        for one in self.buffers(legacy):
            self.check_aligned(one.members)
            top = f"{int(one.is_expert)}/" if legacy.chained else ""
            out.append(BufferRun(one.stage, (f"{top}{one.number}/{one.dtypes}",), one.members[::-1], one.is_expert))
        return out

    def buffers(self, legacy: Legacy) -> Iterator[Buffer]:
        """The buffers of every stage, by optimizer, virtual stage and dtype.

        There are none if the optimizer has no states. Raises: UcplError E547 if experts have an optimizer of their own,
        and a stage has no experts.
        """
        self.demand_experts(legacy)
        for stage in range(legacy.pp if self.states else 0):
            for is_expert in (False, True) if legacy.chained else (False,):
                number = 0
                for chunk in range(legacy.vpp):
                    by_dtype: dict[str, list[str]] = {}
                    for name in self.registered(legacy, stage, chunk):
                        if not legacy.chained or names.is_expert(name) == is_expert:
                            by_dtype.setdefault(self.dtype(name), []).append(name)
                    for dtype, members in by_dtype.items():
                        text = f"(torch.{DTYPES[dtype].torch}, torch.{DTYPES[_GRADIENTS[dtype]].torch})"
                        yield Buffer(stage, chunk, is_expert, number, text, tuple(members))
                        number += 1

    def demand_experts(self, legacy: Legacy) -> None:
        having = {home.stage for name, homes in legacy.homes.items() if names.is_expert(name) for home in homes}
        for stage in range(legacy.pp if legacy.chained and self.states else 0):
            if stage not in having:
                refuse(
                    f"stage {stage} has no experts at ep = {legacy.ep}: Megatron has an optimizer of nothing there, which"
                    " is not written",
                    self.base,
                    "a pp at which each stage has some, or ep = 1",
                )

    def registered(self, legacy: Legacy, stage: int, chunk: int) -> list[str]:
        """The trained parameters of a virtual stage, in order of registration.

        A tied output layer is the last.
        """
        out, late = [], []
        for name, homes in legacy.homes.items():
            if name not in self.trained:
                continue
            here = [home for home in homes if home.stage == stage and home.key[0] == self.model(chunk)]
            if here and here[0].key[1] == names.OUTPUT and name != names.OUTPUT:
                late.append(name)
            elif here:
                out.append(name)
        return [*out, *late]

    def dtype(self, name: str) -> str:
        dtype = self.layout.tensors[name].dtype
        if dtype is None:
            flags = {"bf16": "bf16", "fp16": "f16"}
            dtype = next((d for flag, d in flags.items() if self.base.inherited.get(flag, (0, ""))[0]), "f32")
        if dtype not in _GRADIENTS:
            refuse(f"`{name}` is {dtype}, and Megatron's distributed optimizer has no buffer of that dtype", self.base)
        return dtype

    def check_aligned(self, members: tuple[str, ...]) -> None:
        """Check the alignment behind a parameter that stages share.

        The next bucket begins at its end, which must be a multiple of 64.
        """
        last = members[-1]
        if last != names.EMBEDDING or len(members) == 1:
            return
        numel = self.numel(last)
        if numel % ALIGNED:
            refuse(
                f"the embedding that stages share has {numel} elements on a rank, no multiple of {ALIGNED}: Megatron begins a"
                " bucket behind it, which is not written",
                self.base,
                "pp = 1, or weights alone (--drop exp_avg, exp_avg_sq)",
            )

    def numel(self, name: str) -> int:
        """Elements of a tensor on one tensor-parallel rank."""
        sharding = self.shardings.get(name)
        return prod(self.shapes[name] if sharding is None else sharding.local(0))


def with_stages(base: Base) -> tuple[Base, tuple[int, ...] | None]:
    """The base without its layers per stage, and these layers.

    Raises: UcplError E547.
    """
    plain, given = arguments(base, (STAGES,))
    if STAGES not in given:
        return base, None
    held = Scope().evaluate(given[STAGES])
    said = tuple(n for n in held if type(n) is int and n >= 0) if isinstance(held, list | tuple) else ()
    if not said or not isinstance(held, list | tuple) or len(said) != len(held):
        refuse(f"stages = {held}: how many layers each has, as in stages = [3, 4]", base)
    if not any(a.name == "pp" for a in plain.call.arguments):
        plain = with_argument(plain, "pp", len(said) // plain.asked("vpp"))
    return plain, said


def sizes_in(legacy: Legacy) -> tuple[int, ...]:
    """The number of layers on each virtual stage.

    First ones, then second ones.
    """
    chunks = {f"model{c}" if legacy.vpp > 1 else "model": c for c in range(legacy.vpp)}
    held: dict[tuple[int, int], set[int]] = {}
    for name, homes in legacy.homes.items():
        if (layer := names.layer_of(name)) is not None:
            for home in homes:
                held.setdefault((chunks.get(home.key[0], 0), home.stage), set()).add(layer[1])
    return tuple(len(held.get((c, stage), ())) for c in range(legacy.vpp) for stage in range(legacy.pp))


def check_moments(base: Base, states: set[str]) -> None:
    """Check that a distributed optimizer has all of its states or none.

    Missing masters are made of the weights. Raises: UcplError E547.
    """
    lacking = sorted(_STATES - states - {MASTER})
    if states and lacking:
        refuse(
            f"the target has {', '.join(sorted(states))} without {' and '.join(lacking)}, and Megatron's distributed optimizer"
            " loads all of these or none",
            base,
            f"--weights-alone{_without_form(base)}; or begin with zeros, by {' '.join(f'--fill {name}=0' for name in lacking)}:"
            " where --drop left them out, of a megatron_core() folder that the same --drop made",
        )


def _without_form(base: Base) -> str:
    """The part of a remedy for a call that asks for buckets."""
    asked = next((a for a in base.call.arguments if a.name == "optimizer"), None)
    return f" and no `optimizer = {print_expr(asked.value)}`" if asked is not None else ""


def states_of(base: Base) -> set[str]:
    """States of a target.

    Of its model, and those with a `fill` line.
    """
    filled = {name for i in base.layout.items if isinstance(i, nodes.FillStates) for name in i.names or ()}
    held = {name for i in base.model.items if isinstance(i, nodes.State) and not i.scalar for name in i.names}
    return held | (filled & _STATES)


def blocks_of(source: Checkpoint) -> str:
    """The owner of a run's blocks: "local" means Megatron-Core's own."""
    from ucpl.formats.megatron.legacy_arguments import arguments_in

    return str(arguments_in(source).get("transformer_impl") or "")


def numbers_of(source: Checkpoint) -> dict[str, int]:
    """Integers among the run's arguments, if the source carries them."""
    from ucpl.formats.megatron.legacy_arguments import arguments_in

    return {str(k): int(v) for k, v in arguments_in(source).items() if isinstance(v, int) and abs(v) < 1 << 62}

"""Facts from Megatron-Core's names: layers, experts, and cuts over tp.

The files do not have the cuts, but a parameter's name is that of the parallel layer that holds it. Column-parallel
layers cut their rows, row-parallel ones their columns; a gated linear_fc1 is a gate and an up projection, each cut
separately. Shapes are compared with this. Tensors of other names are rejected, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.records import frozen

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "NameRules",
    "expert_of",
    "is_ahead",
    "is_buffer",
    "is_expert",
    "is_of_chunks",
    "layer_of",
    "with_expert",
    "with_layer",
]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
NAMES = "Megatron-Core's names of tensors"
Shape = tuple[int, ...]

_LAYER = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers\.)(\d{1,9})(\..*)", re.ASCII)
_EXPERT = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)(?=\d+$)))(\d{1,9})(\..*|)", re.ASCII
)
_COPY = re.compile(
    r"(?:.*\.)?(?:\w*layer_?norm\w*\.(?:weight|bias)|layer_norm_(?:weight|bias)|\w*_norm\.(?:weight|bias)"
    r"|router\.(?:weight|bias|expert_bias|local_tokens_per_expert)|(?:position|tokentype)_embeddings\.weight"
    r"|(?:enorm|hnorm)\.(?:weight|bias)|gate_weight|(?:linear_proj|linear_fc2)\.bias\d*)",
    re.ASCII,
)
_CHUNKS = re.compile(
    r"(?:.*\.)?(?:(?:decoder|encoder)\.layers\.(?!\d).*|experts\.experts\..*|linear_fc1\.\w+_[wv])", re.ASCII
)
_LINEAR = r"linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj"
_ROWS = re.compile(
    rf"(?:.*\.)?(?:(?:{_LINEAR})\.(?:weight|bias)|word_embeddings\.weight|output_layer\.(?:weight|bias)|eh_proj\.weight"
    r"|core_attention\.softmax_offset)",
    re.ASCII,
)
_FC1 = re.compile(r"((?:.*\.)?)linear_fc1\.(weight|bias)(\d*)", re.ASCII)
_COLUMNS = re.compile(r"(?:.*\.)?(?:linear_proj|linear_fc2)\.weight\d*", re.ASCII)
_DOWN = re.compile(r"(?:.*\.)?linear_(q|kv)_down_proj\.weight", re.ASCII)
_BUFFER = re.compile(r"(?:.*\.)?(?:expert_bias|local_tokens_per_expert|inv_freq|rope_freqs)", re.ASCII)


def layer_of(name: str) -> tuple[str, int] | None:
    """(prefix of its layers, number) of a tensor in a layer.

    ("decoder.layers.", 3).
    """
    found = _LAYER.fullmatch(name)
    return (found[1], int(found[2])) if found is not None else None


def with_layer(name: str, number: int) -> str:
    """The tensor of the same name in another layer."""
    return _LAYER.sub(rf"\g<1>{number}\g<3>", name)


def is_of_chunks(name: str) -> bool:
    """Test for torch_dist's form: all layers, all experts, or half a linear_fc1."""
    return _CHUNKS.fullmatch(name) is not None


def is_expert(name: str) -> bool:
    """Test for routed experts; shared experts are on every rank."""
    return ".experts." in name


def expert_of(name: str) -> tuple[str, int] | None:
    """(prefix of its layer's experts, number) of a tensor of one expert."""
    found = _EXPERT.fullmatch(name)
    return (found[1].partition(".experts.")[0], int(found[2])) if found is not None else None


def with_expert(name: str, number: int) -> str:
    return _EXPERT.sub(rf"\g<1>{number}\g<3>", name)


def is_ahead(name: str) -> bool:
    """Test for layers of multi-token prediction.

    They are on the last stage, with an embedding there.
    """
    return name.startswith("mtp.")


def is_buffer(name: str) -> bool:
    """Test whether a tensor of a module is no parameter."""
    return _BUFFER.fullmatch(name) is not None


@frozen(eq=False)
class NameRules:
    """The cuts of tensors, from their names and one rank's shapes.

    local: shapes on the first tensor-parallel rank. degree: the number of ranks of these shapes. numbers: sizes in the
    run's arguments. place: of the arguments, for messages. blocks: `transformer_impl` of the run's arguments, or "".
    """

    local: Mapping[str, Shape]
    degree: int
    numbers: Mapping[str, int]
    place: str
    blocks: str = ""

    def gated(self, name: str) -> bool:
        """Test whether a linear_fc1 is a gate and an up projection.

        It then has twice as many rows as linear_fc2 has columns. Raises: UcplError E543.
        """
        found = _FC1.fullmatch(name)
        assert found is not None
        other = f"{found[1]}linear_fc2.weight{found[3]}"
        mine, theirs = self.local[name], self.local.get(other)
        if theirs is None or len(theirs) != 2:
            fail(
                "E543",
                f"`{name}` may be a gate and an up projection, and there is no {other} that shows it",
                Label(self.place, where=name),
            )
        if not mine or mine[0] not in (theirs[1], 2 * theirs[1]):
            fail(
                "E543",
                f"`{name}` has {mine[0] if mine else 'no'} rows on a rank and {other} {theirs[1]} columns:"
                " neither as many nor half of them",
                Label(self.place, f"{list(mine)} and {list(theirs)}", where=name),
            )
        return mine[0] == 2 * theirs[1]

    def sharding(self, name: str, degree: int | None = None) -> Sharding:
        """The cut of a tensor over `degree` or the files' ranks.

        Raises: UcplError E542, E543, E547.
        """
        mine = self.local[name]
        ways = self.degree if degree is None else degree
        dim = self.dim(name, max(ways, self.degree))
        whole = mine if dim is None else (*mine[:dim], mine[dim] * self.degree, *mine[dim + 1 :])
        if dim is None or ways == 1:
            return Sharding(whole, origin=NAMES)
        parts = 2 if _FC1.fullmatch(name) is not None and self.gated(name) else 1
        size = whole[dim] // parts
        if size % ways:
            fail(
                "E547",
                f"{size} positions of dim {dim} of `{name}` do not divide by tp = {ways}",
                Label(self.place, f"{list(whole)} over all ranks", where=name),
            )
        section = Section(size, (size // ways,) * ways)
        return Sharding(whole, dim, (section,) * parts, origin=NAMES)

    def dim(self, name: str, ways: int) -> int | None:
        """The dim that is cut; None: every rank has a copy.

        Raises: UcplError E542.
        """
        mine = self.local[name]
        if _COPY.fullmatch(name) is not None or is_buffer(name):
            return None
        if _ROWS.fullmatch(name) is not None and mine:
            return 0
        if _FC1.fullmatch(name) is not None and mine:
            return 0
        if _COLUMNS.fullmatch(name) is not None and len(mine) == 2:
            return 1
        if (down := _DOWN.fullmatch(name)) is not None and len(mine) == 2:
            return self._of_down(down[1], name, mine, ways)
        if ways == 1:
            return None
        fail(
            "E542",
            f"the cut of `{name}`, {list(mine)} on a rank, over {ways} tensor-parallel ranks is unknown: no layer of"
            " Megatron-Core's has a tensor of that name",
            Label(self.place, where=name),
        )

    def _of_down(self, which: str, name: str, mine: Shape, ways: int) -> int | None:
        """The cut dim of a down projection of latent attention.

        Megatron-Core's own blocks cut it by rows, and Transformer Engine's have a copy on every rank.
        """
        rank = self.numbers.get(f"{which}_lora_rank", 0)
        rows = rank + (self.numbers.get("qk_pos_emb_head_dim", 0) if which == "kv" else 0)
        is_own = self._is_own(name)
        if self.degree > 1 and rank:  # then shapes decide
            is_own = {rows: False, rows / self.degree: True}.get(mine[0])
        if ways == 1 or is_own is not None:
            return 0 if is_own else None
        fail(
            "E542",
            f"`{name}`, {list(mine)} on a rank, may be a full copy on each of {ways} tensor-parallel ranks, as in"
            " blocks of Transformer Engine's, or cut by rows, as in Megatron-Core's own (transformer_impl of `args`)",
            Label(self.place, where=name),
        )

    def _is_own(self, name: str) -> bool | None:
        """Test for Megatron-Core's own latent attention; None: unknown.

        It has norms of queries and keys as modules.
        """
        head = name.rpartition("linear_")[0]
        if any(f"{head}{norm}_layernorm.weight" in self.local for norm in ("q", "kv")):
            return True
        if any(f"{head}linear_{norm}_up_proj.layer_norm_weight" in self.local for norm in ("q", "kv")):
            return False
        return {"local": True, "transformer_engine": False}.get(self.blocks)


def numbered(names: Sequence[str]) -> dict[str, int]:
    """The number of layers or experts, by prefix of names."""
    out: dict[str, int] = {}
    for name in names:
        for found in (layer_of(name), expert_of(name)):
            if found is not None:
                out[found[0]] = max(out.get(found[0], 0), found[1] + 1)
    return out

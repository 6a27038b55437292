"""A model that cuts itself over tp, as pipeline or module.

Both have the same names. Every parameter has its cut (`cut`: the dim and the number of sections in it). `fill` draws
full tensors by their names and takes this rank's part: a run at any degrees starts from one and the same model.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import nn
from torch.nn import functional as F

# Groups divide by 2, 3 and 4; words and inner columns by 3 do not, so that three ranks have unequal parts of them.
WORDS, HEAD, QUERIES, GROUPS, INNER, EXPERTS = 28, 1, 2, 12, 20, 4
WIDTH = GROUPS * QUERIES * HEAD
BATCH, PLACES = 8, 8
BLOCKS = (
    True,
    False,
    True,
)  # which of them have experts, in a model with experts: one on each stage, or DeepSpeed waits
LAYERS = len(BLOCKS) + 3
EXPERT = re.compile(r"(?P<module>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d+)(?P<inner>\..*)")

# A training script's lists for DeepSpeed's universal checkpoints: rows are cut by default.
LISTS = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": WORDS,
    "vocabulary_parameter_patterns": [r"tied_modules\.embed\.word\.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\..*"],
    "tp_replicated_parameter_patterns": [r".*\.scale", r".*\.out\.bias", r".*\.gate\.wg\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*\.out\.weight", r".*\.shrink\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.grow\.weight"],
}


@frozen(eq=False)
class Ways:
    """The tensor-parallel ranks of a layer, and ranks of a sequence (Ulysses)."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None)
    rows: int = WORDS  # of the vocabulary, with its padding
    line: Any = field(default=None)

    def share(self, n: int, rank: int | None = None) -> int:
        """Of n positions, those of a rank, as torch.chunk deals them."""
        each = -(-n // self.size)
        rank = self.rank if rank is None else rank
        return max(0, min(n, each * (rank + 1)) - each * rank)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        out = x.contiguous().clone()
        if self.size > 1:
            dist.all_reduce(out, group=self.group)
        return out

    def listed(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [x.contiguous()]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts


class _Enter(torch.autograd.Function):
    """Values of all ranks become parts: their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: Ways) -> torch.Tensor:
        ctx.ways = ways
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.ways.summed(grads[0]), None


class _Leave(torch.autograd.Function):
    """Parts of a sum come together: each has the gradient of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: Ways) -> torch.Tensor:
        return ways.summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Align(torch.autograd.Function):
    """Parts of the last dim come together."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: Ways) -> torch.Tensor:
        ctx.ways = ways
        each = ways.share(ways.rows, 0)  # parts are unequal, but messages are equal
        parts = ways.listed(F.pad(x, (0, each - x.shape[-1])))
        return torch.cat([part[..., : ways.share(ways.rows, rank)] for rank, part in enumerate(parts)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.ways.size, -1)[ctx.ways.rank].contiguous(), None


def parameter(ways: Ways, *shape: int, cut: int | None = None, sections: int = 1) -> nn.Parameter:
    """This rank's part of a tensor of `shape`; filled later."""
    local = [sections * ways.share(n // sections) if d == cut else n for d, n in enumerate(shape)]
    made = nn.Parameter(torch.zeros(local))
    if cut is not None:
        made.cut, made.whole = (cut, sections), shape  # type: ignore[attr-defined]
        made.tensor_model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's norm of gradients counts each part
    return made


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.float().square().mean(-1, keepdim=True).add(1e-4).sqrt().to(x.dtype) * self.scale


class Wide(nn.Module):
    """Rows are cut: each rank computes some of the outputs."""

    def __init__(self, ways: Ways, rows: int, bias: bool, sections: int = 1) -> None:
        super().__init__()
        self.ways = ways
        self.weight = parameter(ways, rows, WIDTH, cut=0, sections=sections)
        self.bias = parameter(ways, rows, cut=0) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_Enter.apply(x, self.ways), self.weight, self.bias)


class Narrow(nn.Module):
    """Columns are cut: each rank has a part of the sum.

    The bias is on every rank and is added once.
    """

    def __init__(self, ways: Ways, columns: int, bias: bool) -> None:
        super().__init__()
        self.ways = ways
        self.weight = parameter(ways, WIDTH, columns, cut=1)
        self.bias = parameter(ways, WIDTH) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Leave.apply(F.linear(x, self.weight), self.ways)
        return out if self.bias is None else out + self.bias


class Words(nn.Module):
    """A table with cut rows: words of other ranks are zeros."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.ways = ways
        self.weight = parameter(ways, ways.rows, WIDTH, cut=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = len(self.weight)
        here = x - self.ways.rank * self.ways.share(self.ways.rows, 0)
        mine = (here >= 0) & (here < count)
        out: torch.Tensor = _Leave.apply(self.weight[here.clamp(0, count - 1)] * mine.unsqueeze(-1), self.ways)
        return out


class Embedding(nn.Module):
    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.word = Words(ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.word(x)
        return out


def head(embedding: Embedding, h: torch.Tensor) -> torch.Tensor:
    table = embedding.word
    out: torch.Tensor = _Align.apply(F.linear(_Enter.apply(h, table.ways), table.weight), table.ways)
    return out


class Attention(nn.Module):
    """A fused matrix by key-value group: queries, key, value.

    So a cut along its rows is a cut by groups.
    """

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.groups, self.line = ways.share(GROUPS), ways.line
        self.qkv = Wide(ways, GROUPS * (QUERIES + 2) * HEAD, bias=True)
        self.out = Narrow(ways, WIDTH, bias=True)
        self.register_buffer("decay", torch.tensor([0.25, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv(x).unflatten(-1, (self.groups, QUERIES + 2, HEAD))
        q, k, v = fused[..., :QUERIES, :].flatten(2, 3), fused[..., QUERIES, :], fused[..., QUERIES + 1, :]
        if self.line is None:
            mixed = self.mixed(q, k, v)
        else:  # some heads of the full sequence, for all heads of a part of it
            from deepspeed.sequence.layer import DistributedAttention

            mixed = DistributedAttention(self.mixed, self.line, scatter_idx=2, gather_idx=1)(q, k, v, 0)
        out: torch.Tensor = self.out(mixed.flatten(2))
        return out

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        q = q.unflatten(2, (-1, QUERIES))
        place = torch.arange(q.shape[1])
        back = (place[:, None] - place).to(q.dtype)
        scores = torch.einsum("btgqd,bsgd->bgqts", q, k) - back * self.decay.to(q.dtype).sum()  # type: ignore[operator]
        weights = scores.masked_fill(back < 0, float("-inf")).float().softmax(-1).to(q.dtype)
        return torch.einsum("bgqts,bsgd->btgqd", weights, v).flatten(2, 3)


class Mlp(nn.Module):
    """A rank's rows of the first matrix.

    Part of the gate, then of the other half.
    """

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.grow = Wide(ways, 2 * INNER, bias=False, sections=2)
        self.shrink = Narrow(ways, INNER, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.grow(x).chunk(2, -1)
        out: torch.Tensor = self.shrink(F.silu(gate) * up)
        return out


class Expert(nn.Module):
    """An expert, complete on its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(WIDTH, 7)
        self.fall = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fall(F.silu(self.rise(x)))
        return out


class Mixture(nn.Module):
    def __init__(self, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        free = {"k": 1, "capacity_factor": 8.0, "drop_tokens": False, "use_rts": False}
        self.moe = MoE(WIDTH, Expert(), num_experts=EXPERTS, ep_size=ep, **free)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.moe(x)[0]
        return out


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


class Block(nn.Module):
    def __init__(self, ways: Ways, ep: int) -> None:
        super().__init__()
        self.before = Norm()
        self.attention = Attention(ways)
        self.between = Norm()
        self.mlp: nn.Module = Mixture(ep) if ep else Mlp(ways)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.attention(self.before(h))
        out: torch.Tensor = h + self.mlp(self.between(h))
        return out


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[..., :WORDS].float().flatten(0, 1), y.flatten())  # no word is padding


class Whole(nn.Module):
    """No pipeline, and the names of one."""

    def __init__(self, ways: Ways, ep: int) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": Embedding(ways)})
        for number, has_experts in enumerate(BLOCKS, 1):
            self.add_module(str(number), Block(ways, ep if has_experts else 0))
        self.add_module(str(len(BLOCKS) + 1), Norm())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tied_modules["embed"](x)
        for number in range(1, len(BLOCKS) + 2):
            h = self.get_submodule(str(number))(h)
        return loss(head(self.tied_modules["embed"], h), y)  # type: ignore[arg-type]


def pipeline(topology: Any, stages: Sequence[int], ways: Ways, ep: int) -> Any:
    """The same over stages of so many layers each."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    class ByHand(PipelineModule):
        def _partition_layers(self, method: str) -> None:
            stage = self._topo.get_coord(self.global_rank).pipe
            self.parts = [sum(stages[:n]) for n in range(len(stages) + 1)]
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    tie = {"tied_weight_attr": ["word.weight"]}
    layers = [
        TiedLayerSpec("embed", Embedding, ways, **tie),
        *(LayerSpec(Block, ways, ep if has_experts else 0) for has_experts in BLOCKS),
        LayerSpec(Norm),
        TiedLayerSpec("embed", Embedding, ways, forward_fn=head, **tie),
    ]
    return ByHand(layers, topology=topology, loss_fn=loss)


def whole_name(name: str, module: nn.Module, ep_rank: int) -> str:
    """Experts by their number among all."""
    found = EXPERT.fullmatch(name)
    if found is None:
        return name
    number = ep_rank * module.get_submodule(found["module"]).num_local_experts + int(found["number"])  # type: ignore[operator]
    return name[: found.start("number")] + f"{number}{found['inner']}"


def fill(module: nn.Module, ways: Ways, ep_rank: int) -> None:
    """Every parameter from a seed that its name gives."""
    for local, p in module.named_parameters():
        name = whole_name(local, module, ep_rank)
        dim, sections = getattr(p, "cut", (None, 1))
        shape = getattr(p, "whole", p.shape)
        whole = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if dim is not None:
            whole = torch.cat([s.chunk(ways.size, dim)[ways.rank] for s in whole.chunk(sections, dim)], dim)
        p.data.copy_(1 + whole if name.endswith(".scale") else whole)


def lessen(module: nn.Module, lean: Sequence[str], frozen: Sequence[str]) -> None:
    """Leave parameters out, and freeze some, by patterns of their names."""
    for name, p in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        if any(fnmatchcase(name, pattern) for pattern in lean):
            module.get_submodule(owner).register_parameter(leaf, None)
        p.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in frozen))
    for block in module.modules():
        if isinstance(block, Block) and not any(True for _ in block.mlp.parameters()):
            block.mlp = Nothing()  # DeepSpeed would count its experts


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, WORDS, (BATCH, PLACES), generator=torch.Generator().manual_seed(500 + step))
    return x, (x * 5 + 3) % WORDS

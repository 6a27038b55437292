"""The starts of walks, and the layouts that are drawn for them.

Starts are real folders of DeepSpeed, of torch and of Megatron.

A drawn step can be done from the folder before it; one step in `BOLD` is drawn without this check, and may be
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from attrs import frozen

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
CHUNKS = FIXTURES.parent / "dcp"
MEGATRON = FIXTURES.parent / "megatron"
SPEC = "megatron_deepspeed.ucpl:llama"
HOME = "HOME"  # the text that `ucpl infer` writes of a walk's first folder: its stages and cuts, by name
BOLD = 25


@frozen
class Here:
    """The folder, and the axes of its files."""

    axes: frozenset[str]  # "tp", "pp", "ep": degrees that a call may ask for
    spec: str | None = None  # the layout with its cuts, if its files have none
    # It went through files of one rank, which do not record buffers, or separate groups of experts.
    one_rank: bool = False


Draw = Callable[[Random, Here], str]


@frozen
class Start:
    """A folder, its description, and the draws of its targets."""

    name: str
    draw: Draw
    axes: str = ""
    spec: str | None = None
    family: str = "zero"  # whose degrees a bold call asks for: another's counters and masters are another state

    @property
    def path(self) -> Path:
        return next(path for root in (FIXTURES, CHUNKS, MEGATRON) if (path := root / self.name).is_dir())

    @property
    def here(self) -> Here:
        return Here(frozenset(self.axes.split()), self.spec)


def some(rng: Random, *least_and_most: int) -> int:
    return rng.randint(*least_and_most)


def wholes(rng: Random) -> str:
    return rng.choice(["plain()", "universal()", "universal(stage=3)"])


def dense(bf16: bool) -> Draw:
    """ZeRO at any stage and degree, with settings that move tensors.

    Unsplit forms between.
    """

    def draw(rng: Random, here: Here) -> str:
        dp = some(rng, 1, 6)
        calls = [f"zero0(dp={dp})", f"zero1(dp={dp})", f"zero2(dp={dp})", f"zero3(dp={dp})", wholes(rng)]
        calls += [f"zero{some(rng, 1, 2)}(dp={dp}, round_robin=1)", f"zero1(dp={dp}, alignment={8 if bf16 else 4})"]
        calls += [f"zero3(dp={dp}, sub_group_size={rng.choice([100, 700, 2000])})"]
        calls += [f"zero1(dp={dp}, bf16_optimizer=1)"] * bf16
        return rng.choice(calls)

    return draw


def chunks(rng: Random, here: Here) -> str:
    """Chunks of FSDP2 at any degree, and one unsplit file between."""
    to = f"dcp(fsdp={some(rng, 1, 7)})"
    return rng.choice([to, to, "plain()"])  # ZeRO also has masters and counters: another state


def megatron(most_ep: int, most_pp: int) -> Draw:
    """Files of ranks, Megatron-Core's chunks, and one unsplit file.

    Names are those of modules in all of them.
    """

    def draw(rng: Random, here: Here) -> str:
        tp, pp, ep = rng.choice([1, 2]), rng.choice([1, most_pp]), rng.choice([1, most_ep])
        ranks = f"megatron_legacy(tp={tp}, pp={pp}, vpp={some(rng, 1, pp)}, ep={ep})"
        core = f"megatron_core(tp={some(rng, 1, 3)}, pp={some(rng, 1, 2)}, stacked=0)"  # stacks put a group in another order
        return rng.choice([ranks, core, ranks, core, "plain()"])  # a step of DCP's is a tensor: another state

    return draw


def autotp(rng: Random, here: Here) -> str:
    """AutoTP cuts the tensors of its record; unsplit tensors stay unsplit."""
    dp, tp = some(rng, 1, 3), rng.choice([1, 2, 2, 3, 4])
    if "tp" not in here.axes:
        return f"{HOME}:stored(dp={dp}, tp=2)" if rng.random() < 0.4 else dense(False)(rng, here)
    return f"zero{some(rng, 1, 3)}(dp={dp}, tp={tp}, kv_heads=4)"


def stages(rng: Random, cuts: str, layers: int = 5) -> str:
    """A pipeline's stages: as many as a method deals, or listed, uneven.

    `cuts`: before which layers a stage may begin.

    DeepSpeed takes no stage that lacks one of the optimizer's groups, so that not every cut can be.
    """
    if rng.random() < 0.3:
        return f'pp={some(rng, 1, 2)}, partition="uniform"' if "3" in cuts else "pp=1"
    places = sorted(rng.sample([int(n) for n in cuts], some(rng, 1, len(cuts))))
    sizes = [b - a for a, b in zip([0, *places], [*places, layers], strict=True)]
    return f"stages={sizes}, layers={layers}"  # one stage does not record functions behind its last file


def grid(cuts: str, self_described: bool, most: int) -> Draw:
    """Tensor x pipeline x data parallelism. `most`: tensor-parallel ranks.

    Without a pipeline it is a module like any other.
    """

    def draw(rng: Random, here: Here) -> str:
        dp, tp = some(rng, 1, 3), some(rng, 1, most)
        if "pp" not in here.axes:
            goes_home = self_described and rng.random() < 0.4
            return f"{HOME}:stored(dp={dp}, tp=2, pp=2)" if goes_home else module(rng, here, padded=True)
        if rng.random() < 0.2:
            return module(rng, here, padded=True)
        if self_described or tp == 1:
            return f"zero1(dp={dp}, tp={tp}, {stages(rng, cuts)})"
        return f"{SPEC}(dp={dp}, tp={most}, {stages(rng, cuts)})"

    return draw


def module(rng: Random, here: Here, *, padded: bool = False) -> str:
    """Out of a pipeline: unsplit tensors in a module.

    A folder with files of layers has no place in the universal form; and
    that has words alone, without the padding rows of a `padded` vocabulary: another state.
    """
    call = f"zero{some(rng, 2 if 'pp' in here.axes else 1, 3)}(dp={some(rng, 1, 3)}, tp=1)"
    return rng.choice([call, "plain()" if padded or "pp" in here.axes else wholes(rng)])


def experts(cuts: str, most: int, tp: int = 1, slices: bool = False) -> Draw:
    """Experts over ep ranks, in a pipeline or with `tp` ranks.

    `cuts` are as above; `tp` cuts the other tensors.

    slices: stage 3 has a form for them (AutoEP).
    """

    def draw(rng: Random, here: Here) -> str:
        ep = rng.choice([n for n in (1, 2, 4) if n <= most])
        dp = ep * some(rng, 1, 2)
        if slices and rng.random() < 0.4:
            return f"zero3(dp={dp}, tp=1, ep={ep}, sub_group_size={rng.choice([90, 400, 10**9])})"
        if rng.random() < 0.1:
            return f"zero2(dp={dp}, tp=1, ep={ep})"
        if cuts and "pp" not in here.axes:
            return f"{HOME}:stored(dp=2, pp=2, ep=2)"
        staged = f", {stages(rng, cuts)}" if cuts else ""
        if tp > 1 and rng.random() < 0.5:
            return f"{SPEC}(dp={dp}, tp={tp}, ep={ep}{staged})"
        return f"zero1(dp={dp}, ep={ep}{', tp=1' * (tp > 1)}{staged})"

    return draw


def pipeline(cuts: str, layers: int) -> Draw:
    def draw(rng: Random, here: Here) -> str:
        dp = some(rng, 1, 4)
        if "pp" not in here.axes:
            return f"{HOME}:stored(dp={dp}, pp=2)" if rng.random() < 0.4 else module(rng, here)
        if rng.random() < 0.2:
            return module(rng, here)
        return f"zero1(dp={dp}, {stages(rng, cuts, layers)})"

    return draw


STARTS = (
    Start("tp2_pp2_dp2_z1_bf16", grid("123", True, 4), "tp pp"),
    Start("tp2_pp2_dp1_z1", grid("23", False, 2), "tp pp", f"{SPEC}()"),
    Start("pp2_ep2_dp2_z1", experts("2", 4, 2), "pp ep tp"),
    Start("tp2_ep2_dp2_z1", experts("", 4, 2), "tp ep", f"{SPEC}()"),
    Start("tp2_dp2_z1_uneven", autotp, "tp"),
    Start("moe_ep2_dp2_z1", experts("", 4), "ep"),
    Start("moe_ep2_dp4_z1", experts("", 4), "ep"),
    Start("autoep_ep2_dp4_z1", experts("", 4, slices=True), "ep"),
    Start("autoep_ep2_dp4_z3", experts("", 4, slices=True), "ep"),
    Start("pp2_dp2_z1", pipeline("1234", 5), "pp"),
    Start("pp2_dp2_z1_functions", pipeline("2345", 7), "pp"),
    Start("sp2_dp2_z1", dense(False)),
    Start("z1_dp4", dense(False)),
    Start("z2_dp3_frozen", dense(False)),
    Start("z2_dp2_roundrobin", dense(False)),
    Start("z3_dp2_subgroup", dense(False)),
    Start("z1_dp2_sgdm", dense(False)),
    Start("z1_dp2_bf16", dense(True)),
    Start("z1_dp2_bf16opt", dense(True)),
    Start("z0_dp2_bf16", dense(True)),
    Start("fsdp2_w4", chunks, family="dcp"),
    Start("legacy_vpp", megatron(1, 2), family="megatron"),
    Start("legacy_moe", megatron(2, 1), family="megatron"),
)


def bold(rng: Random, family: str = "zero") -> str:
    """A call that asks for whatever there is."""
    if family == "dcp":
        return f"dcp(fsdp={some(rng, 1, 40)})"
    if family == "megatron":
        return f"megatron_legacy({', '.join(f'{axis}={some(rng, 1, 3)}' for axis in ('tp', 'pp', 'vpp', 'ep'))})"
    asked = [f"dp={some(rng, 1, 4)}"]
    asked += [f"{axis}={rng.choice([1, 2, 3])}" for axis in ("tp", "pp", "ep") if rng.random() < 0.5]
    return f"zero{some(rng, 0, 3)}({', '.join(asked)})"

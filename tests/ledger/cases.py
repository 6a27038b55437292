"""The cases of the ledger.

Each has a name of its own, a folder of its own, and needs no other case.

A case is a function of this module and its arguments, so that a process that is started anew can run it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from attrs import frozen

from tests.ledger.place import DATA, ROOT, RUN, Place, Stamps, stamps
from ucpl.cli import main
from ucpl.files.checkpoint import Checkpoint, Order
from ucpl.files.skipping import skips_optimizer
from ucpl.formats import opening

FIXTURES = ROOT / "tests" / "fixtures"
EXAMPLES = ROOT / "examples" / "architectures"
FORMS = (  # each form of checkpoints, at degrees that few of the fixtures have
    'safetensors(shard="20KB")',
    "plain()",
    "universal()",
    "zero0(dp=2)",
    "zero1(dp=3)",
    "zero1(dp=2, tp=2)",
    "zero2(dp=2, round_robin=1)",
    "zero3(dp=3, sub_group_size=700)",
    "dcp(fsdp=3)",
    "safetensors_shards(fsdp=2)",
    "megatron_core(tp=2)",
    "megatron_core(pp=2, stacked=0)",
    "megatron_fsdp(dp=2)",
    "megatron_legacy(tp=2)",
)
CHANGES = (  # other changes of a conversion besides the layout
    ("--weights-alone",),
    ("--drop", "exp_avg"),
    ("--drop", "*.bias"),
    ("--freeze", "*.bias"),
    ("--dry-run",),
)
CHANGED = (
    "deepspeed/z1_dp4",
    "deepspeed/z2_dp3_frozen",
    "deepspeed/moe_ep2_dp2_z1",
    "dcp/fsdp2_w4",
    "odd/gpt2_lora_z1",
)
WALKS, STEPS = 120, 2
SEED = "ledger"


@frozen
class Case:
    """A name, and its function: `work(place, *arguments)`."""

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...] = ()

    @property
    def source(self) -> Path | None:
        """The checkpoint that it copies first, if it is of one."""
        first = self.arguments[0] if self.arguments and self.work in (look, convert, apply) else None
        return first if isinstance(first, Path) else None


@frozen
class Found:
    """The results of a case; `kept`: the exact texts, by their command."""

    name: str
    bytes: tuple[str, ...]
    texts: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]


def run_all(cases: list[Case]) -> list[Found]:
    """Cases of one checkpoint, in a folder that is gone afterwards.

    The checkpoint stays there for all of them; other files of a case are deleted at its end.
    """
    before = Path.cwd()
    out = []
    copied: dict[str, tuple[Path, Stamps]] = {}
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder, opened_once(Path(folder).resolve() / "source"):
        for case in cases:
            place = Place(Path(folder).resolve(), copied=copied)
            place.clear()
            copied = place.copied
            os.chdir(folder)
            try:
                case.work(place, *case.arguments)
            except Exception as error:  # a case that cannot run is a line like any other, and no end of all others
                place.note_bytes(f"no case: {type(error).__name__}")
                place.note_text("no case", place.plain(str(error)))
            finally:
                os.chdir(before)
            out.append(Found(case.name, tuple(place.bytes), tuple(place.texts), tuple(place.kept)))
    return out


@contextlib.contextmanager
def opened_once(source: Path) -> Iterator[None]:
    """Have the product open a checkpoint again only if files changed.

    No verb changes the value that a reader returned: one that did would change the results of the next case.
    """
    read = opening.open_checkpoint
    known: dict[tuple[object, ...], Checkpoint] = {}

    def opened(
        path: Path, order: Order | None = None, arguments: Mapping[str, object] | None = None, first: str = ""
    ) -> Checkpoint:
        if path.absolute() != source or order is not None or arguments or skips_optimizer():
            return read(path, order, arguments, first)
        key = (path, first, stamps(source))
        if key not in known:
            known[key] = read(path, order, arguments, first)
        return known[key]

    opening.open_checkpoint = opened
    try:
        yield
    finally:
        opening.open_checkpoint = read


def settle() -> None:
    """One environment for all cases, in each process.

    Nothing of the user's, no colour, one width, no wait for a disk.
    """
    import gc

    import torch

    kept = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "UCPL_CACHE")
    own = {name: os.environ[name] for name in kept if name in os.environ}
    os.environ.clear()
    os.environ.update(own, COLUMNS="120", NO_COLOR="1", TERM="dumb", LC_ALL="C.UTF-8", OMP_NUM_THREADS="1", TZ="UTC")
    os.environ["XDG_DATA_HOME"] = os.path.join(tempfile.gettempdir(), "ledger-nobody")  # nothing is measured there
    os.umask(0o022)
    torch.set_num_threads(1)
    gc.freeze()  # imported objects stay: they are no garbage
    os.fsync = os.fdatasync = lambda fd: None  # a target of a case need not survive a power cut


def every_case() -> list[Case]:
    """All cases, in one order. Two of one name are an error."""
    made = [case for make in MAKERS for case in make()]
    names = [case.name for case in made]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise ValueError(f"two cases have one name: {sorted(twice)}")
    return made


# ---- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoints() -> dict[str, Path]:
    """Every real checkpoint of the tree, by a short name."""
    found = {}
    for kind in ("deepspeed", "dcp", "megatron", "odd", "numbered"):
        for path in sorted((FIXTURES / kind).iterdir()):
            if path.is_dir() and not path.name.startswith("iter_"):
                found[f"{kind}/{path.name}"] = path
    found |= {
        f"universal/{name}": FIXTURES / "universal" / name / "global_step3_universal" for name in ("z1_dp4", "z3_dp4")
    }
    for name in ("accelerate/fsdp", "accelerate/state", "lightning/step-2.ckpt", "trainer/checkpoint-3"):
        found[name] = FIXTURES / name
    found["megatron/iter_0000010"] = FIXTURES / "megatron" / "iter_0000010"
    for path in sorted((ROOT / "tests" / "formats" / "huggingface" / "written").iterdir()):
        if path.is_dir():
            found[f"hf/{path.name}"] = path
    for path in sorted((EXAMPLES / "checkpoints").iterdir()):
        found[f"examples/{path.name}"] = path
    return found


def looked_at() -> Iterator[Case]:
    for name, path in checkpoints().items():
        yield Case(f"look/{name}", look, (path,))


def look(place: Place, path: Path) -> None:
    source = place.copy(path)
    place.ucpl("inspect", source)
    place.ucpl("inspect", source, "--tensors", "--json")
    place.ucpl("infer", source, "--json")
    place.ucpl("verify", source, *DATA, "--json")


def converted() -> Iterator[Case]:
    found = checkpoints()
    for i, (name, path) in enumerate(found.items()):
        for j, to in enumerate(FORMS):
            yield Case(f"to/{name}/{to}", (convert, apply)[(i + j) % 2], (path, to))
    for name in CHANGED:
        for change in CHANGES:
            for to in ("plain()", "zero1(dp=2)", "dcp(fsdp=2)"):
                yield Case(f"change/{name}/{to} {' '.join(change)}", convert, (found[name], to, *change))


def convert(place: Place, path: Path, to: str, *change: str) -> None:
    done = place.ucpl("convert", place.copy(path), "target", "--to", to, *change, *RUN, "--allow-global", "*")
    if not done and "--dry-run" not in change:
        place.target("target")


def apply(place: Place, path: Path, to: str) -> None:
    """The same in two commands, with the plan between them."""
    source = place.copy(path)
    if not place.ucpl("plan", "--from", source, "--to", to, "-o", "x.plan", "--json"):
        place.plan("x.plan")
        if not place.ucpl("apply", "x.plan", source, "target", *RUN, "--allow-global", "*", "--json"):
            place.target("target")


# ---- chains of conversions --------------------------------------------------------------------------------------------


def walked() -> Iterator[Case]:
    """Conversions drawn by a seed, as tests/walk draws them.

    The calls are in the name of the case.
    """
    from tests.walk.starts import STARTS, bold

    for number in range(WALKS):
        rng = Random(f"{SEED} {number}")
        start = STARTS[number % len(STARTS)]
        calls = [bold(rng, start.family) if rng.random() < 0.2 else start.draw(rng, start.here) for _ in range(STEPS)]
        name = f"walk/{number:03} {start.name} {' -> '.join(calls)}"
        yield Case(name, walk, (start.path, start.spec, tuple(calls)))


def walk(place: Place, path: Path, spec: str | None, calls: tuple[str, ...]) -> None:
    source = place.copy(path)
    if any(call.startswith("HOME") for call in calls):
        place.ucpl("infer", source, "-o", "home.ucpl")
    here, layout = source, spec
    for i, call in enumerate(calls):
        described = ("--from", layout) if layout else ()
        to = call.replace("HOME", "home.ucpl")
        if place.ucpl("convert", here, f"step{i}", "--to", to, *described, *RUN, "--json"):
            continue
        place.target(f"step{i}")
        here, layout = f"step{i}", to if ".ucpl:llama(" in to else None
    if here != source:
        place.ucpl("compare", source, here, *(("--as", spec) if spec else ()), *DATA, "--json")


def crossed() -> Iterator[Case]:
    """Forms to other forms, with optimizer state.

    A dense model of Megatron-Core, and one with experts.
    """
    from tests.matrix.test_matrix import CUT, STAGED
    from tests.matrix.test_matrix import FORMS as forms

    kept = [(name, form) for name, form in forms.items() if name != STAGED]
    for i, (one, here) in enumerate(kept):
        for j, (other, there) in enumerate(kept):
            name = f"{one} -> {other}"
            if (i + j) % 3 == 0:
                calls, origin = (here.source, there.target), "dist_stacked_tp2_pp2_fully"
                yield Case(f"cross/dense/{name}", cross, (origin, CUT, *calls))
            elif (i + j) % 3 == 1:
                yield Case(f"cross/moe/{name}", cross, ("legacy_moe", CUT, here.moe_source, there.moe_target))


def cross(place: Place, origin: str, cut: str, *calls: str) -> None:
    source = place.copy(FIXTURES / "megatron" / origin)
    # A manifest has the path of a spec, and the report has the manifest's size.
    spec = place.copy(Path(cut), "cut.ucpl")
    first, second = (call.replace(cut, spec) for call in calls)
    if origin != "legacy_moe":
        place.ucpl("convert", source, "whole", "--to", "megatron_legacy()", *RUN)
        source = "whole"
    if not place.ucpl("convert", source, "first", "--to", first, *RUN):
        place.target("first")
        if not place.ucpl("convert", "first", "second", "--to", second, *RUN, "--json"):
            place.target("second")


def architectures() -> Iterator[Case]:
    from tests.architectures.test_examples import NAMES

    for name in NAMES:
        yield Case(f"architecture/{name}", architecture, (name,))


def architecture(place: Place, name: str) -> None:
    """Files of a library to ranks, to other ranks, and back."""
    from tests.architectures.test_examples import OF_ANY, call, degrees_of, hf

    place.copy(EXAMPLES / f"{name}.ucpl", f"{name}.ucpl")
    source, own = place.copy(EXAMPLES / "checkpoints" / name), str(EXAMPLES / name)
    first, second = (call(name, degrees).replace(own, name) for degrees in degrees_of(name))
    whole = hf(name).replace(own, name)
    steps = ((source, "first", first, whole), ("first", "second", second, first), ("second", "back", whole, second))
    for here, there, to, layout in steps:
        described = () if name in OF_ANY and here != source else ("--from", layout)
        if not place.ucpl("plan", "--checkpoint", here, "--from", layout, "--to", to, "-o", f"{there}.plan", "--json"):
            place.plan(f"{there}.plan")
        if not place.ucpl("convert", here, there, *described, "--to", to, *RUN):
            place.target(there)
    place.ucpl("verify", "first", "--from", first, *DATA, "--json")
    place.ucpl("compare", source, "back", "--as", whole, "--with", whole, *DATA)


# ---- specs ------------------------------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, object]] = {  # configs of specs without a checkpoint of their own
    "llama": {
        "hidden_size": 36, "intermediate_size": 22, "vocab_size": 67, "num_hidden_layers": 4, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": False, "attention_bias": True,
    },
    "gpt2": {"n_layer": 4, "n_embd": 16, "vocab_size": 67, "n_positions": 8, "n_head": 4},
}  # fmt: skip
_LAYOUT = re.compile(r"^layout (\w+)\((.*?)\) of (\w+)", re.MULTILINE | re.DOTALL)
SPEC_FOLDERS = ("specs", "examples/architectures", "examples/patterns", "examples/ranks", "tests/specs", "benchmarks")


def specs() -> dict[str, Path]:
    found = {f"{folder}/{p.name}": p for folder in SPEC_FOLDERS for p in sorted((ROOT / folder).glob("*.ucpl"))}
    return found | {
        "tests/planted/right.ucpl": ROOT / "tests/planted/right.ucpl",
        "tests/matrix/cut.ucpl": ROOT / "tests/matrix/cut.ucpl",
    }


def config_of(path: Path) -> dict[str, object] | None:
    """The config of a spec's model.

    Of the checkpoint next to it, or a small one.
    """
    for name in ("config.json", "adapter_config.json"):
        beside = EXAMPLES / "checkpoints" / path.stem / name
        if beside.exists():
            held: dict[str, object] = json.loads(beside.read_text(encoding="utf-8"))
            return held
    return SMALL.get(path.stem)


def checked() -> Iterator[Case]:
    for name, path in specs().items():
        yield Case(f"spec/{name}", check, (path, config_of(path)))


def check(place: Place, path: Path, config: dict[str, object] | None) -> None:
    place.copy(path, path.name)
    given = with_config(place, config)
    place.ucpl("check", path.name, *given)
    place.ucpl("check", path.name, *given, "--json")
    place.ucpl("fmt", path.name, "--check")
    loose = re.sub(" {2,}", " ", path.read_text(encoding="utf-8"))
    (place.here / "loose.ucpl").write_text(loose, encoding="utf-8")
    place.ucpl("fmt", "loose.ucpl")
    place.file("loose.ucpl")


def with_config(place: Place, config: dict[str, object] | None) -> tuple[str, ...]:
    if config is None:
        return ()
    (place.here / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ("--config", "config.json")


def calls_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Calls of each layout of a spec, and an any-model flag.

    Required degrees at 2, all of them, all but stages.
    """
    for name, parameters, model in _LAYOUT.findall(path.read_text(encoding="utf-8")):
        named = [one.strip() for one in re.split(r",(?![^(]*\))", parameters) if one.strip()]
        asked = [f"{one}=2" for one in named if "=" not in one]
        degrees = [one.partition("=")[0].strip() for one in named if "=" in one]
        more = [f"{one}=2" for one in degrees if one in ("tp", "pp", "ep", "dp", "fsdp")]
        unstaged = [one for one in more if one != "pp=2"]
        for some in dict.fromkeys(((*asked,), (*asked, *more), (*asked, *unstaged))):
            yield f"{name}({', '.join(some)})", model == "any"


def shown() -> Iterator[Case]:
    for name, path in specs().items():
        for call, of_any in calls_of(path):
            yield Case(f"show/{name}:{call}", show, (path, call, of_any, config_of(path)))
    for model, file, config in published():
        for call, _ in calls_of(ROOT / "specs" / file):
            if not call.startswith(("hf", "openai")):
                yield Case(f"show/{model}:{call}", show, (ROOT / "specs" / file, call, False, config))


def published() -> Iterator[tuple[str, str, dict[str, object]]]:
    """Models of real sizes: (name, file of the spec, config)."""
    from tests.architectures.test_shipped_specs import CONFIGS

    for name in ("Llama-3.1-405B", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b", "gpt2"):
        file, _, config = CONFIGS[name]
        yield name, file, config


def show(place: Place, path: Path, call: str, of_any: bool, config: dict[str, object] | None) -> None:
    """A layout after each stage of the compiler.

    A model that leaves its dtype to a checkpoint is given one.
    """
    text = path.read_text(encoding="utf-8")
    if not re.search(r"^  dtype \w+$", text, re.MULTILINE):
        text = re.sub(r"^(model \w+[^{\n]*\{\n)", r"\1  dtype bf16\n", text, flags=re.MULTILINE)
    (place.here / path.name).write_text(text, encoding="utf-8")
    given = with_config(place, config)
    if of_any:
        place.copy(ROOT / "examples" / "ranks" / "job.ucpl", "job.ucpl")
        given = ("--model", "job.ucpl:gpt")
    for stage in ("resolve", "locate", "build", "order"):
        place.ucpl("show", f"{path.name}:{call}", "--after", stage, *given)
    place.ucpl("show", f"{path.name}:{call}", "--each", "--rank", "0", "--json", *given)
    if config is None or config_of(path) == config:  # of a small model
        if not place.ucpl("show", f"{path.name}:{call}", "--svg", "x.svg", *given):
            place.file("x.svg")
        if not place.ucpl("show", f"{path.name}:{call}", "--html", "x.html", *given):
            place.file("x.html")


def tried() -> Iterator[Case]:
    """Round trips of layouts through other degrees.

    Those of benchmarks are of jobs with thousands of ranks.
    """
    for name, path in ((name, path) for name, path in specs().items() if not name.startswith("benchmarks/")):
        for layout in dict.fromkeys(call.partition("(")[0] for call, of_any in calls_of(path)):
            is_any = {c.partition("(")[0]: a for c, a in calls_of(path)}[layout]
            yield Case(f"roundtrip/{name}:{layout}", roundtrip, (path, layout, is_any, config_of(path)))


def roundtrip(place: Place, path: Path, layout: str, of_any: bool, config: dict[str, object] | None) -> None:
    place.copy(path, path.name)
    given = with_config(place, config)
    if of_any:
        place.copy(ROOT / "examples" / "ranks" / "job.ucpl", "job.ucpl")
        given = ("--model", "job.ucpl:gpt")
    place.ucpl("roundtrip", f"{path.name}:{layout}", "--examples", "3", "--seed", "1", *given)
    place.ucpl("roundtrip", f"{path.name}:{layout}", "--examples", "3", "--seed", "2", "--json", *given)


# ---- refusals ---------------------------------------------------------------------------------------------------------

NOT_HERE = ("without_permission", "contradicted_by_a_class")  # root has every permission; a class needs a stand-in


def refused() -> Iterator[Case]:
    from tests.golden.recipes import CASES
    from tests.mistakes.test_calls import CASES as CALLS
    from tests.mistakes.test_mistakes import MISTAKES

    yield from (Case(f"golden/{name}", golden, (name,)) for name in CASES if name not in NOT_HERE)
    for one in MISTAKES:
        yield Case(f"mistake/{one.place}/{one.name}", mistake, (one.whole, one.config))
    rows = tomllib.loads((ROOT / "tests/mistakes/shipped/lines.toml").read_text(encoding="utf-8"))
    for name, row in rows.items():
        yield Case(f"line/{name}", damaged_line, (ROOT / row["file"], row["before"], row["after"]))
    for line in dict.fromkeys(line for line, *_ in CALLS):
        yield Case(f"call/{line}", command_line, (line,))
    for kind in ("architectures", "mistakes"):
        rows = tomllib.loads((ROOT / f"tests/planted/{kind}.toml").read_text(encoding="utf-8"))
        for row in rows["mistake"]:
            yield Case(f"planted/{kind}/{row['name']}", planted, (row.get("file", ""), tuple(row["edit"])))


def golden(place: Place, name: str) -> None:
    from tests.golden.recipes import CASES

    (place.here / "here").mkdir()
    os.chdir(place.here / "here")
    place.ucpl(*CASES[name].make(place.here / "here"))


def mistake(place: Place, text: str, config: str) -> None:
    (place.here / "x.ucpl").write_text(text, encoding="utf-8")
    given = with_config(place, json.loads(config) if config else None)
    place.ucpl("check", "x.ucpl", *given)


def damaged_line(place: Place, path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8").replace(before, after)
    (place.here / path.name).write_text(text, encoding="utf-8")
    place.ucpl("check", path.name, *with_config(place, config_of(path)))


def command_line(place: Place, line: str) -> None:
    from tests.mistakes.test_calls import TWO
    from tests.mistakes.test_mistakes import framed

    texts = {"spec.ucpl": framed("layout", '  embed = v h as "embed"'), "two.ucpl": TWO}
    texts |= {"config.json": '{"hidden_size": 8}', "broken.json": "{hidden: 8}"}
    for name, text in texts.items():
        (place.here / name).write_text(text, encoding="utf-8")
    place.ucpl(*shlex.split(line))


def planted(place: Place, file: str, edit: tuple[str, ...]) -> None:
    """A mistake in a right spec.

    Checked, converted by, and held against ranks that torch made.
    """
    from tests.architectures.test_examples import OTHERS, degrees_of, experts
    from tests.planted import test_architectures, test_planted
    from tests.planted.genuine import save_genuine, save_whole

    given: tuple[str, ...] = ()
    if file:
        text = test_architectures.edited(file, [*edit])
        whole, theirs = place.copy(EXAMPLES / "checkpoints" / file, "whole"), place.here / "genuine"
        test_architectures.save_genuine(file, theirs)
        call = degrees_of(file)[0]
        ep = f", ep = {call.ep}" if experts(file) else ""
        more = OTHERS.get(file, "")
        ranks, hf = f"ranks(tp = {call.tp}, pp = {call.pp}{ep}{more})", f"hf({more.strip(', ')})"
        given = (
            "--config",
            str(min((place.here / "whole").glob("*config.json"), key=lambda p: len(p.name)).relative_to(place.here)),
        )
    else:
        text, ranks, hf, whole = test_planted.edited([*edit]), test_planted.RANKS, "whole()", "whole"
        save_whole(place.here / "whole")
        save_genuine(place.here / "genuine")
    (place.here / "spec.ucpl").write_text(text, encoding="utf-8")
    if place.ucpl("check", f"spec.ucpl:{ranks}" if file else "spec.ucpl", *given):
        return
    argv = ("--from", f"spec.ucpl:{hf}", "--to", f"spec.ucpl:{ranks}")
    if not place.ucpl("convert", whole, "mine", *argv, *given, *RUN):
        place.target("mine")
        place.ucpl("verify", "mine", "--from", f"spec.ucpl:{ranks}", "--against", "genuine", *given, *DATA)


# ---- other verbs ------------------------------------------------------------------------------------------------------

PLANS = (
    ("deepspeed/z1_dp4", "zero3(dp=2)", "zero1(dp=2)"),
    ("deepspeed/z3_dp2_subgroup", "zero1(dp=3)", "plain()"),
    ("deepspeed/tp2_pp2_dp2_z1_bf16", "zero1(dp=1, tp=3, pp=1)", "universal()"),
    ("deepspeed/moe_ep2_dp2_z1", "zero1(dp=4, ep=4)", "zero1(dp=2, ep=1)"),
    ("dcp/fsdp2_w4", "dcp(fsdp=3)", "plain()"),
    ("dcp/uneven9", "dcp(fsdp=2)", "plain()"),
    ("megatron/legacy_vpp", "megatron_legacy(tp=1)", "megatron_core(tp=2)"),
    ("megatron/dist_moe", "megatron_core(tp=2)", "plain()"),
    ("megatron/fsdp_tp2", "megatron_fsdp(dp=2)", "plain()"),
    ("universal/z1_dp4", "zero2(dp=3)", "plain()"),
    ("hf/llama", 'safetensors(shard="9KB")', "dcp(fsdp=2)"),
    ("trainer/checkpoint-3", "zero3(dp=1)", "plain()"),
)
JOBS = (
    "examples/ranks/job.ucpl:job(dp=4, tp=2)",
    "examples/ranks/experts.ucpl:job(dp=2, ep=2, tp=2)",
    "examples/ranks/job.ucpl:job(dp=2, tp=2, pp=2)",
)
STATEMENTS = ("benchmarks/fsdp.ucpl", "benchmarks/llama.ucpl", "benchmarks/moe.ucpl")


def others() -> Iterator[Case]:
    for name, to, other in PLANS:
        yield Case(f"plan/{name}/{to}", plan, (checkpoints()[name], to, other))
    for job in JOBS:
        yield Case(f"job/{job}", ahead, (job,))
    for file in STATEMENTS:
        yield Case(f"statement/{file}", statement, (file,))
    for name in ("hf/gpt2", "hf/llama"):
        yield Case(f"import/{name}", import_hf, (checkpoints()[name],))


def plan(place: Place, path: Path, to: str, other: str) -> None:
    source = place.copy(path)
    place.ucpl("plan", "--from", source, "--to", to, "--prove", "-o", "a.plan")
    place.ucpl("plan", "--from", source, "--to", other, "-o", "b.plan")
    if not place.ucpl("plan", "--from", source, "--to", to, "--rank", "0", "-o", "rank.plan", "--json"):
        place.plan("rank.plan")
    place.ucpl("show", "a.plan")
    place.ucpl("show", "a.plan", "--json")
    place.ucpl("show", source, "--each", "--json")
    for kind in ("svg", "html"):
        if not place.ucpl("show", "a.plan", f"--{kind}", f"x.{kind}"):
            place.file(f"x.{kind}")
    if not place.ucpl("inspect", source, "--html", "inspect.html"):
        place.file("inspect.html")
    place.ucpl("diff", "a.plan", "b.plan")
    place.ucpl("diff", "a.plan", "b.plan", "--json")
    tensor = place.tensors_of("a.plan")[0]
    place.ucpl("why", "a.plan", tensor)
    place.ucpl("why", "a.plan", tensor, "--json")
    if not place.ucpl("apply", "a.plan", source, "target", *RUN, "--json"):
        place.target("target")
        place.ucpl("verify", "target", *DATA)
        place.ucpl("compare", source, "target", *DATA)
        place.ucpl("compare", source, "target", *DATA, "--json")
    place.ucpl("apply", "a.plan", "target", "again", *RUN)  # most often no source of this plan
    place.ucpl("contingency", "--from", source, "--lose", "1", "--json")


def ahead(place: Place, job: str) -> None:
    """Plans that are made ahead of a loss."""
    file, _, call = job.partition(":")
    place.copy(ROOT / file, Path(file).name)
    here = f"{Path(file).name}:{call}"
    place.ucpl("contingency", "--from", here, "--lose", "1..2", "--keep", "tp")
    place.ucpl("contingency", "--from", here, "--lose", "1..2", "--keep", "tp", "--json", "-o", "plans")
    for made in sorted((place.here / "plans").glob("*.plan")):
        place.plan(f"plans/{made.name}")
    for protect in ("none", "mirror", "raim5", "rs(2, 2)"):
        place.ucpl("vault", "plan", here, "--domains", "4", "--protect", protect)
        place.ucpl("vault", "plan", here, "--domains", "4", "--protect", protect, "--json")


def statement(place: Place, file: str) -> None:
    name = Path(file).name
    place.copy(ROOT / file, name)
    if not place.ucpl("plan", name, "shrink", "-o", "x.plan"):
        place.plan("x.plan")
    place.ucpl("plan", name, "shrink", "--rank", "3", "--json")


def import_hf(place: Place, path: Path) -> None:
    place.ucpl("import", "hf", place.copy(path))
    place.ucpl("import", "hf", "source", "--json")


# ---- the command line itself ------------------------------------------------------------------------------------------


def helped() -> Iterator[Case]:
    from ucpl.cli.verbs import VERBS
    from ucpl.errors import catalogue

    yield Case("help", commands, (("--help",),))
    yield from (Case(f"help/{verb}", commands, ((verb, "--help"),)) for verb in VERBS)
    yield from (
        Case(f"explain/{code}", commands, (("explain", code), ("explain", code, "--json"))) for code in catalogue()
    )
    yield Case("formats", commands, (("formats",), ("formats", "--json")))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["formats", "--json"])
    for one in json.loads(out.getvalue())["formats"]:
        yield Case(f"formats/{one['name']}", commands, (("formats", one["name"]),))


def commands(place: Place, *lines: tuple[str, ...]) -> None:
    for line in lines:
        place.ucpl(*line)


MAKERS = (looked_at, converted, walked, crossed, architectures, checked, shown, tried, refused, others, helped)

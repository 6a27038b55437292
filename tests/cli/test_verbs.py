"""The promise of the command line.

Verbs, --help, --json, exit statuses, imports, and a terminal's output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from attrs import evolve

import ucpl as package
from tests.cli.command import FIXTURES, ROOT, alone, digest, good, ucpl
from ucpl import language
from ucpl.cli import main
from ucpl.cli.limits import end_if_asked, end_like_ctrl_c
from ucpl.cli.verbs import VERBS
from ucpl.language.cache import cache_folder

SOURCE = FIXTURES / "z1_dp4"
HEAVY = ("torch", "rich", "hypothesis", "networkx")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read alone, by all who ask for it."""
    made = tmp_path_factory.mktemp("plan") / "grow.plan"
    good("plan", "--from", SOURCE, "--to", "zero3(dp=3)", "-o", made)
    return made


# ---- calls without quotes --------------------------------------------------------------------------------------------


def test_a_size_of_the_command_line_is_an_argument_of_the_target(tmp_path: Path) -> None:
    spec = tmp_path / "spec.ucpl"
    spec.write_text("ucpl 2\nlet stage = 2\nmodel m {\n  w : 6 dtype f32\n}\n")
    model = ("--model", f"{spec}:m")
    for verb, *more in (("plan", "--from", SOURCE), ("convert", SOURCE, tmp_path / "out", "--dry-run")):
        short = good(verb, *more, "--to", "zero3", "-D", "dp=3", "--json").json["plan"]
        assert short == good(verb, *more, "--to", "zero3(dp=3)", "--json").json["plan"]
    text = ("--to", "safetensors", "-D", "shard=4KB", "--json")
    assert 'shard = "4KB"' in good("plan", "--from", SOURCE, *text).json["plan"]["target"]
    both = ("--to", "zero1", "-D", "dp=3", "--after", "order")
    assert "zero1(dp = 3" in good("show", SOURCE, *both).out
    assert good("show", "zero1", "-D", "dp=3", *model).out == good("show", "zero1(dp=3)", *model).out


def test_a_let_of_the_file_keeps_its_size(tmp_path: Path) -> None:
    spec = tmp_path / "spec.ucpl"
    spec.write_text(
        "ucpl 2\nlet tp = 2\nmodel m {\n  dim n = 3 * tp\n  w : n dtype f32\n}\nlayout x(tp = tp) of m {\n"
        '  mesh tp\n  file weights = torch "{tp}.pt"\n  w = n@tp  as "w"\n}\nlayout y(dp = tp) of m {\n'
        '  mesh dp\n  file weights = torch "{dp}.pt"\n  w = n@dp  as "w"\n}\n'
    )
    plan = good("plan", "--from", f"{spec}:y", "--to", f"{spec}:x", "-D", "tp=4", "--json").json["plan"]
    assert (plan["source"], plan["target"]) == ("y(dp = 4)", "x(tp = 4)")


@pytest.mark.parametrize(
    ("to", "size", "code", "remedy"),
    [
        ("zero3(dp=4)", "dp=3", "E177", "leave out -D dp=3, or write zero3 without dp"),
        ("zero3", "sub_group=3", "E115", "did you mean `sub_group_size`?"),
    ],
)
def test_a_wrong_size_of_a_target_is_refused(to: str, size: str, code: str, remedy: str, tmp_path: Path) -> None:
    done = ucpl("convert", SOURCE, tmp_path / "out", "--to", to, "-D", size)
    assert done.status == 2 and code in done.err and remedy in done.err and not list(tmp_path.iterdir())


# ---- quiet, verbose, and the job that loads a target -----------------------------------------------------------------


def test_quiet_prints_no_report_and_keeps_the_answer(tmp_path: Path) -> None:
    line = ("convert", SOURCE, tmp_path / "out", "--to", "zero3(dp=3)", "-q")
    assert (done := good(*line)).out == "" and done.err == "" and (tmp_path / "out").is_dir()
    assert good("verify", tmp_path / "out", "-q").out == good("compare", SOURCE, tmp_path / "out", "-q").out == ""
    other = ucpl("compare", SOURCE, FIXTURES / "z2_dp3_frozen", "-q", "--json")
    assert not other.json["equal"] and other.status == 1  # --json asks for the answer
    again = ucpl(*line)
    assert again.status == 4 and again.out == "" and again.err.startswith("error[E500]")


def test_verbose_prints_moves_and_seconds(tmp_path: Path) -> None:
    line = ("convert", SOURCE, tmp_path / "out", "--to", "zero3(dp=3)", "--force")
    short, long = good(*line).out.splitlines(), good(*line, "-v").out.splitlines()
    more = [one.split()[0] for one in long if one.split()[0] not in {s.split()[0] for s in short}]
    assert {"reads", "writes", "moves", "seconds"} == set(more)


@pytest.mark.parametrize(
    ("to", "job"),
    [
        ("zero3(dp=3)", "3 ranks with ZeRO stage 3, batch per device 2, 6 in all and no longer 8"),
        ("zero0(dp=1)", "1 rank without ZeRO, batch per device 2 in 4 steps"),
        ("dcp(fsdp=2)", "any number of ranks, with torch.distributed.checkpoint.load"),
        ("universal()", 'any number of ranks, with "checkpoint": {"load_universal": true} in the config of DeepSpeed'),
        ("plain()", ""),
    ],
)
def test_the_last_line_names_the_job_that_loads_the_target(to: str, job: str, tmp_path: Path) -> None:
    target = tmp_path / ("out" if job else "out.pt")
    last = good("convert", SOURCE, target, "--to", to).out.splitlines()[-1]
    assert last == f"then          start {job}" if job else last.startswith("next ")


def test_jobs_of_model_parallel_targets_name_their_degrees() -> None:
    from ucpl.api import open_checkpoint
    from ucpl.registry import format_named

    source = open_checkpoint(SOURCE)
    stage = {"stage": 1, "dp": 2, "tp": 4}
    words = "8 ranks with ZeRO stage 1 and dp = 2 and tp = 4, batch per device 2 in 2 steps"
    assert format_named("deepspeed").job(source, stage) == words
    options = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
    for name, more in (("megatron_legacy", {}), ("megatron_core", {"optimizer": "dp_reshardable"})):
        assert format_named(name).job(source, {"tp": 2, "pp": 4, **more}) == f"ranks with {options}"


def test_formats_shows_the_parameters_of_its_layouts() -> None:
    assert "    zero3(dp, tp = 1, pp = 1, bf16 = 0, " in good("formats", "deepspeed").out
    found = good("formats", "safetensors-shards", "--json").json["formats"][0]
    assert found["parameters"] == {"safetensors_shards": {"fsdp": None, "tp": "1"}}


# ---- a check after each save -----------------------------------------------------------------------------------------


def test_a_quick_check_finds_damage_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "run")
    done = good("verify", tmp_path / "run", "--quick")
    assert done.out.splitlines()[-1] == "sound" and "not compared: copies" in done.out
    file = max((tmp_path / "run").rglob("*optim_states.pt"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    broken = ucpl("verify", tmp_path / "run", "--quick", "--seconds", "60")
    assert broken.status == 1 and "error[E630]" in broken.err and file.name in broken.err


def test_a_quick_check_without_time_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucpl.cli.verify.SECONDS", -1)
    done = good("verify", SOURCE, "--quick")
    assert "with a digest: the time was over at 0.0%" in done.out and done.out.endswith(
        "sound         as far as it was read\n"
    )


@pytest.mark.parametrize("more", [("--seconds", "3"), ("--quick", "--against", SOURCE), ("--quick", "--seconds", "0")])
def test_options_of_a_quick_check_that_do_not_fit_are_wrong_usage(more: tuple[str, ...]) -> None:
    done = ucpl("verify", SOURCE, *more)
    assert done.status == 2 and done.err.startswith("error[E17") and "= help:" in done.err


# ---- help and usage --------------------------------------------------------------------------------------------------


def test_every_verb_of_the_interface_is_there_and_listed() -> None:
    assert set(VERBS) >= {
        "demo", "inspect", "infer", "check", "fmt", "show", "plan", "apply", "convert", "compare", "verify", "why",
        "roundtrip", "explain", "formats",
    }  # fmt: skip
    text = good("--help").out
    assert all(re.search(rf"^  {verb} +\S", text, re.MULTILINE) for verb in VERBS)


def test_a_call_without_arguments_shows_three_commands() -> None:
    lines = good().out.splitlines()
    verbs = [line.split()[1] for line in lines if line.startswith("  ucpl ")]
    assert verbs == ["convert", "inspect", "export"] and max(map(len, lines)) <= 80
    assert "ucpl --help" in lines[-1] and ucpl("--debug").status == 2


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example_of_that_verb(verb: str) -> None:
    text = good(verb, "--help").out
    assert re.search(rf"^  ucpl {verb}\b", text.partition("example:\n")[2], re.MULTILINE)
    assert "--debug" in text and ("--json" in text) == (verb not in ("lsp", "completion"))  # these print for programs


def test_the_version_is_the_project_s() -> None:
    import tomllib

    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert good("--version").out == f"ucpl {stated}\n" and package.__version__ == stated


@pytest.mark.parametrize(
    "argv", [("nosuchverb",), ("convert",), ("convert", "a", "b", "--to", "x", "c"), ("fmt", "--chekc", "x")]
)
def test_wrong_usage_is_2_and_says_so_on_standard_error(argv: tuple[str, ...]) -> None:
    done = ucpl(*argv)
    assert done.status == 2 and done.out == "" and done.err.startswith("error[E17")


def test_a_path_alone_is_inspected() -> None:
    assert good(SOURCE).out == good("inspect", SOURCE).out
    assert good(SOURCE, "--json").json == good("inspect", SOURCE, "--json").json
    done = ucpl(SOURCE.with_name("z1_dp5"))
    assert done.status == 2 and "error[E172]" in done.err


# ---- json ------------------------------------------------------------------------------------------------------------


def test_json_is_one_object_on_standard_output(tmp_path: Path, plan: Path) -> None:
    spec = tmp_path / "spec.ucpl"
    good("infer", SOURCE, "-o", spec)
    for argv in (
        ["inspect", SOURCE],
        ["infer", SOURCE],
        ["check", spec],
        ["fmt", "--check", spec],
        ["show", SOURCE, "--after", "resolve"],
        ["plan", "--from", SOURCE, "--to", "zero1(dp=2)"],
        ["apply", plan, SOURCE, tmp_path / "a"],
        ["convert", SOURCE, tmp_path / "b", "--to", "plain()"],
        ["compare", SOURCE, tmp_path / "a"],
        ["verify", SOURCE],
        ["why", plan, "wte.weight[3, 4]"],
        ["explain", "E500"],
        ["formats"],
        ["roundtrip", spec, "--examples", "2"],
    ):
        done = ucpl(*argv, "--json")
        assert done.status == 0, (argv, done.err)
        assert done.err == "" and isinstance(json.loads(done.out), dict), argv


@pytest.mark.parametrize("verb", ["convert", "apply"])
def test_what_was_not_read_back_is_reported(verb: str, tmp_path: Path, plan: Path) -> None:
    """The bytes are the same, and later comparisons are reported."""
    argv = ["convert", SOURCE, "{}", "--to", "zero3(dp=3)"] if verb == "convert" else ["apply", plan, SOURCE, "{}"]
    told = {}
    for how in ("all", "none"):
        out = tmp_path / how
        told[how] = good(*(out if a == "{}" else a for a in argv), "--read-back", how)
    report = good(*(tmp_path / "b" if a == "{}" else a for a in argv), "--read-back", "none", "--json").json["report"]
    assert "bytes read back from the disk equal the written bytes" in told["all"].out
    assert f"was not read back: ucpl verify {tmp_path / 'none'}" in told["none"].out
    assert report["bytes_read_back"] == 0 and report["bytes_written"] > 0
    assert digest(tmp_path / "none") == digest(tmp_path / "all")
    good("verify", tmp_path / "none")


def test_an_error_is_an_object_too() -> None:
    done = ucpl("inspect", "/nowhere", "--json")
    assert done.status == 3 and "error[E437]" in done.err
    assert done.json["status"] == 3 and done.json["diagnostics"][0]["code"] == "E437"


# ---- imports and start ------------------------------------------------------------------------------------------------

REPORT = """
import sys
from ucpl.cli import main
status = main()
print(*sorted(sys.modules), file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., set[str]]:
    """The modules of a process of a verb that ends well.

    Each process is started once.

    If a text was new, it is started again: trees of its texts are kept, and another process reads those.
    """

    @cache
    def found(*argv: object) -> set[str]:
        for _ in range(2):
            done = alone(*argv, code=REPORT)
            assert done.status == 0, (argv, done.err)
            if "lark" not in done.err.split():
                break
        return set(done.err.split())

    return found


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("spec") / "spec.ucpl"
    good("infer", SOURCE, "-o", made)
    return made


@pytest.mark.parametrize(
    "line",
    [
        "fmt --check {spec}",
        "plan --from zero1(dp=4) --to zero3(dp=3) --model {spec}:checkpoint",
        "why {plan} wte.weight[3,4]",
    ],
)
def test_who_reads_texts_and_headers_never_imports_torch(
    line: str, spec: Path, plan: Path, imported: Callable[..., set[str]]
) -> None:
    argv = [word.format(source=SOURCE, spec=spec, plan=plan) for word in line.split()]
    # networkx carries the graph of a plan: who makes or reads none does not wait for it.
    carried = {"networkx"} if argv[0] in ("plan", "why", "convert") else set()
    assert imported(*argv) & set(HEAVY) == carried


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        rooms = (["ucpl", room] for room in ("language", "layout", "placement", "graph"))
        if name.split(".")[:2] in rooms or name == "lark":
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from ucpl.cli import main
sys.exit(main())
"""


def test_apply_needs_no_room_of_the_compiler(tmp_path: Path, plan: Path) -> None:
    done = alone("apply", plan, SOURCE, tmp_path / "target", code=BLOCKED)
    assert done.status == 0, done.err
    good("compare", SOURCE, tmp_path / "target")
    refused = alone("plan", "--from", SOURCE, "--to", "zero1(dp=2)", code=BLOCKED)
    assert refused.status == 1 and "is blocked" in refused.err


STARTED = "import sys; from ucpl.cli import main; sys.exit(main())"


def calls_of(code: str, *argv: str) -> int:
    """Functions that a process calls from its start to its end.

    Its work, at any other load.
    """
    counted = (
        "import _lsprof, atexit, sys\nprofiler = _lsprof.Profiler()\n"
        "atexit.register(lambda: (profiler.disable(), print(sum(e.callcount for e in profiler.getstats()), file=sys.stderr)))\n"
        "profiler.enable()\n"
    )
    done = subprocess.run([sys.executable, "-c", counted + code, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1])


@pytest.fixture
def tables_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with the parser's tables and without trees of texts."""
    language.parse("ucpl 2\n")  # the tables are kept
    (tmp_path / "cache").mkdir(mode=0o700)
    known = cache_folder()
    for path in known.glob("tables-*.json") if known else ():
        shutil.copy(path, tmp_path / "cache")
    monkeypatch.setenv("UCPL_CACHE", str(tmp_path / "cache"))


@cache
def base() -> int:
    return calls_of("import lark, attrs, numpy, networkx")


@pytest.mark.parametrize(
    ("verb", "new", "again"),
    [
        ("convert", 3.91, 2.43),
        ("plan", 3.42, 2.3),
        ("check", 3.76, 2.1),
    ],  # check tries each layout at several degrees
)
def test_verbs_start_with_little_more_than_the_base(
    verb: str, new: float, again: float, spec: Path, tmp_path: Path, tables_alone: None
) -> None:
    """A ratio to the project's imports, in calls. In seconds: docs/PERFORMANCE.md."""
    arguments = {
        "check": ("specs/deepspeed.ucpl", "specs/plain.ucpl"),
        "plan": ("--from", "zero1(dp=4)", "--to", "zero3(dp=3)", "--model", f"{spec}:checkpoint"),
        "convert": (str(SOURCE), str(tmp_path / "target"), "--to", "zero1(dp=3)", "--force"),
    }
    argv = (verb, *arguments[verb])
    assert calls_of(STARTED, *argv) <= new * base()  # texts that were never read before
    assert calls_of(STARTED, *argv) <= again * base()


def test_what_reads_no_text_starts_with_less_than_the_base() -> None:
    assert calls_of(STARTED, "inspect", str(SOURCE)) <= 0.87 * base()


# Modules that no successful verb imports, and modules that only other verbs import.
NEVER = frozenset(
    {
        "torch",
        "rich",
        "hypothesis",
        "asyncio",
        "multiprocessing",
        "fsspec",
        "transformers",
        "deepspeed",
        "tomllib",
        "scipy",
        "numpy.ma",
        "networkx.algorithms",
        "secrets",
    }
    | {
        "lark",
        "interegular",
        "pandas",
        "ucpl.testing",
        "ucpl.inference.hf",
        "ucpl.inference.stages",
        "ucpl.language.slips",
    }
    | {"ucpl.verification.evidence", "ucpl.verification.compare"}
    | {"ucpl.conversion.loader_names", "ucpl.formats.folders.fates"}
)
NOTHING_RUNS = frozenset({"ucpl.runtime", "xxhash", "concurrent.futures"})
NOTHING_IS_PLANNED = frozenset({"networkx", "ucpl.graph", "ucpl.planning", "ucpl.verification.proof.coverage"}) | {
    "importlib.metadata",  # which networkx imports
    "email",
}
NO_TEXT = frozenset({"ucpl.language", "ucpl.layout", "ucpl.placement", "ucpl.inference"})
UNASKED = frozenset({"ucpl.inference", "ucpl.files", "ucpl.tables.operations", "ucpl.conversion.planning"})
NO_FILES = frozenset({"ucpl.formats.opening", "ucpl.formats.deepspeed.store", "ucpl.files.zips"})


def test_a_verb_imports_nothing_that_it_does_not_use(
    spec: Path, tmp_path: Path, imported: Callable[..., set[str]]
) -> None:
    stages = {"ucpl.inference.stages"}  # a layout of any model may be called at a degree of stages
    budgets: dict[tuple[object, ...], frozenset[str]] = {
        ("--help",): NEVER | NOTHING_RUNS | NOTHING_IS_PLANNED | NO_TEXT | NO_FILES | {"numpy", "ucpl.conversion"},
        ("explain", "E500"): NEVER - {"tomllib"} | NOTHING_RUNS | NOTHING_IS_PLANNED | NO_TEXT | NO_FILES | {"numpy"},
        ("formats",): NEVER - {"tomllib"} | NOTHING_RUNS | NOTHING_IS_PLANNED | NO_TEXT | NO_FILES | {"numpy"},
        ("check", spec): NEVER | NOTHING_RUNS | NOTHING_IS_PLANNED | NO_FILES | UNASKED,
        ("inspect", SOURCE): NEVER | NOTHING_RUNS | NOTHING_IS_PLANNED | NO_TEXT,
        ("infer", SOURCE): NEVER | NOTHING_RUNS | NOTHING_IS_PLANNED | {"ucpl.inference.parallel"},
        ("show", f"{spec}:stored()"): NEVER | NOTHING_RUNS | NOTHING_IS_PLANNED | NO_FILES,
        ("plan", "--from", f"{spec}:stored()", "--to", f"{spec}:stored()"): (NEVER | NOTHING_RUNS | NO_FILES) - stages,
        ("plan", "--from", SOURCE, "--to", "zero3(dp=3)"): (NEVER | NOTHING_RUNS) - stages,
        # A dry run fails where a run would: it reads a sample of the weights, too.
        ("convert", SOURCE, spec.with_name("none"), "--to", "zero1(dp=2)", "--dry-run"): NEVER - stages,
        ("convert", SOURCE, tmp_path / "target", "--to", "zero1(dp=2)", "--force"): NEVER - stages,
    }
    for argv, unused in budgets.items():
        assert sorted(unused & imported(*argv)) == [], argv


# ---- output on a terminal ---------------------------------------------------------------------------------------------


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m ucpl show {SOURCE} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("layout")


def test_an_interrupt_is_130_and_leaves_no_target(tmp_path: Path) -> None:
    code = """
import sys
from ucpl.runtime import execute as _, targets
from ucpl.cli import main
def interrupt(*_, **__): raise KeyboardInterrupt
targets.TargetFiles.write = interrupt
sys.exit(main())
"""
    done = alone("convert", SOURCE, tmp_path / "target", "--to", "zero1(dp=2)", code=code)
    assert done.status == 130 and "Traceback" not in done.err
    assert not (tmp_path / "target").exists()


@pytest.fixture
def heard() -> Iterator[None]:
    """Child processes also ignore the signals that `nohup` ignores: not here."""
    kept = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.fault("Interruption", "SIGTERM of a scheduler, SIGHUP of a terminal", "as Ctrl-C; ignored under nohup")
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("action", ["terminate", "hangup"])
def test_the_end_of_a_job_is_as_ctrl_c(action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's SIGTERM, a closed terminal's SIGHUP.

    Finished work is kept, and resuming gives the same bytes.
    """
    command = ("convert", SOURCE, tmp_path / "target", "--to", "zero1(dp=2)", "--workers", "1")
    monkeypatch.setenv("UCPL_FAIL_AT", f"tile-written:3:{action}")
    done = alone(*command)
    assert done.status == 130 and "E620" in done.err and "--resume" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "target").exists()
    monkeypatch.delenv("UCPL_FAIL_AT")
    assert good(*command, "--resume", "--json").json["report"]["tiles_resumed"] >= 2
    good("convert", SOURCE, tmp_path / "whole", "--to", "zero1(dp=2)")
    assert digest(tmp_path / "target") == digest(tmp_path / "whole")


def test_a_signal_that_somebody_ignores_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    monkeypatch.setenv("UCPL_FAIL_AT", "tile-written:3:hangup")
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from ucpl.cli import main; sys.exit(main())"
    )
    assert alone("convert", SOURCE, tmp_path / "target", "--to", "zero1(dp=2)", code=code).status == 0


def test_what_nobody_foresaw_is_one_line_and_debug_shows_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("ucpl.formats.opening.open_checkpoint", broken)
    done = ucpl("inspect", SOURCE)
    assert (
        done.status == 1
        and done.err == "internal error: RuntimeError: no such thing (run with --debug for the place)\n"
    )
    with pytest.raises(RuntimeError, match="no such thing"):
        main(["inspect", str(SOURCE), "--debug"])


def test_a_text_over_another_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    spec = tmp_path / "spec.ucpl"
    before = os.umask(0o027)
    try:
        good("infer", SOURCE, "-o", spec)
    finally:
        os.umask(before)
    assert spec.stat().st_mode & 0o777 == 0o640
    spec.write_text(spec.read_text().replace(" = ", "=", 1))
    spec.chmod(0o604)
    good("fmt", spec)
    assert spec.stat().st_mode & 0o777 == 0o604
    assert [p.name for p in tmp_path.iterdir()] == ["spec.ucpl"]


def test_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    value = {
        "params": {"w\x1b[2J": {"weight": torch.zeros(2)}},
        "buffers": {},
        "aliases": {},
        "groups": [],
        "scalars": {},
    }
    torch.save(value, tmp_path / "evil.pt")
    done = good("inspect", tmp_path / "evil.pt", "--tensors")
    assert "\x1b" not in done.out and "w\ufffd[2J" in done.out


def test_no_colour_where_there_is_no_terminal() -> None:
    env = {**os.environ, "FORCE_COLOR": "1"}
    env.pop("NO_COLOR", None)
    done = subprocess.run([sys.executable, "-m", "ucpl", "inspect", "/nowhere"], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 3 and b"\x1b" not in done.stderr


# ---- single verbs ------------------------------------------------------------------------------------------------------


def test_demo_proves_what_it_says() -> None:
    done = good("demo", "--json").json
    assert done["proved"] and done["equal"] and done["sound"] and done["source_unchanged"]
    text = good("demo").out
    assert "proved: zero2(dp = 4) and zero3(dp = 3) hold the same state" in text


def test_an_inferred_text_converts_as_the_checkpoint_does(tmp_path: Path) -> None:
    good("infer", SOURCE, "-o", tmp_path / "spec.ucpl")
    good("convert", SOURCE, tmp_path / "a", "--to", "zero3(dp=3)")
    good("convert", SOURCE, tmp_path / "b", "--to", "zero3(dp=3)", "--from", f"{tmp_path}/spec.ucpl:stored()")
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.pt")]
    assert len(files) == 6
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_the_same_plan_gives_the_same_bytes_under_any_hash_seed(tmp_path: Path) -> None:
    found = set()
    for seed in ("1", "7"):  # a law's plan is made under others
        path = tmp_path / f"{seed}.plan"
        argv = [sys.executable, "-m", "ucpl", "plan", "--from", str(SOURCE), "--to", "zero3(dp=3)", "-o", str(path)]
        subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True)
        found.add(path.read_bytes())
    assert len(found) == 1


def test_apply_is_what_convert_does(tmp_path: Path, plan: Path) -> None:
    good("apply", plan, SOURCE, tmp_path / "a")
    good("convert", SOURCE, tmp_path / "b", "--to", "zero3(dp=3)")
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.pt")]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


@pytest.mark.parametrize(
    ("element", "name", "index"), [("wte.weight[41, 7]", "wte.weight", (41, 7)), ("mix[2, 4]", "mix", (2, 4))]
)
def test_why_leads_to_the_value(element: str, name: str, index: tuple[int, ...], tmp_path: Path) -> None:
    """The places that `why` names hold torch's value."""
    good("plan", "--from", SOURCE, "--to", "zero1(dp=3)", "-o", tmp_path / "some.plan")
    good("apply", tmp_path / "some.plan", SOURCE, tmp_path / "target")
    truth = torch.load(SOURCE / "truth.pt", weights_only=True)["params"][name]
    found = good("why", tmp_path / "some.plan", element, "--json").json["from"]
    copies = [a for a in found if a["kind"] == "copy"]
    assert {a["state"] for a in copies} == {"weight", "fp32", "exp_avg", "exp_avg_sq"}

    def value(folder: Path, file: str, key: str, at: list[int]) -> float:
        tree = torch.load(folder / "global_step3" / file, weights_only=False)
        steps = key.split("/")
        for step in steps:
            tree = tree[int(step)] if isinstance(tree, list) or (step.isdigit() and int(step) in tree) else tree[step]
        return float(tree[tuple(at)])

    for a in copies:
        wanted = float(truth["fp32" if a["state"] == "weight" else a["state"]][index])
        if a["state"] == "weight":  # the only file that needs no class of DeepSpeed's to load
            assert value(SOURCE, a["source_file"], a["source_key"], a["source_index"]) == wanted
            assert value(tmp_path / "target", a["target_file"], a["target_key"], a["target_index"]) == wanted


@pytest.mark.parametrize("index", ["\u00b2", "1, \u0663", "-1", "x=1", "9" * 5000])
def test_why_of_what_is_no_index_says_so(index: str, plan: Path) -> None:
    done = ucpl("why", plan, f"wte.weight[{index}]")
    assert done.status == 2 and ("error[E181]" in done.err or "error[E182]" in done.err)


def test_why_of_a_plan_whose_layout_is_of_another_model(tmp_path: Path, plan: Path) -> None:
    """A plan that was bent and has a digest of its own.

    Its statements are compared with each other.
    """
    bent = package.load_plan(plan)
    package.save_plan(evolve(bent, tensors=("nosuch", *bent.tensors[1:])), tmp_path / "bent.plan")
    done = ucpl("why", tmp_path / "bent.plan", "nosuch[0]")
    assert done.status == 5 and "error[E351]" in done.err and "no tensor `nosuch`" in done.err


def test_why_of_a_flat_buffer_agrees_with_its_bytes(tmp_path: Path) -> None:
    """The same, of DeepSpeed's optimizer files.

    The element's bytes are read from the storage that the key has.
    """
    from ucpl.api import open_checkpoint
    from ucpl.extents import key_text

    good("plan", "--from", SOURCE, "--to", "zero3(dp=3)", "-o", tmp_path / "some.plan")
    good("apply", tmp_path / "some.plan", SOURCE, tmp_path / "target")
    truth = torch.load(SOURCE / "truth.pt", weights_only=True)["params"]
    sides = {"source": open_checkpoint(SOURCE), "target": open_checkpoint(tmp_path / "target")}
    for name, index in (("wte.weight", (66, 23)), ("blocks.1.mlp.down.weight", (11, 36)), ("ln_f.bias", (23,))):
        text = f"{name}[{', '.join(map(str, index))}]"
        for a in good("why", tmp_path / "some.plan", text, "--state", "exp_avg", "--json").json["from"]:
            for side, opened in sides.items():
                (extent,) = [
                    e
                    for (f, k), e in opened.extents.items()
                    if f == a[f"{side}_file"] and key_text(k) == a[f"{side}_key"]
                ]
                (position,) = a[f"{side}_index"]
                raw = (opened.root / extent.file).read_bytes()[extent.storage_start :]
                stored = torch.frombuffer(bytearray(raw[: extent.storage_bytes]), dtype=torch.float32)
                assert stored[extent.offset + position] == truth[name]["exp_avg"][index], (side, text)


def test_drop_leaves_out_a_state_a_tensor_and_a_key(tmp_path: Path) -> None:
    drops = ["--drop", "exp_avg_sq", "--drop", "foo"]
    done = good("convert", SOURCE, tmp_path / "a.pt", "--to", "plain()", *drops)
    assert "exp_avg_sq" in done.out and "dropped by name" in done.out
    plain = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(plain["params"]["mix"]) == {"weight", "fp32", "exp_avg", "step"}
    assert set(plain["envelope"]["carried"]) == {"rng"}


def test_force_replaces_and_resume_finds_it_done(tmp_path: Path) -> None:
    target = tmp_path / "target"
    good("convert", SOURCE, target, "--to", "zero1(dp=2)")
    first = digest(target)
    assert ucpl("convert", SOURCE, target, "--to", "zero1(dp=2)").status == 4
    assert digest(target) == first
    done = good("convert", SOURCE, target, "--to", "zero1(dp=2)", "--resume", "--json").json
    assert done["report"]["done_before"]
    assert ucpl("convert", SOURCE, target, "--to", "zero1(dp=3)", "--resume").status == 4
    good("convert", SOURCE, target, "--to", "zero1(dp=3)", "--force")
    assert len(list(target.glob("*/*_optim_states.pt"))) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("source", "call", "said"),
    [
        ("moe_ep2_dp2_z1", "universal()", "no place for experts"),
        ("tp2_pp2_dp2_z1_bf16", "zero0(tp=2, pp=2, dp=2)", "has no code that loads one"),
    ],
)
def test_a_dry_run_refuses_what_a_run_does(source: str, call: str, said: str, tmp_path: Path) -> None:
    """Values without a place in the target's form, known only from files."""
    for more in ((), ("--dry-run",)):
        done = ucpl("convert", ROOT / "tests/fixtures/deepspeed" / source, tmp_path / "target", "--to", call, *more)
        assert done.status == 4 and "error[E471]" in done.err and said in done.err
        assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = good("convert", SOURCE, tmp_path / "target", "--to", "zero1(dp=2)", "--dry-run")
    assert "nothing was written" in done.out and list(tmp_path.iterdir()) == []


def test_origins_of_inherited_values_are_printed(tmp_path: Path) -> None:
    out = good("convert", FIXTURES / "z3_dp2_subgroup", tmp_path / "t", "--to", "zero3(dp=3)").out
    assert re.search(r"sub_group_size = 2000: ds_config of \S+", out)
    assert "dp = 3: given" in out


def test_a_carried_object_needs_leave(tmp_path: Path) -> None:
    from tests.golden.recipes import CASES

    argv = CASES["object_of_unknown_class"].make(tmp_path)
    argv = [str(tmp_path / a) if a in ("source", "target") else a for a in argv]
    assert ucpl(*argv).status == 4
    good(*argv, "--allow-global", "my_project.tracking.Tracker")
    target = argv[2]
    unknown = good("inspect", target, "--json").json["unknown_globals"]
    assert unknown == ["my_project.tracking.Tracker"]
    good("compare", argv[1], target)
    dropped = good(*argv, "--force", "--drop", "foo", "--allow-global", "my_project.Tracker")
    assert "--allow-global my_project.Tracker has no effect" in dropped.out
    assert good("inspect", target, "--json").json["unknown_globals"] == []


def test_formats_says_of_each_form_what_its_file_says() -> None:
    import tomllib

    files = {path.stem: tomllib.loads(path.read_text()) for path in (ROOT / "ucpl/formats").glob("*/*.toml")}
    found = json.loads(good("formats", "--json").out)
    assert {one["name"] for one in found["formats"]} == files.keys()
    assert set(found["meanings"]) == {"proved", "compared", "reader", "refused", "later", "no"}
    places = []
    for one in found["formats"]:
        entry = files[one["name"]]
        places.append(entry["place"])
        keys = ("title", "files", "layouts", "states", "parallelism", "releases")
        assert [one[key] for key in keys] == [entry[key] for key in keys]
        assert one["framework"] == entry.get("framework")
        for row, told in zip(entry["row"], one["rows"], strict=True):
            for side in ("read", "written"):
                claim = row.get(side, row.get("both"))
                assert told[side]["is"] == claim["is"] and told[side]["codes"] == claim.get("codes", [])
        assert one["read"] in {row["read"]["is"] for row in one["rows"]}
    assert places == sorted(places)
    every, one_alone = good("formats").out, good("formats", "dcp").out
    assert all(f"{name}: " in every for name in files) and "step-N" not in every
    assert "step-N" in one_alone and "deepspeed:" not in one_alone and "tried with  torch 2.11.0" in one_alone


def test_explain_prints_every_code() -> None:
    from ucpl.errors import catalogue

    for code, entry in catalogue().items():
        text = good("explain", code.lower()).out
        assert entry.meaning in text and entry.remedy in text


def test_fmt_tidies_once(tmp_path: Path) -> None:
    path = tmp_path / "spec.ucpl"
    path.write_text("ucpl 1\nmodel m {\n w:4 8 dtype f32 # a comment\n}\n")
    assert ucpl("fmt", "--check", path).status == 1
    good("fmt", path)
    assert "# a comment" in path.read_text()
    good("fmt", "--check", path)
    assert [p.name for p in tmp_path.iterdir()] == ["spec.ucpl"]


def test_check_finds_what_is_wrong_where(tmp_path: Path) -> None:
    path = tmp_path / "spec.ucpl"
    path.write_text(
        'ucpl 1\nmodel m {\n  w : 4 8 dtype f32\n}\nlayout a() of m {\n  file weights = torch "a.pt"\n  x = 4 as "x"\n}\n'
    )
    done = ucpl("check", path, "--json")
    assert done.status == 1 and done.json["diagnostics"][0]["places"][0]["line"] == 7


@pytest.mark.parametrize("stage", ["resolve", "locate", "build", "order"])
def test_show_prints_each_stage(stage: str) -> None:
    text = good("show", SOURCE, "--after", stage, "--to", "zero3(dp=2)").out
    wanted = {
        "resolve": "tensor     mix : 3 5 f32",
        "locate": "exp_avg    zero_pp_rank_3",
        "build": "merge   exp_avg",
        "order": "moves      exp_avg",
    }
    assert wanted[stage] in text


def test_show_reports_what_is_alike_once_and_each_alone_where_asked(tmp_path: Path) -> None:
    text = 'ucpl 1\nmodel m {\n dim l = 3\n w : l\n}\nlayout x() of m {\n file weights = torch "a"\n w[l] = () as "{l}.w"\n}\n'
    (tmp_path / "m.ucpl").write_text(text)
    assert "a: {0..3}.w [], rank 0  x 3\n" in good("show", f"{tmp_path / 'm.ucpl'}:x()").out
    printed = good("show", f"{tmp_path / 'm.ucpl'}:x()", "--each").out
    assert all(f"a: {i}.w [], rank 0\n" in printed for i in range(3)) and "{" not in printed


def test_show_of_one_rank_shows_that_rank() -> None:
    text = good("show", SOURCE, "--rank", "2").out
    assert "zero_pp_rank_2_mp_rank_00" in text and "zero_pp_rank_1_mp_rank_00" not in text
    assert "module/wte.weight [67, 24], rank 2" in text, "what all ranks hold, this one holds, too"
    assert ucpl("show", SOURCE, "--rank", "4").status == 2


def test_a_plan_statement_knows_the_numbers_of_its_file(tmp_path: Path) -> None:
    good("infer", SOURCE, "-o", tmp_path / "spec.ucpl")
    (tmp_path / "restart.ucpl").write_text(
        'ucpl 1\nfrom "spec.ucpl" import stored\nlet ranks = 2 + 3\nplan grow = stored(dp = 4) -> stored(dp = ranks)\n'
    )
    done = good("plan", tmp_path / "restart.ucpl", "grow", "--json").json["plan"]
    assert done["name"] == "grow" and "dp = 5" in done["target"]


# ---- Python ------------------------------------------------------------------------------------------------------------


def test_the_python_api_does_what_the_verbs_do(tmp_path: Path) -> None:
    done = package.convert(SOURCE, tmp_path / "a", to="zero2(dp=2)")
    assert done.report.bytes_read > 0 and package.compare(SOURCE, tmp_path / "a") and package.verify(tmp_path / "a")
    made = package.plan(str(SOURCE), "zero3(dp=2)")
    package.save_plan(made, tmp_path / "a.plan")
    package.apply(package.load_plan(tmp_path / "a.plan"), SOURCE, tmp_path / "b")
    assert package.compare(tmp_path / "a", tmp_path / "b")
    assert "layout stored(" in package.infer(SOURCE).text()
    with pytest.raises(package.UcplError, match="E437"):
        package.verify(tmp_path / "nowhere")


def test_every_name_of_the_package_is_there() -> None:
    assert all(callable(getattr(package, name)) for name in package.__all__ if name != "__version__")
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError):
        package.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_signals_are_left_alone() -> None:
    """Running a verb in another program changes nothing of that program."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    good("explain", "E500")
    assert [signal.getsignal(number) for number in numbers] == before


class Finalized:
    """An object whose finalizer is interrupted by a signal."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finalizer_is_not_lost() -> None:
    """Python ignores exceptions there: a server that should end would continue."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with end_like_ctrl_c():
            end_if_asked()
            Finalized()
            with pytest.raises(KeyboardInterrupt):
                end_if_asked()
        end_if_asked()
    finally:
        signal.signal(signal.SIGTERM, before)

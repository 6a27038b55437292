"""Convert and prove a shipped DeepSpeed checkpoint of four ranks.

Goes through a .plan file to three ranks of another stage.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import add_json
from ucpl.cli.report import plan_lines, plan_object, run_lines, run_object
from ucpl.errors import Exit, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.planning.plan import Plan
    from ucpl.runtime.counters import Report
    from ucpl.verification.checkpoint import Verdict
    from ucpl.verification.compare import Likeness

EXAMPLE = "ucpl demo\nucpl demo --to 'zero1(dp=8)' --keep converted"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--to", default="zero3(dp=3)", metavar="LAYOUT", help="the target (default: zero3(dp=3))")
    parser.add_argument("--keep", metavar="DST", help="write here, and leave it, instead of in a temporary folder")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.resources import example_folder

    source = example_folder() / "checkpoint"
    if not (source / "latest").is_file():
        fail("E183", f"{source} is not there")
    before = _digest(source)
    with tempfile.TemporaryDirectory(prefix="ucpl-demo-") as name:
        folder = Path(name)
        target = Path(options.keep) if options.keep else folder / "converted"
        plan_file = folder / "demo.plan"
        plan, report = _converted(console, source, target, options.to, plan_file)
        verdict = _verified(console, target)
        likeness, back = _compared(console, source, target, folder)
        unchanged = _digest(source) == before
        good = bool(verdict) and bool(likeness) and bool(back) and unchanged
        what = f"{_short(plan.source_call)} and {_short(plan.target_call)} hold the same state"
        console.say("")
        console.say(
            f"{'proved' if good else 'NOT proved'}: {what}; the source is {'unchanged' if unchanged else 'CHANGED'}"
        )
        if verdict.findings:
            console.diagnostics(verdict.findings)
        console.answer(
            {
                "proved": good,
                "plan": plan_object(plan),
                "report": run_object(report),
                "sound": bool(verdict),
                "equal": bool(likeness),
                "elements": likeness.elements,
                "source_unchanged": unchanged,
            }
        )
    return Exit.DONE if good else Exit.ANSWER_IS_NO


def _converted(console: Console, source: Path, target: Path, to: str, plan_file: Path) -> tuple[Plan, Report]:
    """Write a plan to a file, and run it (steps 1, 2)."""
    from ucpl import api

    console.say(f"1. plan: {source} to {to}, every element proved to have one source")
    made = api.plan(str(source), to, name="demo", prove=True)
    api.save_plan(made, plan_file)
    _say(console, plan_lines(made))
    console.say(f"   {plan_file.name}: {bytes_text(plan_file.stat().st_size)}")
    console.say("", f"2. apply demo.plan: {target.name if target.parent == plan_file.parent else target}")
    plan = api.load_plan(plan_file)
    report = api.apply(plan, source, target)
    _say(console, run_lines(report))
    return plan, report


def _verified(console: Console, target: Path) -> Verdict:
    """Step 3."""
    from ucpl import api

    console.say("", "3. verify: everything is read back, and held against all that vouches for it")
    verdict = api.verify(target)
    whole = verdict.files.bytes_protected + verdict.files.bytes_unprotected
    kept = f"{verdict.files.bytes_protected:,} of {whole:,} bytes are protected by a CRC or the manifest"
    _say(console, [kept, *verdict.notes])
    return verdict


def _compared(console: Console, source: Path, target: Path, folder: Path) -> tuple[Likeness, Likeness]:
    """Convert both sides to plain files, and compare (steps 4, 5)."""
    from ucpl import api

    console.say("", "4. compare: the same logical state as the source?")
    likeness = api.compare(source, target)
    held = f"{likeness.elements:,} elements of {likeness.tensors} tensors, {likeness.values} values next to them"
    _say(console, [f"{held}: {_word(bool(likeness))}", *map(str, likeness.differences)])
    console.say("", "5. there and back: as one plain file, from the source and from the target")
    files = [folder / "source.pt", folder / "target.pt"]
    for one, file in zip((source, target), files, strict=True):
        api.convert(one, file, "plain()")
    back = api.compare(*files)
    _say(console, [_word(bool(back)), *map(str, back.differences)])
    return likeness, back


def _word(equal: bool) -> str:
    return "bit for bit equal" if equal else "different"


def _short(call: str) -> str:
    """`zero2(dp = 4)` of `zero2(dp = 4, bf16 = 0, ...)`."""
    head, comma, _ = call.partition(",")
    return f"{head})" if comma else head


def _say(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.say(f"   {line}")


def _digest(folder: Path) -> str:
    """SHA-256 of every file's name and bytes."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()

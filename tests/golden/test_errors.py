"""The exact messages of everything that must be refused.

Errors/NAME.txt holds the command, the exit status and standard error.

`UCPL_GOLDEN=write` writes the files anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.command import digest, ucpl
from tests.golden.recipes import CASES, Case, is_root
from ucpl.errors import catalogue

ERRORS = Path(__file__).parent / "errors"
WRITE = os.environ.get("UCPL_GOLDEN") == "write"
DESTINATION = ("convert", "apply")


def quoted(argument: str) -> str:
    return f"'{argument}'" if set(argument) & set(" ()[]*") else argument


@pytest.mark.fault(
    "Messages",
    "each refusal: missing ranks, uneven cuts, lossy casts, existing targets, flipped bits",
    "its code, exit status and exact text",
)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.name)
def test_it_is_refused_in_these_words(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.name == "without_permission" and is_root():
        pytest.skip("no permission stops root")
    folder = tmp_path / "here"
    folder.mkdir()
    argv = case.make(folder)
    monkeypatch.chdir(folder)
    if case.forward is not None:
        monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: case.forward)
    before = {p.name: digest(p) for p in folder.iterdir() if case.name != "without_permission"}
    done = ucpl(*argv)
    after = {p.name: digest(p) for p in folder.iterdir() if case.name != "without_permission"}
    assert after == before, "nothing is written, and nothing of the source is changed"
    assert (folder / "target").exists() == case.leaves_target
    assert "Traceback" not in done.err and "internal error" not in done.err
    sentence = done.err.replace(str(folder.resolve()), "$HERE").replace(str(folder), "$HERE")
    text = f"$ ucpl {' '.join(map(quoted, argv))}\n$? = {done.status}\n{sentence}"
    file = ERRORS / f"{case.name}.txt"
    if WRITE:
        ERRORS.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.fault("Messages", "the same", "a code, a place and a remedy")
@pytest.mark.parametrize("name", sorted(CASES))
def test_it_has_a_code_a_place_and_a_remedy(name: str) -> None:
    text = (ERRORS / f"{name}.txt").read_text()
    code = text.partition("error[")[2][:4]
    assert code in catalogue(), text
    assert "--> " in text and "= help: " in text, "a place and what to do"
    status = int(text.split("$? = ")[1].split("\n")[0])
    assert status in (1, 2, 3, 4, 5)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_no_file_is_left_of_a_case_that_is_gone() -> None:
    assert {path.stem for path in ERRORS.glob("*.txt")} == set(CASES)


def test_the_cases_cover_every_exit_status() -> None:
    texts = [path.read_text() for path in ERRORS.glob("*.txt")]
    statuses = {int(text.split("$? = ")[1].split("\n")[0]) for text in texts}
    assert statuses == {1, 2, 3, 4, 5}

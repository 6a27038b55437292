"""`ucpl completion`: the shells themselves complete the words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import good
from ucpl.cli.verbs import VERBS

# words before the cursor: some that the shell offers, and some that it does not
CASES: dict[str, tuple[set[str], set[str]]] = {
    "ucpl ": ({*VERBS}, {"--to"}),
    "ucpl con": ({"convert", "contingency"}, {"compare"}),
    "ucpl convert --": ({"--to", "--from", "--dry-run", "--resume", "--json", "--help"}, {"--quick", "convert"}),
    "ucpl convert a b --to z": ({"zero0", "zero1", "zero2", "zero3"}, {"zip", "dcp"}),
    "ucpl convert a b --read-back ": ({"all", "none"}, {"auto"}),
    "ucpl verify --q": ({"--quick", "--quiet"}, {"--json"}),
    "ucpl formats d": ({"deepspeed", "dcp"}, {"plain"}),
    "ucpl vault s": ({"serve", "status", "scrub"}, {"plan"}),
    "ucpl completion ": ({"bash", "zsh", "fish"}, set()),
}
BASH = """
source {script}
COMP_LINE={line!r} COMP_WORDS=({words}) COMP_CWORD={at}
"$(complete -p ucpl | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def of_bash(line: str, script: Path) -> str:
    words = [*line.split(), ""] if line.endswith(" ") else line.split()
    text = BASH.format(script=script, line=line, words=" ".join(map(repr, words)), at=len(words) - 1)
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True, cwd=script.parent)
    assert done.stderr == ""
    return done.stdout


def of_fish(line: str, script: Path) -> str:
    command = ["fish", "-N", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent)
    return done.stdout


@pytest.mark.parametrize("line", CASES)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_offers_the_words_of_the_parsers(shell: str, line: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"ucpl.{shell}"
    script.write_text(good("completion", shell).out)
    offered = {"bash": of_bash, "fish": of_fish}[shell](line, script)
    words = {one.split("\t")[0] for one in offered.splitlines()}
    some, others = CASES[line]
    assert some <= words and not others & words, offered


def test_a_value_behind_an_equals_sign_is_offered(tmp_path: Path) -> None:
    (tmp_path / "ucpl.bash").write_text(good("completion", "bash").out)
    assert (
        of_bash("ucpl export a b --read-back = n", tmp_path / "ucpl.bash") == "none\n"
    )  # readline's words of --read-back=n


ZSH = """
autoload -Uz compinit && compinit -u -d {folder}/dump
source {script}
"""
TERMINAL = """
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'PROMPT=; cd {folder}; source start; bindkey "^I" complete-word; LISTMAX=1000; echo rea""dy'
zpty -r -m z text '*ready*'
repeat 100; do
    zpty -w -n z $'\\x15ucpl convert a b --read-back no\\t'
    sleep 0.2
    zpty -r -t z text '*--read-back none*' && {{ echo completed; break; }}
done
"""


def test_zsh_completes_a_value(tmp_path: Path) -> None:
    script = tmp_path / "_ucpl"
    script.write_text(good("completion", "zsh").out)
    assert script.read_text().startswith("#compdef ucpl\n")
    if not shutil.which("zsh"):
        pytest.skip("zsh is not installed")
    subprocess.run(["zsh", "-n", str(script)], check=True)
    (tmp_path / "start").write_text("ucpl() { true; }\n" + ZSH.format(folder=tmp_path, script=script))
    done = subprocess.run(
        ["zsh", "-f", "-c", TERMINAL.format(folder=tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("completed\n"), done.stdout + done.stderr

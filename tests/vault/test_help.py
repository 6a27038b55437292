"""The help texts of `ucpl vault` and of each action."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser

import pytest

from ucpl.cli import main
from ucpl.cli import vault_options as vault


def helped(capsys, *words: str) -> str:
    assert main(["vault", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("action", vault.ACTIONS)
def test_the_help_of_an_action_is_of_it_alone(action, capsys):
    out = helped(capsys, action, "--help")
    path = {"plan": "LAYOUT", "drill": "LAYOUT", "gc": "ROOT", "keys": "DIR"}.get(action, "ROOT/JOB")
    usage = " ".join(out.partition("\n\n")[0].split())
    assert usage.startswith(f"usage: ucpl vault {action} [-h] ")
    assert usage.endswith(f" {path} DST" if action in ("restore", "persist") else f" {path}")
    parser = ArgumentParser()
    vault.arguments(parser)
    takes = (*vault._TAKES[action], "json", "help")
    wanted = {n for one in parser._actions if one.dest in takes for n in one.option_strings}
    assert set(re.findall(r"^  (-[\w-]+)", out, re.MULTILINE)) | {"--help"} == wanted | {"--debug"}
    options = out.partition("options:")[2].partition("example:")[0]
    assert not re.search(rf"\b({'|'.join(vault.ACTIONS)})(, \w+)*: ", options)  # an option of all actions names none
    examples = out.partition("example:\n")[2].strip().splitlines()
    assert examples and all(line.startswith(f"  ucpl vault {action} ") for line in ("  " + examples[0], *examples[1:]))


@pytest.mark.parametrize(
    "line", ["restore J out --to x", "restore J --to x out", "restore --to x J out", "--to x restore J out"]
)
def test_options_stand_wherever_one_likes(line):
    parser = ArgumentParser()
    vault.arguments(parser)
    options = parser.parse_args(line.split())
    assert (options.action, options.path, options.target, options.to) == ("restore", "J", "out", "x")


@pytest.mark.parametrize("action", vault.ACTIONS)
def test_what_is_shown_can_be_typed(action):
    for line in vault.EXAMPLES[action].strip().splitlines():
        parser = ArgumentParser(prog="ucpl vault")
        vault.arguments(parser)
        options = parser.parse_args(shlex.split(line)[2:])
        assert options.action == action
        vault.demand_used(options)


def test_the_help_of_all_says_whose_each_option_is(capsys):
    for words in (["--help"], ["-h", "plan"]):
        out = helped(capsys, *words)
        assert "--protect HOW         plan, drill, serve: none, mirror" in out and "--with-state          gc: " in out
        assert all(f"{name}: {what[:20]}" in " ".join(out.split()) for name, what in vault.ACTIONS.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "S.ucpl:s()", "more"], "write ucpl vault plan LAYOUT"),
        (["drill"], "are required: LAYOUT"),
        (["gc"], "are required: ROOT\n"),
        (["gc", "R", "more"], "write ucpl vault gc ROOT\n"),
        (["persist", "J"], "write ucpl vault persist ROOT/JOB DST"),
        (["status", "J", "--sjon"], "ucpl vault status has no option `--sjon`"),
    ],
)
def test_what_is_missing_is_named_as_the_action_names_it(words, said, capsys):
    assert main(["vault", *words]) == 2
    assert said in capsys.readouterr().err

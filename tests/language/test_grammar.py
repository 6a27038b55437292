"""The grammar has no conflicts and no colliding words.

Its tables are only cached in trusted places.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading

import pytest
from lark.exceptions import LarkError

from tests.language.reading import read
from ucpl import resources
from ucpl.language import nodes, parse, parser, print_file
from ucpl.language import tables as reading
from ucpl.language.recorder import Recorder
from ucpl.language.tables import LineJoiner, build, tables

TEXT = "ucpl 1\nlayout x(tp) of any {\n  a = (q: h@tp + k: h)  mean @tp\n}\n"


@pytest.mark.parametrize("version", resources.VERSIONS)
def test_the_grammar_has_no_conflicts_and_no_terminals_that_collide(version):
    build(resources.grammar_text(version), LineJoiner(), None, strict=True)


def test_the_grammar_of_a_version_is_no_longer_and_has_fewer_words() -> None:
    """The language is to become smaller, not larger."""
    texts = [resources.grammar_text(version) for version in resources.VERSIONS]
    lines = [len(text.splitlines()) for text in texts]
    words = [len({*re.findall(r'"([a-z]+)"', text)}) for text in texts]
    assert lines[1] <= lines[0] and words[1] < words[0]


def test_the_grammar_is_no_longer_than_that_of_the_first_version_was() -> None:
    """It had 203 lines of 1,497 words, which a screen shows."""
    text = resources.grammar_text()
    assert len(text.splitlines()) <= 203 and len(text.split()) <= 1497
    assert all(len(line) <= 130 for line in text.splitlines() if not line.startswith(("_NL", "%ignore")))


def test_strict_mode_finds_terminals_that_collide():
    """The test above needs interegular to prove anything.

    Without it lark is silent.
    """
    text = resources.grammar_text()
    colliding = text.replace('policy: "same" | "mean" | "sum" | "any"', "policy: POLICY").replace(
        "LIKE:    ", 'POLICY: "same" | "mean" | "sum" | "any"\nLIKE:    '
    )
    assert colliding.count("POLICY") == 2
    with pytest.raises(LarkError, match="POLICY"):
        build(colliding, LineJoiner(), None, strict=True)


def test_every_rule_has_a_method_and_every_method_a_rule():
    rules = {str(rule.alias or rule.origin.name) for v in resources.VERSIONS for rule in tables(v).lark.rules}
    kept = {r for r in rules if not r.startswith("_")} - {
        "axis",
        "unit",
        "product",
        "sum",
        "rel",
        "negation",
        "conj",
        "expr",
    }
    methods = {m for c in Recorder.__mro__[:-1] for m in vars(c) if not m.startswith("_")} - {
        "begin",
        "span",
        "label",
        "string",
        "word",
    }
    assert kept - {"clause"} == methods


@pytest.fixture
def run(tmp_path):
    """Parse in a separate process with a separate cache.

    Returns the printed text.
    """

    def start(cache, code: str = "") -> str:
        script = (
            f"from ucpl.language import parse, print_file, tables\n{code}\nprint(print_file(parse({TEXT!r})), end='')\n"
        )
        environment = {**os.environ, "UCPL_CACHE": str(cache)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=1800
        )
        assert done.stderr == ""
        return done.stdout

    return start


REFUSE_TO_BUILD = "def no(*a, **k): raise SystemExit('built')\ntables.build = no"


def test_tables_are_kept_and_found_again(run, tmp_path):
    cache = tmp_path / "cache"
    expected = print_file(parse(TEXT))
    assert run(cache) == expected
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) & 0o077 == 0
    json.loads(kept.read_text())
    assert run(cache, REFUSE_TO_BUILD) == expected


@pytest.fixture
def anew(tmp_path, monkeypatch):
    """Parse in this process as in its first call, with that cache.

    The state of the other tests is restored afterwards.
    """
    monkeypatch.setenv("UCPL_CACHE", str(tmp_path))

    def start() -> str:
        for known in (tables, parser._file):
            known.cache_clear()
        return print_file(parse(TEXT))

    yield start
    tables.cache_clear()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"data": {}, "memo": {}}', "\x80\x04N."])
def test_a_broken_cache_does_no_harm_and_is_replaced(anew, tmp_path, monkeypatch, content):
    expected = print_file(parse(TEXT))
    path = reading._cache_path(resources.grammar_text(1))
    assert path is not None
    path.write_text(content)
    assert anew() == expected
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    monkeypatch.setattr(reading, "build", lambda *_: pytest.fail("built again"))
    assert anew() == expected


def test_a_cache_that_others_can_write_is_not_read(run, tmp_path):
    run(tmp_path)
    (kept,) = tmp_path.iterdir()
    for path, mode in [(tmp_path, 0o777), (kept, 0o666)]:
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            run(tmp_path, REFUSE_TO_BUILD)
        assert "built" in caught.value.stderr
        path.chmod(before)
    run(tmp_path, REFUSE_TO_BUILD)


def test_a_cache_that_cannot_be_written_does_no_harm(run, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert run(blocker / "below") == print_file(parse(TEXT))
    assert run("") == print_file(parse(TEXT))


def test_threads_do_not_mix_their_texts():
    texts = [f"ucpl 1\nlayout x{i}(tp) of any {{\n" + f"  a{i} = h{i}\n" * 200 + "}\n" for i in range(4)]
    wrong = []

    def work(i: int) -> None:
        for k in range(5):
            file = read(texts[i], f"{i}.{k}.ucpl")  # under a name of its own: a text that was read before is cached
            names = {(entry.path, entry.span.file) for entry in file.statements[0].items}
            if names != {(f"a{i}", f"{i}.{k}.ucpl")}:
                wrong.append(names)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_shipped_texts_are_found_by_name_and_by_no_other(tmp_path):
    for name, path in resources.spec_files():
        assert resources.spec_text(name) == path.read_text(encoding="utf-8")
    with pytest.raises(KeyError):
        resources.spec_text("../grammar/ucpl.lark")


def test_a_wheel_carries_its_own_data(tmp_path, monkeypatch):
    package = tmp_path / "ucpl"
    for folder, name in [("grammar", "ucpl.lark"), ("specs", "deep/own.ucpl")]:
        path = package / "_data" / folder / name
        path.parent.mkdir(parents=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(resources, "_PACKAGE", package)
    resources.grammar_text.cache_clear()
    resources.spec_files.cache_clear()
    try:
        assert resources.grammar_text() == "# ucpl.lark\n"
        assert [name for name, _ in resources.spec_files()] == ["deep/own.ucpl"]
        assert resources.spec_text("deep/own.ucpl") == "# deep/own.ucpl\n"
    finally:
        resources.grammar_text.cache_clear()
        resources.spec_files.cache_clear()


def test_words_behind_a_path_are_words_of_its_statement_alone() -> None:
    """LALR merges states, so names in a plan's changes need a rule.

    Without this rule of their own, `drop` would be a word behind any path.
    """
    text = (
        'ucpl 1\nlayout x(dp) of m {\n  mesh dp\n  file meta = torch "m"\n'
        "  blob data.loader drop in meta\n  blob a.train keep in meta\n}\n"
        'plan p = x(dp=1) -> x(dp=2) drop a.b, "c.*" freeze d.e train f.g, h in "0" drop i.train\n'
    )
    file = parse(text, "x.ucpl")
    layout, plan = file.statements
    assert isinstance(layout, nodes.Layout) and isinstance(plan, nodes.Plan)
    assert [i.fate for i in layout.items if isinstance(i, nodes.Blob)] == ["drop", "keep"]
    assert plan.drop == ("a.b", "c.*", "i.train")

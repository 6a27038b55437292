"""Pictures of layouts.

Every rank and every tensor is there, areas are as elements are, and a file needs nothing but itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.cli.command import ROOT, good, ucpl
from tests.counted import calls
from tests.pictures.drawn import SVG, Drawn, drawn, elements_of, held_by
from ucpl.conversion.requests import Given, config_at, model_named
from ucpl.conversion.showing import shown
from ucpl.pictures.boxes import framed, joined
from ucpl.pictures.layouts import layout_picture
from ucpl.pictures.svg import layout_svg

MODEL = """ucpl 1
model m {
  dim l = 3, h = 10, v = 14, f = 12, e = 4, unit = 1
  embed  : v h
  norm   : l h
  up     : l f h
  expert : l e f h
  scale  : unit
  seen   : h is buffer
  tail   : v h is frozen
  dtype f32
  state fp32, exp_avg : f32
}
layout meshed(tp, pp, dp, ep = 2) of m {
  mesh pp dp tp
  mesh experts: pp ep edp
  let edp = dp * tp / ep
  index l = l@spread(pp)
  index e = e@ep
  file weights = torch "w_{tp}_{pp}.pt"
  file optim   = torch "o_{dp}_{tp}_{pp}.pt"
  file moe     = torch "e_{ep}_{pp}.pt"
  embed   = pad(v, 4 * tp)@tp h  at pp[0] as "embed"
  norm[l] = h       as "norm.{l}"
  up[l]   = f@tp h  as "up.{l}"
  expert[l, e] = f h  in moe as "expert.{l}.{e}"
  scale = unit  as "scale"
  seen  = h  as "seen"
  tail  = v h@tp  as "tail"
  group dense = embed, norm, up, scale
  group sparse = expert
  state * of dense = pad(flat(each), 2 * dp)@dp  in optim as "{state}"
  state * of sparse = like  in moe as "{state}.{l}.{e}"
}
"""
CALLS = [
    "zero0(dp=3)", "zero1(dp=4)", "zero2(dp=3, tp=2)", "zero3(dp=4)", "universal()", "plain()", "safetensors()",
    "dcp(fsdp=4)", "dcp(fsdp=2, tp=2)", "spec.ucpl:meshed(tp=2, pp=2, dp=2)", "spec.ucpl:meshed(tp=1, pp=3, dp=4, ep=4)",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.ucpl").write_text(MODEL)
    return tmp_path


def picture_of(call: str) -> tuple[str, dict[tuple[str, str, int], Drawn], int]:
    model = [] if "spec" in call else ["--model", "spec.ucpl:m"]
    good("show", call, *model, "--svg", "out.svg")
    svg = Path("out.svg").read_text()
    given = Given(model=model_named("spec.ucpl:m", {})) if model else Given()
    return svg, drawn(svg), shown(call, None, given, None)[0].layout.ranks


@pytest.mark.parametrize("call", CALLS)
def test_each_rank_and_tensor_is_there_and_areas_are_right(here: Path, call: str) -> None:
    svg, found, ranks = picture_of(call)
    model = [] if "spec" in call else ["--model", "spec.ucpl:m"]
    given = Given(model=model_named("spec.ucpl:m", {})) if model else Given()
    placement = shown(call, None, given, None)[0].placement
    layout = placement.layout
    held = held_by(placement, ranks)
    assert {t for t, _ in held} == {t for t, _, _ in found}
    seen = set()
    for (tensor, states, depth), level in found.items():
        unit = level.paper / level.elements
        for title, area in level.areas.items():
            assert area == pytest.approx(elements_of(title.split("\n")[1]) * unit, rel=1e-3), (tensor, states)
        if depth == 0:
            assert level.elements == layout.tensors[tensor].numel
            assert sum(level.areas.values()) == pytest.approx(level.paper, rel=1e-3), (tensor, states)
            for state in states.split():
                seen.add((tensor, state))
                told = level.ranks(ranks)
                assert told == held[tensor, state], (tensor, state)
    assert seen == set(held)
    rows = [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text") if t.attrib.get("class") == "label"]
    assert [int(r) for text in rows for r in re.findall(r"^rank (\d+)", text)] == list(range(ranks))


SHIPPED = [
    ("llama.ucpl:megatron(tp=2, pp=2)", "tests/formats/huggingface/written/llama/config.json"),
    ("llama.ucpl:torch_dist(tp=2, pp=2)", "tests/formats/huggingface/written/llama/config.json"),
    ("deepseek_v3.ucpl:megatron(tp=2, pp=2, ep=2)", "examples/architectures/checkpoints/deepseek_v3/config.json"),
    ("gpt_oss.ucpl:megatron(tp=2, pp=2, ep=2)", "examples/architectures/checkpoints/gpt_oss/config.json"),
]


@pytest.mark.parametrize(("call", "config"), SHIPPED)
def test_shipped_architectures_are_drawn_complete(here: Path, call: str, config: str) -> None:
    good("show", call, "--config", ROOT / config, "--svg", "out.svg")
    placement = shown(call, None, Given(config=config_at(ROOT / config)), None)[0].placement
    layout, told = placement.layout, Path("out.svg").read_text()
    held = held_by(placement, layout.ranks)
    found = {(t, states): level for (t, states, depth), level in drawn(told).items() if not depth}
    names = {
        name for title in re.findall(r'<text class="name"[^>]*>[^<]*<title>([^<]*)', told) for name in title.split("\n")
    }
    assert {t for t, _ in found} | names >= {t for t, _ in held}
    for (tensor, states), level in found.items():
        assert sum(level.areas.values()) == pytest.approx(level.paper, rel=1e-3), tensor
        assert level.ranks(layout.ranks) == held[tensor, states.split()[0]], tensor


def test_parts_of_several_ranks_are_no_copies(here: Path) -> None:
    Path("many.ucpl").write_text(
        "ucpl 1\nmodel m {\n  dim r = 120, c = 2\n  w : r c\n}\n"
        'layout cut(dp) of m {\n  mesh dp\n  file weights = torch "{dp}.pt"\n  w = r@dp c as "w"\n}\n'
    )
    good("show", "many.ucpl:cut(dp=60)", "--svg", "out.svg")
    svg = Path("out.svg").read_text()
    assert "0..4, in 4 parts" in svg and "ranks 0, 1, 2, 3, cut into 4 parts" in svg


def test_hovering_says_elements_rank_file_and_key(here: Path) -> None:
    _, found, _ = picture_of("spec.ucpl:meshed(tp=2, pp=2, dp=2)")
    titles = [
        t for (tensor, states, _), level in found.items() if (tensor, states) == ("up", "weight") for t in level.areas
    ]
    assert (
        "up[l=2, f=6..12, h=0..10]\n60 elements of weight\nranks 5, 7, each with all of it\nfile w_1_1.pt: up.2"
        in titles
    )


def test_a_file_asks_for_nothing_and_does_nothing(here: Path) -> None:
    svg, _, _ = picture_of("zero1(dp=4)")
    assert not re.search(r"<script|<image|<foreignObject|href|@import|src=|\bon\w+=|javascript:", svg)
    assert re.findall(r"https?://[^\"' ]*", svg) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"url\(([^)]*)\)", svg)) <= {f"#p{n}" for n in [*map(str, range(32)), "k"]}
    assert "prefers-color-scheme:dark" in svg


def test_names_are_escaped(here: Path) -> None:
    evil = '<script>alert(1)</script>" onload="x\u202e&\u0007'
    quoted = "".join(c if c.isprintable() and c != '"' else f"\\u{{{ord(c):x}}}" for c in evil)
    Path("evil.ucpl").write_text(
        f'ucpl 1\nmodel m {{\n  dim r = 4\n  "{quoted}" : r\n  point : ()\n}}\n'
        f'layout x() of m {{\n  file weights = torch "a.pt"\n  "{quoted}" = r as "k<&>"\n  point = () as "p"\n}}\n'
    )
    good("show", "evil.ucpl:x()", "--svg", "evil.svg")
    svg = Path("evil.svg").read_text()
    assert "<script" not in svg and "\u202e" not in svg and "\u0007" not in svg
    root = ElementTree.fromstring(svg)
    group, point = root.iter(f"{SVG}g")
    assert group.attrib["data-tensor"] == evil.replace("\u202e", "\ufffd").replace("\u0007", "\ufffd")
    assert point.attrib["data-elements"] == "1"
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)


def test_of_one_rank_what_it_holds(here: Path) -> None:
    good("show", "zero1(dp=4)", "--model", "spec.ucpl:m", "--rank", "2", "--svg", "out.svg")
    found = drawn(Path("out.svg").read_text())
    titles = [t for level in found.values() for t in level.areas]
    assert {t.split("\n")[2] for t in titles} == {"rank 2"}
    held = next(level for (tensor, states, _), level in found.items() if tensor == "expert" and "fp32" in states)
    assert 0 < sum(held.areas.values()) < held.paper


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--after", "resolve"], "E171"), (["--to", "zero1(dp=2)"], "E171"), (["--each"], "E171"),
        (["--rank", "9"], "E180"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(here: Path, more: list[str], code: str) -> None:
    done = ucpl("show", "zero1(dp=4)", "--model", "spec.ucpl:m", "--svg", "out.svg", *more)
    assert done.status == 2 and f"error[{code}]" in done.err and not Path("out.svg").exists()


def test_a_picture_that_cannot_be_written_leaves_nothing(here: Path) -> None:
    done = ucpl("show", "zero1(dp=4)", "--model", "spec.ucpl:m", "--svg", "no/such/folder/out.svg")
    assert done.status == 4 and "error[E179]" in done.err


def test_four_thousand_ranks_are_pictures_of_bounded_size() -> None:
    text = f"{ROOT / 'benchmarks' / 'llama.ucpl'}:megatron(tp = 8, pp = 8, dp = 64)"
    placement = shown(text, None, Given(), None)[0].placement
    picture = layout_picture(placement)
    assert calls(lambda: layout_picture(placement)) < 4_000_000  # 4,096 ranks
    svg = layout_svg(picture)
    assert len(svg) < 1_000_000
    found = drawn(svg)
    for (tensor, states, depth), level in found.items():
        assert len(level.areas) <= 128, (tensor, states)
        assert sum(level.areas.values()) == pytest.approx(level.paper, rel=1e-3) or depth
    # From all ranks down to single ones: hovering a cell of the last level names one.
    deepest = max(depth for tensor, states, depth in found if (tensor, "fp32" in states) == ("up", True))
    (last,) = (level for (t, s, d), level in found.items() if (t, d) == ("up", deepest) and "fp32" in s)
    assert {title.split("\n")[2].split()[0] for title in last.areas} == {"rank"}


def test_boxes_that_are_side_by_side_become_one() -> None:
    group = np.array([0, 0, 0, 0, 1])
    low = np.array([[0, 0], [0, 2], [1, 0], [1, 2], [0, 0]])
    _, a, b = joined(group, low, low + np.array([1, 2]))
    assert sorted(zip(a.tolist(), b.tolist(), strict=True)) == [([0, 0], [1, 2]), ([0, 0], [2, 4])]


def test_a_matrix_cut_by_columns_is_cut_so_in_the_picture() -> None:
    """Layers side by side; a stage's columns of all layers as one."""
    low, high = (
        np.array([[0, 0, 0], [0, 0, 4], [1, 0, 0], [1, 0, 4]]),
        np.array([[1, 6, 4], [1, 6, 8], [4, 6, 4], [4, 6, 8]]),
    )
    frame = framed(np.arange(4), low, high, (4, 6, 8), (0,))
    assert frame.places.tolist() == [
        [0.0, 0.0, 0.125, 1.0], [0.125, 0.0, 0.125, 1.0], [0.25, 0.0, 0.375, 1.0], [0.625, 0.0, 0.375, 1.0],
    ]  # fmt: skip

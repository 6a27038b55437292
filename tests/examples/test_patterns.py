"""The paper's patterns, each an example of its own.

Its text, its placement, there and back through other degrees.
"""

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.language import nodes, parse, print_axis

PATTERNS = Path(__file__).parents[2] / "examples" / "patterns"


def spec(name: str, layout: str) -> str:
    return f"{PATTERNS / f'{name}.ucpl'}:{layout}"


def write(folder: Path, value: dict) -> Path:
    folder.mkdir(parents=True)
    torch.save(value, folder / "model.pt")
    return folder


def read(folder: Path, name: str) -> dict:
    return torch.load(folder / name, weights_only=True)


def parts(tmp_path, name, layout, value) -> Path:
    """The full tensors as the layout's ranks hold them.

    And they come back, from there and by way of other degrees.
    """
    write(tmp_path / "whole", value)
    ucpl.convert(tmp_path / "whole", tmp_path / "parts", spec(name, layout), layout=spec(name, "whole()"))
    ucpl.convert(tmp_path / "parts", tmp_path / "back", spec(name, "whole()"), layout=spec(name, layout))
    found = read(tmp_path / "back", "model.pt")
    assert set(found) == set(value) and all(same(found[n], value[n]) for n in value)
    return tmp_path / "parts"


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


def other_degrees(tmp_path, name, one, two, value):
    ucpl.convert(tmp_path / "parts", tmp_path / "other", spec(name, two), layout=spec(name, one))
    ucpl.convert(tmp_path / "other", tmp_path / "round", spec(name, "whole()"), layout=spec(name, two))
    found = read(tmp_path / "round", "model.pt")
    assert all(same(found[n], value[n]) for n in value)


def counted(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


# ---- the texts of lines ------------------------------------------------------------------------------------------------

SAYS = {
    ("unique", "parts", "embed"): (["v", "h"], [("at", "pp")]),
    ("unique", "parts", "layer"): (["h"], []),
    ("replicated", "parts", "norm"): (["h"], []),
    ("replicated", "parts", "bias"): (["h"], [("copies", ("any", ("tp",)))]),
    ("to_average", "parts", "norm"): (["h"], [("copies", ("mean", ("tp",)))]),
    ("to_average", "addends", "norm"): (["h"], [("copies", ("sum", ("tp",)))]),
    ("by_column", "parts", "w"): (["out@tp", "in_"], []),
    ("by_column", "uneven", "w"): (["out@spread(tp)", "in_"], []),
    ("by_row", "parts", "w"): (["out", "in_@tp"], []),
    ("by_several", "parts", "up"): (["e@ep", "out@tp", "in_"], []),
    ("by_several", "parts", "mix"): (["out@tp@ep", "in_"], []),
    ("non_consecutive", "parts", "qkv"): (["(q: g@tp r d + k: g@tp d + v: g@tp d)", "h"], []),
    ("non_consecutive", "interleaved", "qkv"): (["(g (q: r d + k: d + v: d))@tp", "h"], []),
}


@pytest.mark.parametrize("name, layout, tensor", SAYS)
def test_a_line_is_the_record_that_is_meant(name, layout, tensor):
    file = parse((PATTERNS / f"{name}.ucpl").read_text(), name)
    (found,) = [s for s in file.statements if isinstance(s, nodes.Layout) and s.name == layout]
    (entry,) = [i for i in found.items if isinstance(i, nodes.Entry) and i.path == tensor]
    axes, clauses = SAYS[name, layout, tensor]
    assert [print_axis(a) for a in entry.shape or ()] == axes
    said = [(c.word, c.args if c.word == "copies" else c.args[0]) for c in entry.clauses if c.word != "as"]
    assert said == clauses


@pytest.mark.parametrize("path", sorted(PATTERNS.glob("*.ucpl")), ids=lambda p: p.stem)
def test_every_example_is_tidy_checked_and_goes_round(path, capsys):
    assert main(["fmt", "--check", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    only = ":parts" if path.stem == "to_average" else ""  # partial sums have no way back
    assert main(["roundtrip", f"{path}{only}", "--examples", "8"]) == 0
    assert "->" in capsys.readouterr().out
    assert "ucpl convert" in path.read_text()


def test_all_of_the_paper_s_patterns_are_here():
    wanted = {"unique", "replicated", "to_average", "by_column", "by_row", "by_several", "non_consecutive"}
    assert {p.stem for p in PATTERNS.glob("*.ucpl")} == wanted == {name for name, _, _ in SAYS}


# ---- the placement, in plain torch -------------------------------------------------------------------------------------


def test_unique(tmp_path):
    value = {"embed": counted(7, 5), "layers": [counted(5) + 100 * i for i in range(6)], "norm": -counted(5)}
    made = parts(tmp_path, "unique", "parts(pp = 2)", value)
    first, last = read(made, "stage_0.pt"), read(made, "stage_1.pt")
    assert set(first) == {"embed", "layers"} and set(last) == {"layers", "norm"}
    assert same(first["layers"], value["layers"][:3]) and same(last["layers"], value["layers"][3:])
    other_degrees(tmp_path, "unique", "parts(pp = 2)", "parts(pp = 3)", value)


def test_replicated(tmp_path):
    value = {"norm": counted(6), "bias": -counted(6)}
    made = parts(tmp_path, "replicated", "parts(tp = 3)", value)
    for rank in range(3):
        assert all(same(read(made, f"rank_{rank}.pt")[n], value[n]) for n in value)
    other_degrees(tmp_path, "replicated", "parts(tp = 3)", "parts(tp = 2)", value)

    changed = read(made, "rank_2.pt")
    changed["bias"][4] += 1  # `any`: the first rank's is trusted
    torch.save(changed, made / "rank_2.pt")
    ucpl.convert(made, tmp_path / "trusted", spec("replicated", "whole()"), layout=spec("replicated", "parts(tp = 3)"))
    assert same(read(tmp_path / "trusted", "model.pt")["bias"], value["bias"])

    changed["norm"][4] += 1  # `same`: refused, with the element, both files and both values
    torch.save(changed, made / "rank_2.pt")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(made, tmp_path / "not", spec("replicated", "whole()"), layout=spec("replicated", "parts(tp = 3)"))
    (found,) = caught.value.diagnostics
    assert found.code == "E613" and "[4]" in found.message
    assert [(x.file, x.text[:3]) for x in found.labels] == [("rank_0.pt", "5.0"), ("rank_2.pt", "6.0")]
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("word, layout", [("mean", "parts"), ("sum", "addends")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drifted_copies_are_added_in_fp64_in_order_of_the_ranks_and_rounded_once(word, layout, ranks, dtype, tmp_path):
    big = 2.0**53  # in fp64, 2^53 + 1 is 2^53: an order other than the ranks' gives another sum
    values = [[1.0, big, 3.0, 0.1, -0.0, 1e-30], [2.0, 1.0, 5.0, 0.2, -0.0, 1e30], [4.0, -big, 7.0, 0.7, -0.0, -1e30]][
        :ranks
    ]
    copies = [torch.tensor(v).to(dtype) for v in values]
    made = tmp_path / "parts"
    made.mkdir()
    for rank, copy in enumerate(copies):
        torch.save({"norm": copy}, made / f"rank_{rank}.pt")
    total = torch.zeros(6, dtype=torch.float64)
    for copy in copies:
        total = total + copy.double()
    want = (total / ranks if word == "mean" else total).to(dtype)
    assert ranks == 2 or total[1] == 0  # and not 1, as in another order
    for workers in (1, 3):
        folder = tmp_path / f"whole{workers}"
        here = spec("to_average", f"{layout}(tp = {ranks})")
        ucpl.convert(made, folder, spec("to_average", "whole()"), layout=here, workers=workers)
        found = read(folder, "model.pt")["norm"]
        assert found.dtype == dtype and torch.equal(found, want)


def test_a_mean_goes_round_as_equal_copies_and_a_sum_is_never_written(tmp_path):
    value = {"norm": counted(6)}
    made = parts(tmp_path, "to_average", "parts(tp = 3)", value)
    assert all(same(read(made, f"rank_{rank}.pt")["norm"], value["norm"]) for rank in range(3))
    other_degrees(tmp_path, "to_average", "parts(tp = 3)", "parts(tp = 2)", value)
    with pytest.raises(UcplError) as caught:
        ucpl.convert(
            tmp_path / "whole",
            tmp_path / "x",
            spec("to_average", "addends(tp = 2)"),
            layout=spec("to_average", "whole()"),
        )
    assert caught.value.diagnostics[0].code == "E311"


@pytest.mark.parametrize("name, dim", [("by_column", 0), ("by_row", 1)])
def test_one_dim(name, dim, tmp_path):
    value = {"w": counted(*((12, 5) if dim == 0 else (5, 12))), "b": -counted(12 if dim == 0 else 5)}
    made = parts(tmp_path, name, "parts(tp = 3)", value)
    for rank in range(3):
        found = read(made, f"rank_{rank}.pt")
        assert same(found["w"], value["w"].chunk(3, dim)[rank].contiguous())
        assert same(found["b"], value["b"].chunk(3)[rank] if dim == 0 else value["b"])
    other_degrees(tmp_path, name, "parts(tp = 3)", "parts(tp = 4)", value)


def test_an_uneven_cut_is_refused_or_reported(tmp_path):
    value = {"w": counted(12, 5), "b": -counted(12)}
    with pytest.raises(UcplError) as caught:
        parts(tmp_path / "a", "by_column", "parts(tp = 5)", value)
    assert caught.value.diagnostics[0].code == "E204"
    made = parts(tmp_path / "b", "by_column", "uneven(tp = 5)", value)
    assert [len(read(made, f"rank_{r}.pt")["b"]) for r in range(5)] == [3, 3, 2, 2, 2]


def test_several_dims(tmp_path):
    value = {"up": counted(4, 12, 5), "mix": -counted(12, 5)}
    made = parts(tmp_path, "by_several", "parts(tp = 3, ep = 2)", value)
    for ep in range(2):
        for tp in range(3):
            found = read(made, f"rank_{ep}_{tp}.pt")
            assert same(found["up"], value["up"].chunk(2, 0)[ep].chunk(3, 1)[tp].contiguous())
            assert same(found["mix"], value["mix"].chunk(3)[tp].chunk(2)[ep])
    other_degrees(tmp_path, "by_several", "parts(tp = 3, ep = 2)", "parts(tp = 1, ep = 4)", value)


@pytest.mark.parametrize("layout", ["parts", "interleaved"])
def test_non_consecutive(layout, tmp_path):
    q, k, v = counted(24, 5), 1000 + counted(12, 5), 2000 + counted(12, 5)
    value = {"qkv": torch.cat([q, k, v])}
    made = parts(tmp_path, "non_consecutive", f"{layout}(tp = 3)", value)
    for rank in range(3):
        if layout == "parts":
            want = torch.cat([x.chunk(3)[rank] for x in (q, k, v)])
        else:
            groups = [torch.cat([q[4 * i : 4 * i + 4], k[2 * i : 2 * i + 2], v[2 * i : 2 * i + 2]]) for i in range(6)]
            want = torch.cat(groups).chunk(3)[rank]
        assert same(read(made, f"rank_{rank}.pt")["qkv"], want)
    other_degrees(tmp_path, "non_consecutive", f"{layout}(tp = 3)", f"{layout}(tp = 2)", value)
    ucpl.convert(
        tmp_path / "parts", tmp_path / "z", spec("non_consecutive", "interleaved(tp = 6)"),
        layout=spec("non_consecutive", f"{layout}(tp = 3)"),
    )  # fmt: skip
    assert same(read(tmp_path / "z", "rank_5.pt")["qkv"], torch.cat([q[20:], k[10:], v[10:]]))

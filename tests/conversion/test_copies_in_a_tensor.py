"""Copies inside one stored tensor: `copies(n)` against numpy.repeat and numpy.tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucpl
from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given

G, R, D, H = 4, 3, 2, 5
TEXT = f"""ucpl 2
model heads {{
  dim l = 2, g = {G}, r = {R}, d = {D}, h = {H}
  dtype f32
  q       : l g r d h
  k       : l g d h
  b       : g d
  state m : f32
}}

layout grouped() of heads {{
  framework torch()
  file weights = torch "w.pt"
  file optim   = torch "o.pt"
  q[l] = (g r d) h  as "q.{{l}}"
  k[l] = (g d) h    as "k.{{l}}"
  b    = (g d)      as "b"
  state m = like    as "m/{{key}}"
}}

layout single(tp) of heads {{
  framework torch()
  mesh tp
  file weights = torch "w{{tp}}.pt"
  file optim   = torch "o{{tp}}.pt"
  qk[l] = (q: g@tp r d + k: (g copies(r))@tp d) h  as "qk.{{l}}"
  b     = (copies(2) g d)                          as "b"
  state m = flat(each)                             as "m"
}}

layout padded() of heads {{
  framework torch()
  file weights = torch "p.pt"
  file optim   = torch "o.pt"
  q[l]    = (g r d) h                       as "q.{{l}}"
  k[l]    = (g + g[-1] copies(2)) d h       as "k.{{l}}"
  b       = pad((g copies(2) d), 20)        as "b"
  state m = like                            as "m/{{key}}"
}}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "heads.ucpl"
    path.write_text(TEXT)
    return path


@pytest.fixture
def grouped(tmp_path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint with one head of keys for each group."""
    rng = np.random.default_rng(0)
    shapes = {f"{t}.{i}": ((G * R if t == "q" else G) * D, H) for t in "qk" for i in range(2)} | {"b": (G * D,)}
    out: dict[str, np.ndarray[Any, Any]] = {}
    (tmp_path / "grouped").mkdir()
    for file, wrap in (("w.pt", "{}"), ("o.pt", "m/{}")):
        mine = {wrap.format(k): rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
        out |= mine
        tree: dict[str, Any] = {}
        for key, value in mine.items():
            *path, last = key.split("/")
            (tree.setdefault(path[0], {}) if path else tree)[last] = torch.from_numpy(value)
        torch.save(tree, tmp_path / "grouped" / file)
    return out


def heads(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1, D, *array.shape[1:])


def expected(whole: dict[str, np.ndarray[Any, Any]], wrap: str, tp: int, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of one rank, by numpy.repeat and numpy.split."""
    out: dict[str, np.ndarray[Any, Any]] = {}
    for i in range(2):
        q, k = (heads(whole[wrap.format(f"{t}.{i}")]) for t in "qk")
        parts = [np.split(q, tp)[rank], np.split(np.repeat(k, R, axis=0), tp)[rank]]
        out[f"qk.{i}"] = np.concatenate(parts).reshape(-1, H)
    return out | {"b": np.tile(whole[wrap.format("b")], 2)}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_heads_are_repeated_as_numpy_repeats_them(spec: Path, grouped: dict[str, Any], tmp_path: Path, tp: int) -> None:
    """Ranks have three heads of keys each if tp is 4."""
    call = f"{spec}:single(tp = {tp})"
    ucpl.convert(tmp_path / "grouped", tmp_path / "single", to=call, layout=f"{spec}:grouped()")
    for rank in range(tp):
        found = torch.load(tmp_path / "single" / f"w{rank}.pt")
        want = expected(grouped, "{}", tp, rank)
        assert found.keys() == want.keys()
        assert all(np.array_equal(found[k].numpy(), v) for k, v in want.items())
        (flat,) = torch.load(tmp_path / "single" / f"o{rank}.pt").values()
        moments = expected(grouped, "m/{}", tp, rank)
        assert np.array_equal(flat.numpy(), np.concatenate([moments[k].ravel() for k in ("qk.0", "qk.1", "b")]))
    told = call if tp > 1 else None  # else by the text that the target carries
    ucpl.convert(tmp_path / "single", tmp_path / "back", to=f"{spec}:grouped()", layout=told)
    back = torch.load(tmp_path / "back/w.pt") | {
        f"m/{k}": v for k, v in torch.load(tmp_path / "back/o.pt")["m"].items()
    }
    assert back.keys() == grouped.keys()
    assert all(np.array_equal(back[k].numpy(), v) for k, v in grouped.items())


def test_a_head_of_padding_is_a_copy_of_the_last(spec: Path, grouped: dict[str, Any], tmp_path: Path) -> None:
    ucpl.convert(tmp_path / "grouped", tmp_path / "p", to=f"{spec}:padded()", layout=f"{spec}:grouped()")
    found = torch.load(tmp_path / "p/p.pt")
    for i in range(2):
        k = heads(grouped[f"k.{i}"])
        assert np.array_equal(found[f"k.{i}"].numpy(), np.concatenate([k, k[-1:], k[-1:]]))
    b = np.repeat(grouped["b"].reshape(G, D), 2, axis=0).ravel()
    assert np.array_equal(found["b"].numpy(), np.concatenate([b, np.zeros(4, dtype=np.float32)]))


@pytest.mark.parametrize("tensor", ["qk.1", "b"])
def test_copies_that_differ_are_an_error(spec: Path, grouped: dict[str, Any], tmp_path: Path, tensor: str) -> None:
    call = f"{spec}:single(tp = 2)"
    ucpl.convert(tmp_path / "grouped", tmp_path / "single", to=call, layout=f"{spec}:grouped()")
    path = tmp_path / "single/w1.pt"
    found = torch.load(path)
    found[tensor].view(-1)[-1] += 1
    torch.save(found, path)
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.convert(tmp_path / "single", tmp_path / "back", to=f"{spec}:grouped()", layout=call)
    (found,) = caught.value.diagnostics
    said = ucpl.verify(tmp_path / "single", layout=call).findings
    where = "[23, 4] of qk.1" if tensor == "qk.1" else "[15] of b"
    assert found.code == "E613" and f"{where} in w1.pt" in found.message
    assert ["copies differ" in d.message for d in said if d.code == "E700"] == [True]
    assert ("if each was trained, they are dims" in found.remedy) == (tensor == "qk.1"), "the other rank has b, too"
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("k[l] = (g d) (h + h)", "E304", "are a factor: (g copies(2) d)"),
        ("k[l] = (k: g d + k: g d) h", "E304", "are a factor: (g copies(2) d)"),
        ("k[copies(2)] = (l g d) h", "E138", "here write [l]"),
        ("k[l] = (g[..2] copies(2) d) h", "E313", ""),
        ("k[l] = (g copies(0) d) h", "E145", "from 1"),
        ("k[l] = (g copies() d) h", "E001", "`copies` has a number"),
        ("k[l] = (g copies d) h", "E001", "`copies` has a number"),
        ("index l = (l copies(2))", "E138", "inside one stored tensor"),
        ("state m = flat(pad((each copies(2)), 4))", "E158", ""),
    ],
)
def test_copies_in_a_place_without_elements_are_refused(tmp_path: Path, line: str, code: str, said: str) -> None:
    """Each refusal has a remedy."""
    text = TEXT.replace(
        '  k[l] = (g d) h    as "k.{l}"\n', f'  {line}  as "k.{{l}}"\n' if "index" not in line else f"  {line}\n", 1
    )
    assert text != TEXT
    (tmp_path / "x.ucpl").write_text(text)
    (found,) = check(str(tmp_path / "x.ucpl"), Given()).findings
    assert (found.code, bool(found.remedy)) == (code, True)
    assert said in found.remedy

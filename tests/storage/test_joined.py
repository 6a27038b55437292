"""Several paths as one source, `MODEL+OPTIMIZER`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.cli.command import ucpl as command
from ucpl.errors import UcplError
from ucpl.storage.joined import paths_in


def run() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Three steps of a model with parameters of four shapes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def files(a: Path, b: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Path, Path]:
    torch.save(model.state_dict(), a / "w.pt")
    torch.save(optimizer.state_dict(), b / "o.pt")
    return a / "w.pt", b / "o.pt"


def namesakes(a: Path, b: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Path, Path]:
    torch.save({"model": model.state_dict(), "epoch": 4}, a / "x.pt")
    torch.save({"optimizer": optimizer.state_dict(), "best": 0.5}, b / "x.pt")
    return a / "x.pt", b / "x.pt"


def safetensors(a: Path, b: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Path, Path]:
    save_file(model.state_dict(), a / "model.safetensors")
    torch.save({"optimizer": optimizer.state_dict(), "best": 0.5}, b / "o.pt")
    return a, b / "o.pt"


def pickled(a: Path, b: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Path, Path]:
    torch.save(model.state_dict(), a / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), b / "optimizer.bin")
    return a, b


def chunks(a: Path, b: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Path, Path]:
    weights, states = get_state_dict(model, optimizer)
    save(weights, checkpoint_id=a, no_dist=True)
    save(states, checkpoint_id=b, no_dist=True)
    return a, b


Writer = Callable[[Path, Path, torch.nn.Module, torch.optim.Optimizer], tuple[Path, Path]]


def written(path: Path, by: Writer) -> tuple[str, dict[str, Any], torch.optim.Optimizer]:
    (path / "a+b").mkdir(parents=True)
    (path / "c").mkdir()
    model, optimizer = run()
    one, other = by(path / "a+b", path / "c", model, optimizer)
    return f"{one}+{other}", dict(model.named_parameters()), optimizer


def assert_run(path: Path, named: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    held = torch.load(path, weights_only=True)
    assert held["params"].keys() == named.keys()
    for name, p in named.items():
        mine = held["params"][name]
        assert torch.equal(mine["weight"], p.detach())
        assert all(torch.equal(mine[s], optimizer.state[p][s]) for s in ("exp_avg", "exp_avg_sq"))
    return dict(held)


@pytest.mark.parametrize("by", [files, namesakes, safetensors, pickled, chunks])
def test_model_and_optimizer_are_one_source(by: Writer, tmp_path: Path) -> None:
    source, named, optimizer = written(tmp_path, by)
    ucpl.convert(source, tmp_path / "z", "zero2(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "p.pt", "plain()")
    held = assert_run(tmp_path / "p.pt", named, optimizer)
    if by in (namesakes, safetensors):
        assert "0.5" in str(held)
    if by is namesakes:
        assert "'epoch': 4" in str(held)
    ucpl.apply(ucpl.plan(source, "plain()"), source, tmp_path / "q.pt")
    assert_run(tmp_path / "q.pt", named, optimizer)


def test_the_command_line_names_the_users_paths(tmp_path: Path) -> None:
    source, named, optimizer = written(tmp_path, files)
    done = command("convert", source, tmp_path / "p.pt", "--to", "plain()")
    assert done.status == 0, done.err
    assert source in (printed := command("inspect", source).out) and "joined" not in printed, printed
    assert_run(tmp_path / "p.pt", named, optimizer)
    done = command("convert", source + "x", tmp_path / "q.pt", "--to", "plain()")
    assert done.status == 3 and "E437" in done.err and "o.ptx of" in done.err.replace("\n", " ")


def test_a_target_on_one_of_the_paths_is_refused(tmp_path: Path) -> None:
    source, *_ = written(tmp_path, files)
    for part in source.rsplit("+", 1):
        with pytest.raises(UcplError, match=r"E507.*inside"):
            ucpl.convert(source, part, "plain()", force=True)


def test_a_sign_in_a_name_joins_nothing(tmp_path: Path) -> None:
    for name in ("a", "b", "a+b", "c+d"):
        (tmp_path / name).touch()
    here = f"{tmp_path}/"
    assert paths_in(f"{here}a+b") == () and paths_in(f"{here}a") == ()
    assert paths_in(f"{here}c+d+{here}a") == (f"{here}c+d", f"{here}a")
    assert paths_in("s3://x/a+b") == ("s3://x/a+b",)
    assert paths_in("s3://x/a+s3://x/b") == ("s3://x/a", "s3://x/b")
    with pytest.raises(UcplError, match="E437: nowhere\\+at all does not exist"):
        ucpl.convert("nowhere+at all", tmp_path / "out", "plain()")

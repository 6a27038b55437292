"""import hf.

The class of transformers, folded numbers, and cuts of a plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ucpl.errors import UcplError
from ucpl.inference.hf import FoundTensor, fold, import_hf


class Model:
    """A stand-in for transformers' base: a state dict and a plan."""

    _tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.fused": "packed_colwise"}  # noqa: RUF012

    def __init__(self, config: object) -> None:
        self.tensors = {
            name: torch.zeros(shape)
            for i in range(2)
            for name, shape in (
                (f"layers.{i}.up.weight", (6, 4)),
                (f"layers.{i}.up.bias", (6,)),
                (f"layers.{i}.down.weight", (4, 6)),
                (f"layers.{i}.down.bias", (4,)),
                (f"layers.{i}.fused.weight", (8, 4)),
            )
        }

    def state_dict(self, keep_vars: bool) -> dict[str, torch.Tensor]:
        return self.tensors

    def named_parameters(self, remove_duplicate: bool) -> list[tuple[str, torch.Tensor]]:
        return list(self.tensors.items())


class Tiny(Model):
    """A model's class, as a config names it."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for transformers, and the calls of it."""
    found: list[str] = []

    def from_pretrained(place: str, trust_remote_code: bool) -> SimpleNamespace:
        found.append(f"config, remote code {trust_remote_code}")
        return SimpleNamespace(tie_word_embeddings=False)

    def from_config(config: object, trust_remote_code: bool) -> Model:
        found.append(f"auto, remote code {trust_remote_code}")
        return Model(config)

    class Seen(Tiny):
        def __init__(self, config: object) -> None:
            found.append("the class")
            super().__init__(config)

    module = ModuleType("transformers")
    names = {
        "PreTrainedModel": Model,
        "AutoConfig": SimpleNamespace(from_pretrained=from_pretrained),
        "AutoModel": SimpleNamespace(from_config=from_config),
        "Tiny": Seen,
        "pipeline": lambda config: found.append("a function"),
        "Trainer": type("Trainer", (), {"__init__": lambda self, config: found.append("another class")}),
    }
    for name, value in names.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "transformers", module)
    return found


def config(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


def test_the_class_that_a_config_names_is_asked(called: list[str], tmp_path: Path) -> None:
    text = import_hf(config(tmp_path, architectures=["Tiny"], model_type="tiny"))
    assert called == ["config, remote code False", "the class"] and "model tiny {" in text


@pytest.mark.parametrize(
    "named", [["pipeline"], ["Trainer"], ["nosuch"], [], None, "Tiny", [3], [["Tiny"]], 7, {"a": 1}]
)
def test_nothing_else_that_it_names_is_called(named: object, called: list[str], tmp_path: Path) -> None:
    import_hf(config(tmp_path, architectures=named, model_type="tiny"))
    assert called == ["config, remote code False", "auto, remote code False"]


def test_a_plan_cuts_outputs_or_inputs_and_leaves_what_it_does_not_know(called: list[str], tmp_path: Path) -> None:
    text = import_hf(config(tmp_path, architectures=["Tiny"], model_type="tiny"))
    lines = [" ".join(line.split()) for line in text.partition("layout hf")[2].splitlines()]
    assert 'up.weight = n6@chunk(tp) n4 as "{layer}{name}"' in lines
    assert 'up.bias = n6@chunk(tp) as "{layer}{name}"' in lines
    assert 'down.weight = n4 n6@chunk(tp) as "{layer}{name}"' in lines
    assert not any("@" in line for line in lines if "down.bias" in line or "fused" in line)
    assert "layers.*.fused.weight: the class's plan says `packed_colwise`" in text


def test_a_class_is_asked_on_this_machine_alone(
    called: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switches prevent downloads and code of others while the class is built."""
    hub, code = ModuleType("huggingface_hub.constants"), ModuleType("transformers.dynamic_module_utils")
    hub.HF_HUB_OFFLINE, code.TIME_OUT_REMOTE_CODE = False, 15  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    monkeypatch.setitem(sys.modules, hub.__name__, hub)
    monkeypatch.setitem(sys.modules, code.__name__, code)
    seen: list[tuple[object, object]] = []
    whole = sys.modules["transformers"].Tiny

    class Looking(whole):  # type: ignore[misc, valid-type]
        def __init__(self, config: object) -> None:
            seen.append((hub.HF_HUB_OFFLINE, code.TIME_OUT_REMOTE_CODE))
            super().__init__(config)
            if len(called) > 2:
                raise RuntimeError("not twice")

    sys.modules["transformers"].Tiny = Looking  # type: ignore[attr-defined]
    import_hf(config(tmp_path, architectures=["Tiny"], model_type="tiny"))
    with pytest.raises(UcplError, match=r"E396.*RuntimeError: not twice"):
        import_hf(tmp_path / "config.json")
    assert seen == [(True, 0), (True, 0)]
    assert (hub.HF_HUB_OFFLINE, code.TIME_OUT_REMOTE_CODE) == (False, 15), "as they were, whatever happened"


@pytest.mark.parametrize(
    "numbers", [{"num_hidden_layers": 10**9}, {"n_routed_experts": 10**6}, {"text_config": {"n_layer": 10**5}}]
)
def test_a_class_of_millions_of_layers_is_not_built(
    numbers: dict[str, object], called: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UcplError, match="E396"):
        import_hf(config(tmp_path, architectures=["Tiny"], model_type="tiny", **numbers))
    assert called == []


def tensors(*names: str, shape: tuple[int, ...] = (2, 3)) -> list[FoundTensor]:
    return [FoundTensor(name, shape, "f32") for name in names]


def test_numbers_are_folded_where_they_are_a_full_grid_of_what_is_alike() -> None:
    (one,) = fold(tensors("a.3.w", "a.5.w", "a.7.w"))
    assert one.spans == ((3, 5, 7),) and one.containers == ("a",) and one.pattern == ("a", None, "w")
    (two,) = fold(tensors(*(f"a.{i}.b.{j}" for i in range(2) for j in range(3))))
    assert two.spans == ((0, 1), (0, 1, 2)) and two.containers == ("a", "a.*.b")
    (gap,) = fold(tensors("a.0.w", "a.1.w", "a.3.w"))
    assert gap.spans == ((0, 1, 3),)
    assert len(fold(tensors("a.0.b.0", "a.1.b.1"))) == 2, "a grid with holes"
    assert len(fold([*tensors("a.0.w"), *tensors("a.1.w", shape=(3, 2))])) == 2, "another shape"
    assert len(fold(tensors("a.00", "a.01", "b.1x", "c.²", "d.٣", "e." + "9" * 40))) == 6, (
        "no numbers that are told again"
    )


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UcplError, match=r"E395.*no JSON object"):
        import_hf(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(UcplError, match="E170"):
        import_hf(tmp_path)


def test_a_dim_counts_from_zero_to_the_last_number(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({f"a.{i}.w": torch.zeros(2, 3) for i in (1, 3, 5)}, tmp_path / "model.safetensors")
    lines = [" ".join(line.split()) for line in import_hf(tmp_path).splitlines()]
    assert "dim l = 6" in lines and "w : l[1.. by 2] n2 n3" in lines
    assert 'w = n2 n3 as "{layer}{name}"' in lines and 'let layer = "a.{l}."' in lines

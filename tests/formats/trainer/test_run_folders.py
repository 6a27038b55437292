"""Folders of the Trainer and of Accelerate without an engine.

torch and safetensors write them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from ucpl import api
from ucpl.errors import UcplError

HIDDEN, WORDS = 6, 11
LLAMA = {
    "model.embed_tokens.weight": (WORDS, HIDDEN),
    **{
        f"model.layers.{n}.{name}.weight": shape
        for n in range(2)
        for name, shape in {
            "self_attn.q_proj": (6, 6), "self_attn.k_proj": (3, 6), "self_attn.v_proj": (3, 6), "self_attn.o_proj": (6, 6),
            "mlp.gate_proj": (7, 6), "mlp.up_proj": (7, 6), "mlp.down_proj": (6, 7), "input_layernorm": (6,),
            "post_attention_layernorm": (6,),
        }.items()
    },
    "model.norm.weight": (6,),
}  # fmt: skip
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def run(frozen=()):
    """A model after three AdamW steps, in the Trainer's two groups."""
    torch.manual_seed(3)
    named = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in LLAMA.items()}
    trained = {n: p for n, p in named.items() if n not in frozen}
    wide, flat = ([p for p in trained.values() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=0.1
    )
    for _ in range(3):
        for p in trained.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return named, optimizer


def companions(path: Path, ranks=2):
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    torch.save({"last_epoch": 3, "_step_count": 4}, path / "scheduler.pt")
    for rank in range(ranks):
        torch.save({"cpu": torch.arange(4, dtype=torch.uint8) + rank}, path / f"rng_state_{rank}.pth")


def ddp(path: Path, frozen=()):
    path.mkdir()
    named, optimizer = run(frozen)
    save_file({n: p.detach() for n, p in named.items()}, path / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    companions(path)
    return named, optimizer


def full(path: Path):
    """FSDP's folder: a tied head twice, and names in the optimizer."""
    path.mkdir()
    named, optimizer = run()
    name_of = {p: name for name, p in named.items()}
    weights = {n: p.detach() for n, p in named.items()}
    torch.save(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path / "pytorch_model_fsdp.bin"
    )
    groups = [{**g, "params": [name_of[p] for p in g["params"]]} for g in optimizer.param_groups]
    torch.save(
        {"state": {name_of[p]: s for p, s in optimizer.state.items()}, "param_groups": groups}, path / "optimizer.bin"
    )
    companions(path)
    return named, optimizer


def assert_run(path, named, optimizer):
    """A plain file has all values of the run."""
    held = torch.load(path, weights_only=True)
    for name, p in named.items():
        states = held["params"][name]
        assert torch.equal(states["weight"], p.detach())
        for state, value in optimizer.state.get(p, {}).items():
            assert torch.equal(torch.as_tensor(states[state]), value), (name, state)
    name_of = {p: name for name, p in named.items()}
    assert [g["params"] for g in held["groups"]] == [[name_of[p] for p in g["params"]] for g in optimizer.param_groups]
    assert [g["weight_decay"] for g in held["groups"]] == [0.1, 0.0]


@pytest.mark.parametrize("made", [ddp, full], ids=["ddp", "full"])
@pytest.mark.parametrize("call", ["zero2(dp=3)", "dcp(fsdp=2)", "trainer(dp=3)", "trainer(dp=1, full=1)"])
def test_a_run_changes_its_strategy_in_the_trainers_folder(made, call, tmp_path):
    named, optimizer = made(tmp_path / "s")
    ucpl.convert(tmp_path / "s", tmp_path / "p.pt", "plain()")
    assert_run(tmp_path / "p.pt", named, optimizer)
    ucpl.convert(tmp_path / "s", tmp_path / "t", call)
    for name in ("config.json", "trainer_state.json", "scheduler.pt"):
        assert (tmp_path / "t" / name).read_bytes() == (tmp_path / "s" / name).read_bytes()
    ranks = int(call.partition("=")[2].strip(")").partition(",")[0])
    assert len([*(tmp_path / "t").glob("rng_state*.pth")]) == ranks
    assert ucpl.verify(tmp_path / "t")
    ucpl.convert(tmp_path / "t", tmp_path / "back", "trainer(dp=2)")
    ucpl.convert(tmp_path / "back", tmp_path / "b.pt", "plain()")
    assert_run(tmp_path / "b.pt", named, optimizer)


@pytest.mark.parametrize("call", ["trainer(dp=2)", "trainer(dp=1, full=1)", "dcp(fsdp=2)"])
def test_a_loop_without_the_engine_trains_on_its_masters(call, tmp_path):
    """DDP and FSDP train f32 weights, DeepSpeed trains f32 masters."""
    named, _ = ddp(tmp_path / "s")
    ucpl.convert(tmp_path / "s", tmp_path / "z", "zero2(dp=2, bf16=1)", freeze=["model.norm.weight"])
    ucpl.convert(tmp_path / "z", tmp_path / "t", call)
    ucpl.convert(tmp_path / "t", tmp_path / "p.pt", "plain()")
    held = torch.load(tmp_path / "p.pt", weights_only=True)["params"]
    frozen = named.pop("model.norm.weight")
    assert torch.equal(held["model.norm.weight"]["weight"], frozen.bfloat16()), "it has no master"
    for name, p in named.items():
        assert torch.equal(held[name]["weight"], p.detach()) and "fp32" not in held[name], name


def test_names_of_files_are_those_that_each_strategy_loads(tmp_path):
    ddp(tmp_path / "s")
    for call, files in (
        ("dcp(fsdp=2)", {"pytorch_model_fsdp_0", "optimizer_0"}),
        ("zero1(dp=2)", {"global_step3", "latest"}),
        ("trainer(dp=2, full=1)", {"pytorch_model_fsdp.bin", "optimizer.bin"}),
        ("trainer(dp=2)", {"model.safetensors", "optimizer.pt"}),
    ):
        ucpl.convert(tmp_path / "s", tmp_path / call, call)
        assert files <= {path.name for path in (tmp_path / call).iterdir()}
    whole = torch.load(tmp_path / "trainer(dp=2, full=1)" / "pytorch_model_fsdp.bin", weights_only=True)
    assert torch.equal(whole["lm_head.weight"], whole["model.embed_tokens.weight"]), "FSDP asks for both names"


def test_torch_loads_the_optimizer_of_a_target(tmp_path):
    ddp(tmp_path / "s")
    ucpl.convert(tmp_path / "s", tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "t", "trainer(dp=2)")
    named, optimizer = run()
    other = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups])
    other.load_state_dict(torch.load(tmp_path / "t" / "optimizer.pt", weights_only=True))
    for p in named.values():
        assert all(torch.equal(other.state[p][state], optimizer.state[p][state]) for state in optimizer.state[p])
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_frozen_parameters_of_one_shape_ask_for_the_order(tmp_path):
    frozen = ("model.layers.1.input_layernorm.weight",)
    named, optimizer = ddp(tmp_path / "s", frozen)
    with pytest.raises(UcplError, match="E446") as caught:
        api.open_checkpoint(tmp_path / "s")
    assert "--order names.txt" in (caught.value.diagnostics[0].remedy or "")
    name_of = {p: name for name, p in named.items()}
    names = [[name_of[p] for p in g["params"]] for g in optimizer.param_groups]
    (tmp_path / "names.json").write_text(json.dumps(names))
    order = f'trainer(order="{tmp_path / "names.json"}")'
    ucpl.convert(tmp_path / "s", tmp_path / "p.pt", "plain()", layout=order)
    assert_run(tmp_path / "p.pt", named, optimizer)
    ucpl.convert(tmp_path / "s", tmp_path / "q.pt", "plain()", order=tmp_path / "names.json")
    assert_run(tmp_path / "q.pt", named, optimizer)
    ucpl.convert(tmp_path / "s", tmp_path / "w", "safetensors()", layout=order)
    assert set(load_file(tmp_path / "w" / "model.safetensors")) == set(LLAMA)


def test_safetensors_of_an_unknown_class_give_no_order(tmp_path):
    ddp(tmp_path / "s")
    (tmp_path / "s" / "config.json").write_text(json.dumps({"model_type": "mine"}))
    with pytest.raises(UcplError, match="E446"):
        api.open_checkpoint(tmp_path / "s")
    (tmp_path / "s" / "model.safetensors").unlink()
    named, optimizer = run()
    torch.save({n: p.detach() for n, p in named.items()}, tmp_path / "s" / "pytorch_model.bin")
    ucpl.convert(tmp_path / "s", tmp_path / "p.pt", "plain()")
    assert_run(tmp_path / "p.pt", named, optimizer)


def test_shapes_alone_can_leave_one_order_of_an_unknown_class(tmp_path):
    shapes = {"wte.weight": (11, 4), "block.down.weight": (4, 5), "block.up.weight": (5, 4), "block.up.bias": (5,)}
    torch.manual_seed(1)
    parameters = {name: torch.nn.Parameter(torch.randn(shapes[name])) for name in sorted(shapes)}
    order = ["wte.weight", "block.up.weight", "block.up.bias", "block.down.weight"]
    optimizer = torch.optim.AdamW([parameters[name] for name in order], lr=0.1)
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    folder = tmp_path / "s"
    folder.mkdir()
    save_file({n: p.detach() for n, p in parameters.items()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"step": 0}, folder / "random_states_0.pkl")
    assert api.open_checkpoint(folder).state.groups[0].members == tuple(order)


def accelerate(path: Path, lead=""):
    """The folder that `save_state` writes.

    lead: `module.` for a module that DDP wraps.
    """
    path.mkdir()
    named, optimizer = run()
    torch.save({lead + n: p.detach() for n, p in named.items()}, path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    torch.save({"last_epoch": 3, "_step_count": 4}, path / "scheduler.bin")
    torch.save({"seen": 3}, path / "custom_checkpoint_0.pkl")
    for rank in range(1 + bool(lead)):
        torch.save({"step": 0}, path / f"random_states_{rank}.pkl")
    return named, optimizer


@pytest.mark.parametrize("lead", ["", "module."])
def test_accelerate_finds_each_strategy_by_its_names(lead, tmp_path):
    named, optimizer = accelerate(tmp_path / "s", lead)
    for call, file in (
        ("zero1(dp=2)", "pytorch_model"),
        ("dcp(fsdp=2)", "optimizer_0"),
        ("accelerate(dp=2, full=1)", "pytorch_model_fsdp.bin"),
        ("accelerate(dp=2)", "model.safetensors"),
    ):
        there = tmp_path / call
        ucpl.convert(tmp_path / "s", there, call)
        assert (there / file).exists() and (there / "custom_checkpoint_0.pkl").exists()
        assert len([*there.glob("random_states_*.pkl")]) == 2
        ucpl.convert(there, tmp_path / f"{call}.back", "accelerate(dp=1)")
        ucpl.convert(tmp_path / f"{call}.back", tmp_path / f"{call}.pt", "plain()")
        assert_run(tmp_path / f"{call}.pt", named, optimizer)
        assert set(load_file(tmp_path / f"{call}.back" / "model.safetensors")) == set(LLAMA)
    names = load_file(tmp_path / "accelerate(dp=2)" / "model.safetensors")
    assert set(names) == set(LLAMA), "Accelerate unwraps the module before it loads"


def test_several_models_are_refused_by_name(tmp_path):
    named, optimizer = accelerate(tmp_path / "s")
    shutil.copy(tmp_path / "s" / "pytorch_model.bin", tmp_path / "s" / "pytorch_model_1.bin")
    with pytest.raises(UcplError, match="E487") as refused:
        api.open_checkpoint(tmp_path / "s")
    pair = f"{tmp_path / 's' / 'pytorch_model.bin'}+{tmp_path / 's' / 'optimizer.bin'}"
    assert f"; {pair} names the first" in refused.value.diagnostics[0].remedy
    ucpl.convert(pair, tmp_path / "p.pt", "plain()")
    assert_run(tmp_path / "p.pt", named, optimizer)


def two_optimizers(folder: Path) -> list[torch.optim.Optimizer]:
    """A folder with AdamW for matrices and SGD for vectors."""
    accelerate(folder)
    (folder / "optimizer.bin").unlink()
    named, _ = run()
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([p for p in named.values() if p.ndim > 1], lr=0.1),
        torch.optim.SGD([p for p in named.values() if p.ndim == 1], lr=0.2, momentum=0.9),
    ]
    for p in named.values():
        p.grad = torch.randn_like(p)
    for n, optimizer in enumerate(made):
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / f"optimizer{f'_{n}' if n else ''}.bin")
    return made


@pytest.mark.parametrize("call", ["accelerate(dp=2)", "accelerate(full=1)"])
def test_two_optimizers_of_one_model_have_groups_and_files_of_their_own(call, tmp_path):
    made = two_optimizers(tmp_path / "s")
    opened = api.open_checkpoint(tmp_path / "s")
    assert [(g.name, len(g.members)) for g in opened.state.groups] == [("0/0", 15), ("1/0", 5)]
    ucpl.convert(tmp_path / "s", tmp_path / "there", call)
    ucpl.convert(tmp_path / "there", tmp_path / "back", "accelerate(full=0)")
    for n, optimizer in enumerate(made):
        file = f"optimizer{f'_{n}' if n else ''}.bin"
        held = torch.load(tmp_path / "back" / file, weights_only=True)
        for number, states in optimizer.state_dict()["state"].items():
            assert held["state"][number].keys() == states.keys()
            assert all(torch.equal(one, held["state"][number][state]) for state, one in states.items())
        there = torch.load(tmp_path / "there" / file, weights_only=True)
        assert len(there["state"]) == len(held["state"]) == len(optimizer.param_groups[0]["params"])
        assert ("lr", optimizer.param_groups[0]["lr"]) in there["param_groups"][0].items()


def test_two_optimizers_of_two_kinds_go_into_one_torch_file_and_into_no_engine(tmp_path):
    made = two_optimizers(tmp_path / "s")
    ucpl.convert(tmp_path / "s", tmp_path / "one.pt", "torch_file()")
    held = torch.load(tmp_path / "one.pt", weights_only=True)["optimizers"]
    assert [len(one["state"]) for one in held] == [15, 5]
    for optimizer, one in zip(made, held, strict=True):
        optimizer.load_state_dict(one)
    with pytest.raises(UcplError, match="E448: the run has optimizers of 2 kinds"):
        ucpl.convert(tmp_path / "s", tmp_path / "zero", "zero1(dp=2)")


def adapter(path: Path):
    path.mkdir()
    torch.manual_seed(2)
    names = [
        f"base_model.model.model.layers.{n}.self_attn.{part}.lora_{half}"
        for n in range(2)
        for part in ("q_proj", "v_proj")
        for half in "AB"
    ]
    shapes = [(2, 6) if name.endswith("A") else (6 if "q_proj" in name else 3, 2) for name in names]
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in zip(names, shapes, strict=True)}
    groups: list[dict[str, Any]] = [{"params": list(parameters.values())}, {"params": []}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    save_file({f"{n}.weight": p.detach() for n, p in parameters.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    companions(path, 1)
    return parameters


def test_an_adapter_has_the_names_of_its_module_there_and_those_of_peft_in_files(tmp_path):
    parameters = adapter(tmp_path / "s")
    opened = api.open_checkpoint(tmp_path / "s")
    assert opened.state.groups[0].members == tuple(f"{name}.default.weight" for name in parameters)
    ucpl.convert(tmp_path / "s", tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "t", "trainer(dp=1)")
    made = load_file(tmp_path / "t" / "adapter_model.safetensors")
    assert {n: v.tolist() for n, v in made.items()} == {f"{n}.weight": p.tolist() for n, p in parameters.items()}


def adapter_of(path: Path, of: dict[str, tuple[str, tuple[int, ...]]], config: dict[str, Any]):
    """A Trainer's folder of an adapter.

    of: names in the file -> names and shapes in the run, in its order.
    """
    path.mkdir()
    torch.manual_seed(4)
    made = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in of.values()}
    groups: list[dict[str, Any]] = [{"params": list(made.values())}, {"params": []}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for p in made.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    save_file({n: made[run].detach() for n, (run, _) in of.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    companions(path, 1)
    (path / "config.json").unlink()
    return made


_AT = "base_model.model.model.layers.0.self_attn.q_proj"
_ADAPTERS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {  # names and those of files, as peft 0.21.2 saves them
    "PROMPT_TUNING": {"prompt_embeddings": ("prompt_encoder.default.embedding.weight", (3, 6))},
    "DORA": {
        f"{_AT}.lora_A.weight": (f"{_AT}.lora_A.default.weight", (2, 6)),
        f"{_AT}.lora_B.weight": (f"{_AT}.lora_B.default.weight", (6, 2)),
        f"{_AT}.lora_magnitude_vector": (f"{_AT}.lora_magnitude_vector.default.weight", (6,)),
    },
    "IA3": {f"{_AT}.ia3_l": (f"{_AT}.ia3_l.default", (6, 1))},
    "LOKR": {
        f"{_AT}.lokr_w1": (f"{_AT}.lokr_w1.default", (2, 3)),
        f"{_AT}.lokr_w2": (f"{_AT}.lokr_w2.default", (3, 2)),
    },
}


@pytest.mark.parametrize("kind", _ADAPTERS)
@pytest.mark.parametrize("via", ["", "dcp(fsdp=2)"])
def test_adapters_of_all_kinds_are_in_the_file_that_peft_loads(kind, via, tmp_path):
    """Without adapter_model.safetensors the Trainer resumes with the weights of a new adapter."""
    made = adapter_of(tmp_path / "s", _ADAPTERS[kind], {"peft_type": kind})
    opened = api.open_checkpoint(tmp_path / "s")
    assert opened.state.groups[0].members == tuple(made)
    if via:
        ucpl.convert(tmp_path / "s", tmp_path / "v", via)
    ucpl.convert(tmp_path / ("v" if via else "s"), tmp_path / "t", "trainer(dp=1)")
    assert not (tmp_path / "t" / "model.safetensors").exists()
    held = load_file(tmp_path / "t" / "adapter_model.safetensors")
    assert {n: v.tolist() for n, v in held.items()} == {
        n: made[run].tolist() for n, (run, _) in _ADAPTERS[kind].items()
    }


def alike_adapter(path: Path):
    """LoRA over keys and values, whose shapes are alike.

    The class registers k before v.
    """
    at = "base_model.model.model.layers.0.self_attn."
    parts = [
        (f"{at}{part}.lora_{half}", (2, 6) if half == "A" else (3, 2)) for part in ("k_proj", "v_proj") for half in "AB"
    ]
    return adapter_of(
        path, {f"{n}.weight": (f"{n}.default.weight", shape) for n, shape in parts}, {"peft_type": "LORA"}
    )


def test_the_class_of_the_base_model_orders_an_adapters_numbers(tmp_path):
    made = alike_adapter(tmp_path / "s")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UcplError, match="E446") as refused:
        ucpl.convert(tmp_path / "s", tmp_path / "t", "dcp(fsdp=2)")
    assert "--order BASE/config.json" in refused.value.diagnostics[0].remedy
    ucpl.convert(tmp_path / "s", tmp_path / "p.pt", "plain()", order=tmp_path / "base" / "config.json")
    held = torch.load(tmp_path / "p.pt", weights_only=True)
    assert held["groups"][0]["params"] == list(made)
    numbered = torch.load(tmp_path / "s" / "optimizer.pt", weights_only=True)["state"]
    for number, name in enumerate(made):
        assert torch.equal(held["params"][name]["exp_avg"], numbered[number]["exp_avg"])


def test_a_config_orders_no_numbers_of_an_unknown_class_or_of_one_torch_file(tmp_path):
    alike_adapter(tmp_path / "s")
    other = tmp_path / "config.json"
    other.write_text(json.dumps({"model_type": "mine", "architectures": ["Mine"]}))
    with pytest.raises(UcplError, match="E446"):
        ucpl.convert(tmp_path / "s", tmp_path / "t", "dcp(fsdp=2)", order=other)
    _, optimizer = run()
    model = {n: p.detach() for n, p in run()[0].items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    with pytest.raises(UcplError, match=r"E466: --order .*config.json is a config.json"):
        ucpl.convert(tmp_path / "one.pt", tmp_path / "u.pt", "plain()", order=other)


@pytest.mark.parametrize("to", ["trainer(dp=2)", "accelerate()"])
def test_a_source_outside_such_a_folder_is_refused(to, tmp_path):
    """The Trainer loads no optimizer if scheduler.pt is missing."""
    named, optimizer = run()
    model = {n: p.detach() for n, p in named.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    with pytest.raises(UcplError, match=r"E471.*the source is not in one"):
        ucpl.convert(tmp_path / "one.pt", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_scripts_folder_without_files_of_the_trainer_is_one_run(weights, tmp_path):
    """`save_pretrained`, and the optimizer next to it."""
    named, optimizer = ddp(tmp_path / "s")
    for name in ("trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (tmp_path / "s" / name).unlink()
    if weights == "pytorch_model.bin":
        torch.save({n: p.detach() for n, p in named.items()}, tmp_path / "s" / weights)
        (tmp_path / "s" / "model.safetensors").unlink()
    ucpl.convert(tmp_path / "s", tmp_path / "z", "zero2(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "p.pt", "plain()")
    assert_run(tmp_path / "p.pt", named, optimizer)
    with pytest.raises(UcplError, match="E471"):
        ucpl.convert(tmp_path / "s", tmp_path / "t", "trainer()")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_tensors_without_elements_are_read_and_written(name, tmp_path):
    shapes = {"a.weight": (2, 3), "b": (0, 3), "c.bias": (3,)}
    model = torch.nn.ParameterDict({name.replace(".", "_"): torch.ones(shape) for name, shape in shapes.items()})
    optimizer = torch.optim.AdamW(model.values(), lr=0.1)
    sum(p.sum() for p in model.values()).backward()
    optimizer.step()
    weights = {
        "buffer": torch.ones(0, dtype=torch.int32),
        **{n: p.detach() for n, p in zip(shapes, model.values(), strict=True)},
    }
    (tmp_path / "s").mkdir()
    (save_file if name.endswith("safetensors") else torch.save)(weights, tmp_path / "s" / name)
    torch.save(optimizer.state_dict(), tmp_path / "s" / "optimizer.bin")
    torch.save({"step": 1}, tmp_path / "s" / "random_states_0.pkl")
    (tmp_path / "names.txt").write_text("\n".join(shapes))
    order = {"order": tmp_path / "names.txt"} if name.endswith("safetensors") else {}
    ucpl.convert(tmp_path / "s", tmp_path / "t", "torch_file()", **order)
    held = torch.load(tmp_path / "t" / "checkpoint.pt", weights_only=True)
    ucpl.convert(tmp_path / "s", tmp_path / "a", "accelerate()", **order)
    for states in (held["optimizer"], torch.load(tmp_path / "a" / "optimizer.bin", weights_only=True)):
        optimizer.load_state_dict(states)
        assert optimizer.state_dict()["state"].keys() == {0, 1, 2}
    assert {n: (t.dtype, t.shape) for n, t in held["model"].items()} == {
        n: (t.dtype, t.shape) for n, t in weights.items()
    }

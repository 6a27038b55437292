"""Load exports with transformers, strictly.

No tensor is missing, extra, or of another shape.

Sources are written by the Trainer with DeepSpeed's ZeRO-3, by DeepSpeed, by FSDP2 with torch's DCP, and by torch.save. Of
Megatron-Core, see test_dialect_states.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ucpl
from tests.cli.command import good
from tests.cli.command import ucpl as command
from tests.interop.parallel import Source, work

pytestmark = pytest.mark.interop

TRAINER = Path(__file__).with_name("trainer_job.py")
TOKENIZER = "tokenizer_config.json"
SIZES: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


def loaded(folder: Path, dtype: Any = "auto") -> Any:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not told.get(what), (what, told[what])
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Trainer's checkpoint-3 of two ranks, with the engine's weights."""
    run = {"model": "llama", "stage": 3, "dtype": "fp32", "schedule": True}
    return work({"llama": Source(2, run)}, (), tmp_path_factory.mktemp("export"), TRAINER)


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_trainer_s_folder_is_loaded_as_the_engine_had_it(dtype: str, trained: Path, tmp_path: Path) -> None:
    good("export", trained / "llama", tmp_path / "made", *(("--dtype", dtype) if dtype else ()), "--shard", "10KB")
    assert (tmp_path / "made" / "model.safetensors.index.json").exists()
    check(loaded(tmp_path / "made"), trained, torch.bfloat16 if dtype else torch.float32)


def check(model: Any, trained: Path, dtype: torch.dtype) -> None:
    """Compare a model with the masters that the job kept."""
    kept = torch.load(trained / "llama.truth", weights_only=False)["params"]
    found = dict(model.named_parameters())
    assert found.keys() == kept.keys()
    for name, one in kept.items():
        wanted = one["fp32"].reshape(found[name].shape).to(dtype)
        assert found[name].dtype == dtype and torch.equal(found[name], wanted), name


def test_a_bare_engine_s_folder_takes_config_tokenizer_and_code_of_a_model(trained: Path, tmp_path: Path) -> None:
    bare, base = tmp_path / "a" / "b" / "bare", tmp_path / "base"
    bare.mkdir(parents=True)
    base.mkdir()
    shutil.copytree(trained / "llama" / "global_step3", bare / "global_step3")
    (bare / "latest").write_text("global_step3")
    shutil.copy(trained / "llama" / "config.json", base)
    (base / TOKENIZER).write_text("{}")
    refused = command("export", bare, tmp_path / "made")
    assert refused.status == 2 and "error[E221]" in refused.err and not (tmp_path / "made").exists()
    good("export", bare, tmp_path / "made", "--config", base, "--dtype", "float32")
    assert (tmp_path / "made" / TOKENIZER).read_text() == "{}"
    check(loaded(tmp_path / "made"), trained, torch.float32)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(folder: Path, tie: bool) -> dict[str, torch.Tensor]:
    """Save one step of FSDP2 and AdamW by DCP; return the weights."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tie)
    model = transformers.LlamaForCausalLM(config)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(12).reshape(2, 6)).logits.square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optim": moments}, checkpoint_id=str(folder))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder.parent / "hf")  # where verl has it
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tie", [False, True])
def test_chunks_of_fsdp2_find_a_config_next_to_them(tie: bool, tmp_path: Path) -> None:
    weights = sharded(tmp_path / "step-1", tie)
    out = good("export", tmp_path / "step-1", tmp_path / "made").out
    assert f"config: {tmp_path / 'hf' / 'config.json'}" in " ".join(out.split())
    found = dict(loaded(tmp_path / "made").named_parameters())
    assert found.keys() == weights.keys() and all(torch.equal(found[n], t) for n, t in weights.items())


@pytest.mark.parametrize("lead", ["", "module.", "_orig_mod."])
def test_a_torch_file_is_loaded_under_the_names_of_the_class(lead: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    state = {f"{lead}{name}": t for name, t in model.state_dict().items()}
    torch.save({"model": state, "step": 7}, tmp_path / "ckpt.pt")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "base")
    good("export", tmp_path / "ckpt.pt", tmp_path / "made", "--config", tmp_path / "base", "--dtype", "fp16")
    found = loaded(tmp_path / "made").state_dict()
    assert all(torch.equal(found[n], t.half()) for n, t in model.state_dict().items())


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_tensor_too_few_or_too_many_is_refused_before_the_first_byte(change: str, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    state = dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight" if change == "missing" else "value_head.weight"
    if change == "missing":
        del state[name]
    else:
        state[name] = torch.ones(1, 20)
    torch.save({"model": state}, tmp_path / "ckpt.pt")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "base")
    wanted = ("export", tmp_path / "ckpt.pt", tmp_path / "made", "--config", tmp_path / "base")
    done = command(*wanted)
    assert done.status == 4 and f"error[E222]: `{name}`" in done.err and not (tmp_path / "made").exists()
    if change == "extra":
        good(*wanted, "--drop", name)
        assert ucpl.compare(tmp_path / "made", tmp_path / "made") and loaded(tmp_path / "made")

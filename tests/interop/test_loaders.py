"""Own loaders load grown or renamed targets without missing or unexpected keys."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint
from ucpl.inference.hf import classes, families

pytestmark = pytest.mark.interop

SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def written(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more}))
    model.save_pretrained(folder)
    return model


def loaded(folder: Path) -> Any:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not told.get(what), (what, told[what])
    return model


def grown(source: Path, to: Path, rows: int) -> str:
    text = ucpl.infer(source).text()
    head = text[: text.index("layout ")]
    for word in (WORDS, HEAD):
        line = next((line for line in head.splitlines() if word in line), "")
        head = head.replace(line, line.replace("67", str(rows))) if line else head
    to.write_text(head)
    return f"{to}:{head.split('model ', 1)[1].split()[0]}"


def test_transformers_loads_a_vocabulary_that_has_grown(tmp_path: Path) -> None:
    model = written(tmp_path / "hf")
    fill = [f"{WORDS}=0", f"{HEAD}=0"]
    how: dict[str, Any] = {"model": grown(tmp_path / "hf", tmp_path / "grown.ucpl", 80), "fill": fill}
    ucpl.convert(tmp_path / "hf", tmp_path / "made", "safetensors()", **how)
    found = loaded(tmp_path / "made")
    assert found.config.vocab_size == 80 and ucpl.verify(tmp_path / "made")
    assert torch.equal(found.model.embed_tokens.weight[:67], model.model.embed_tokens.weight)


@pytest.mark.parametrize("key", ["num_key_value_heads", "intermediate_size", "num_hidden_layers"])
def test_a_config_of_another_class_is_refused_and_found_by_the_class(key: str, tmp_path: Path) -> None:
    written(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: SIZES[key] // 2}))
    found = ucpl.verify(tmp_path / "hf")
    assert [d.code for d in found.findings] == ["E388"]
    other = tmp_path / "plain.pt"
    torch.save(
        {"params": {n: {"weight": t} for n, t in load_file(tmp_path / "hf" / "model.safetensors").items()}}, other
    )
    with pytest.raises(UcplError, match="E388"):
        ucpl.convert(other, tmp_path / "made", "safetensors()", config=file)


def test_names_that_the_class_does_not_have_are_refused_or_reported(tmp_path: Path) -> None:
    model = written(tmp_path / "hf")
    tensors = dict(model.state_dict())
    torch.save({"params": {f"net.{n}.w": {"weight": t} for n, t in tensors.items()}}, tmp_path / "foreign.pt")
    with pytest.raises(UcplError, match="E399"):
        ucpl.convert(
            tmp_path / "foreign.pt", tmp_path / "made", "safetensors()", config=tmp_path / "hf" / "config.json"
        )
    del tensors["model.norm.weight"]
    torch.save({"params": {n: {"weight": t} for n, t in tensors.items()}}, tmp_path / "less.pt")
    ucpl.convert(tmp_path / "less.pt", tmp_path / "made", "safetensors()", config=tmp_path / "hf" / "config.json")
    assert any("random numbers" in n and "model.norm.weight" in n for n in ucpl.verify(tmp_path / "made").notes)


@pytest.mark.parametrize("tie", [False, True])
def test_a_folder_with_or_without_ties_is_what_the_class_reads(tie: bool, tmp_path: Path) -> None:
    written(tmp_path / "hf", tie_word_embeddings=tie)
    found = ucpl.verify(tmp_path / "hf")
    assert found and not any("from_pretrained" in note for note in found.notes)


CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "image_size": 8, "intermediate_size": 24,
        "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 4, "projection_dim": 16}  # fmt: skip
EARLIER = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.vision_tower\.", "vision_tower.vision_model."),
    (r"^model\.multi_modal", "multi_modal"),
)


def of_an_earlier_release(folder: Path) -> None:
    """LLaVA in the form of transformers 4.36, with an extra vocabulary key."""
    config = transformers.LlavaConfig(vision_config=CLIP, text_config={"model_type": "llama", **SIZES})
    model = transformers.LlavaForConditionalGeneration(config)
    folder.mkdir()
    named = {}
    for name, tensor in model.state_dict().items():
        for pattern, earlier in EARLIER:
            name = re.sub(pattern, earlier, name)
        named[name] = tensor
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    text = {**config.to_dict(), "architectures": ["LlavaForConditionalGeneration"], "vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(text))


def stacked(folder: Path) -> None:
    """Mixtral under the names of its modules, which from_pretrained reads, too."""
    more = {"num_local_experts": 3, "tie_word_embeddings": False}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **more))
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    text = {**model.config.to_dict(), "architectures": ["MixtralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(text))


@pytest.mark.parametrize("made", [of_an_earlier_release, stacked])
def test_names_that_the_class_renames_are_no_random_numbers(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(tmp_path / "s")
    kind = json.loads((tmp_path / "s" / "config.json").read_text())["architectures"][0]
    ucpl.convert(tmp_path / "s", tmp_path / "made", "safetensors()")
    assert (tmp_path / "made" / "config.json").read_text() == (tmp_path / "s" / "config.json").read_text()
    assert not any("from_pretrained" in note for note in ucpl.verify(tmp_path / "made").notes)
    _, said = getattr(transformers, kind).from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(said.values()), said
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    name = next(n for n in tensors if "layers.1" in n and "norm" in n)
    del tensors[name]
    save_file(tensors, tmp_path / "made" / "model.safetensors", {"format": "pt"})
    (tmp_path / "made" / "ucpl" / "manifest.json").unlink()
    assert any("random numbers" in note for note in ucpl.verify(tmp_path / "made").notes)


FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("num_key_value_heads", "head_dim"), "mistral": ("head_dim",), "qwen2": ("head_dim",), "qwen3": (),
}  # fmt: skip
SIZES_OF_FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 6, "num_key_value_heads": 1, "num_hidden_layers": 1},
    "keys of other classes": {"qkv_bias": True, "num_experts": 4, "sliding_window": 8, "layer_norm_eps": 1e-3},
    "defaults": {"num_key_value_heads": None, "head_dim": None},
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("case", SIZES_OF_FAMILIES)
def test_tensors_of_a_family_are_those_of_its_class(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in place of transformers, compared with the class."""
    config: dict[str, Any] = {**SIZES, "head_dim": 4, **SIZES_OF_FAMILIES[case], "model_type": kind}
    absent = [key for key, value in config.items() if value is None]
    config = {key: value for key, value in config.items() if value is not None}
    name = f"{transformers.CONFIG_MAPPING[kind].__name__.removesuffix('Config')}ForCausalLM"
    known = classes.saved_of(config := {**config, "architectures": [name]})
    assert (families.shapes_of(config) is not None) == ({*absent} <= {*FAMILIES[kind]})
    monkeypatch.setattr(classes, "shapes_of", lambda _: None)
    own = classes.saved_of(config)
    assert own is not None and known is not None
    for field in ("name", "shapes", "tied", "dropped", "prefix", "modules", "places"):
        assert getattr(known, field) == getattr(own, field), field


TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 8},
    "gpt_neox": {},
    "granitemoe": {"num_local_experts": 3},
    "llava": {},
}


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("to", ["plain()", "zero1(dp=2)", "dcp(fsdp=2)"])
def test_names_that_a_module_does_not_have_are_noted(kind: str, to: str, tmp_path: Path) -> None:
    """transformers 5 renames modules; shipped layouts give the module's names."""
    of = transformers.CONFIG_MAPPING[kind]
    made = (
        of(vision_config=CLIP, text_config={"model_type": "llama", **SIZES})
        if kind == "llava"
        else of(**{**SIZES, **TINY[kind]})
    )
    auto = transformers.AutoModelForImageTextToText if kind == "llava" else transformers.AutoModelForCausalLM
    model = auto.from_config(made)
    model.save_pretrained(tmp_path / "hf")
    files = load_file(tmp_path / "hf" / "model.safetensors")
    notes = ucpl.convert(tmp_path / "hf", tmp_path / "made", to).report.remarks
    said = [note for note in notes if "transformers 5 renames" in note]
    assert bool(said) == bool({*files} - {*model.state_dict()})
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        there, behind = re.findall(r"'of ([^']*)'", said[0])
        ucpl.convert(tmp_path / "hf", tmp_path / "again", f"{to} of {behind}", layout=f"of {there}")
        assert {t.name for t in open_checkpoint(tmp_path / "again").state.tensors} == {*model.state_dict()}


def test_a_common_class_is_checked_without_an_import_of_transformers(tmp_path: Path) -> None:
    model = written(tmp_path / "hf", architectures=["LlamaForCausalLM"])
    torch.save({"params": {n: {"weight": t} for n, t in model.state_dict().items()}}, tmp_path / "s.pt")
    how = f"to='safetensors()', config={str(tmp_path / 'hf' / 'config.json')!r}"
    text = f"import sys, ucpl; ucpl.convert({str(tmp_path / 's.pt')!r}, {str(tmp_path / 'made')!r}, {how})"
    run = subprocess.run(
        [sys.executable, "-c", f"{text}; print('transformers' in sys.modules)"], capture_output=True, text=True
    )
    assert run.stdout.strip() == "False", run.stderr
    loaded(tmp_path / "made")


def adapted(folder: Path, kind: str) -> tuple[Any, Any]:
    """A base model, and a PEFT adapter, as their libraries save them.

    Returns the adapted model and logits.
    """
    base = written(folder / "base", tie_word_embeddings=False)
    more: dict[str, Any] = {"modules_to_save": ["lm_head"]} if kind == "saved modules" else {}
    targets = ["q_proj", "embed_tokens"] if kind == "embeddings" else ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", use_dora=kind == "dora", **more)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) / 8)
    model.save_pretrained(folder / "adapter")
    ids = torch.arange(12).reshape(1, 12)
    return model, model.eval()(ids).logits.detach()


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("kind", ["lora", "saved modules", "embeddings", "dora"])
def test_peft_loads_an_adapter_of_a_run(kind: str, has_base: bool, tmp_path: Path) -> None:
    model, logits = adapted(tmp_path, kind)
    state = {n: t for n, t in model.state_dict().items() if has_base or "lora_" in n or "modules_to_save" in n}
    torch.save({"params": {f"module.{n}": {"weight": t.contiguous()} for n, t in state.items()}}, tmp_path / "run.pt")
    how: dict[str, Any] = {"config": tmp_path / "adapter" / "adapter_config.json"}
    ucpl.convert(tmp_path / "run.pt", tmp_path / "made", "safetensors()", **how)
    theirs, ours = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "made"))
    theirs = {
        n: t for n, t in theirs.items() if "base_layer" not in n
    }  # of embeddings, which PEFT saves with an adapter
    assert set(theirs) == set(ours) and all(torch.equal(theirs[n], ours[n]) for n in theirs)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    found = peft.PeftModel.from_pretrained(again, tmp_path / "made").eval()
    assert torch.equal(found(torch.arange(12).reshape(1, 12)).logits, logits)
    if has_base:
        config = (tmp_path / "base" / "config.json").read_text()
        (tmp_path / "made" / "config.json").write_text(config)
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
        stored = load_file(tmp_path / "made" / "model.safetensors")
        assert set(stored) == set(base) and all(torch.equal(stored[n], base[n]) for n in base)


@pytest.mark.parametrize("via", ["", "plain()", "dcp(fsdp=2)", "zero1(dp=2)"])
@pytest.mark.parametrize("kind", ["lora", "saved modules", "embeddings", "dora"])
def test_peft_loads_an_adapter_that_it_saved_on_the_other_side_of_a_form(kind: str, via: str, tmp_path: Path) -> None:
    _, logits = adapted(tmp_path, kind)
    here = tmp_path / "adapter"
    how: dict[str, Any] = {"config": here / "adapter_config.json"}
    if via:
        here = tmp_path / "between"
        ucpl.convert(tmp_path / "adapter", here, via)
    ucpl.convert(here, tmp_path / "made", "safetensors()", **(how if via else {}))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    found = peft.PeftModel.from_pretrained(again, tmp_path / "made").eval()
    assert torch.equal(found(torch.arange(12).reshape(1, 12)).logits, logits)


def test_transformers_loads_a_base_model_whose_adapter_is_left_out(tmp_path: Path) -> None:
    adapted(tmp_path, "lora")
    shutil.copytree(tmp_path / "adapter", tmp_path / "base", dirs_exist_ok=True)
    ucpl.convert(tmp_path / "base", tmp_path / "made", "safetensors()")
    loaded(tmp_path / "made")


def test_names_of_a_wrapper_are_those_of_the_class(tmp_path: Path) -> None:
    model = written(tmp_path / "hf")
    for lead in ("module.", "model_state.model.", "_orig_mod.module."):
        state = {f"{lead}{n}": {"weight": t} for n, t in model.state_dict().items()}
        torch.save({"params": state}, tmp_path / "run.pt")
        made = tmp_path / f"made {lead}"
        ucpl.convert(tmp_path / "run.pt", made, "safetensors()", config=tmp_path / "hf" / "config.json")
        found = loaded(made).state_dict()
        assert all(torch.equal(found[n], t) for n, t in model.state_dict().items())


MEGATRON = Path(__file__).parents[1] / "fixtures" / "megatron"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process, which Megatron-Core's loader asks for."""
    store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def as_megatron_loads_it(step: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Tensors of a folder, and parameter groups, by Megatron-Core's own functions."""
    from tests.interop import megatron_shims  # noqa: F401  # before Megatron

    # isort: split
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(step))
    common = dist_checkpointing.load_common_state_dict(str(step))
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=common) is not None
    held = common.get("optimizer", {})
    parts = [held] if "param_groups" in held or "optimizer" in held else [held[key] for key in sorted(held, key=str)]
    groups = [group for part in parts if part for group in part.get("optimizer", part)["param_groups"]]
    return tensors, [{key: value for key, value in group.items() if key != "params"} for group in groups]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("call", ["megatron_core(tp=2)", "megatron_core(pp=2)", "megatron_core(tp=2, pp=2)"])
@pytest.mark.parametrize("name", ["dist_stacked_tp2_pp2_fully", "dist_tied_vpp2", "dist_moe", "dist_unstacked_moe_ep2"])
def test_megatron_core_loads_a_target_as_it_loads_the_source(name: str, call: str, tmp_path: Path) -> None:
    """Groups with and without weight decay, and of experts; other degrees."""
    source = MEGATRON / name
    ucpl.convert(source, tmp_path / "made", call)
    theirs, ours = (as_megatron_loads_it(open_checkpoint(path).root) for path in (source, tmp_path / "made"))
    assert {*theirs[0]} == {*ours[0]}
    assert all(
        torch.equal(tensor, ours[0][key]) for key, tensor in theirs[0].items() if isinstance(tensor, torch.Tensor)
    )
    assert len(theirs[1]) > 1 and theirs[1] == ours[1]

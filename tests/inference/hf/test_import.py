"""import hf without transformers: headers, and a stand-in for a class."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from tests.formats.huggingface.folders import WRITTEN, llama_config, llama_shapes, random_of, save
from ucpl import api
from ucpl.errors import UcplError
from ucpl.inference import hf
from ucpl.inference.hf import reading
from ucpl.inference.hf.records import Config, Version
from ucpl.inference.hf.varying import Other, numbers_of, varied
from ucpl.language import nodes, parse


@pytest.fixture(autouse=True)
def no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)


def imported(source, folder):
    """The text of a folder; it must describe every tensor."""
    text = hf.import_hf(source)
    (folder / "made.ucpl").write_text(text)
    layout = f"{folder / 'made.ucpl'}:hf()"
    opened = api.open_checkpoint(source, layout)
    side, _ = api.source_side(opened, layout)
    assert sum(len(p.homes) for p in side.placement.parts) == len(opened.extents)
    return text, layout


def tensors_of_text(text):
    (model,) = [s for s in parse(text, "made").statements if isinstance(s, nodes.Model)]
    return {i.path: i for i in model.items if isinstance(i, nodes.Tensor)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_folder_that_transformers_wrote(name, tmp_path):
    text, layout = imported(WRITTEN / name, tmp_path)
    assert "transformers is not installed" in text
    found = tensors_of_text(text)
    assert len(found) == {"llama": 12, "gpt2": 20}[name]  # of gpt2, q, k and v apart
    ucpl.convert(WRITTEN / name, tmp_path / "p.pt", "plain()", layout=layout)
    params = torch.load(tmp_path / "p.pt", weights_only=True)["params"]
    path = {"llama": "mlp.up_proj.weight", "gpt2": "mlp.c_fc.weight"}[name]
    assert params[path]["weight"].shape == {"llama": (2, 48, 32), "gpt2": (2, 32, 128)}[name]


def test_a_folder_of_pickles_is_described_by_its_files(tmp_path):
    """No class is asked for names that a file has."""
    config = llama_config()
    whole = save(tmp_path / "s", random_of(llama_shapes(config)), config)
    (tmp_path / "p").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "p")
    torch.save(load_file(whole / "model.safetensors"), tmp_path / "p" / "pytorch_model.bin")
    found, wanted = (tensors_of_text(imported(folder, tmp_path)[0]) for folder in (tmp_path / "p", whole))
    assert found.keys() == wanted.keys() and len(found) > 9


def test_dims_are_named_where_one_key_has_their_size_and_never_on_a_square(tmp_path):
    config = llama_config(hidden_size=36, num_attention_heads=9, head_dim=4)  # q_proj is 36 by 36
    text, _ = imported(save(tmp_path / "s", random_of(llama_shapes(config)), config), tmp_path)
    found = tensors_of_text(text)
    dims = {path: [d.name for d in t.dims] for path, t in found.items()}
    assert dims["model.embed_tokens.weight"] == ["vocab_size", "hidden_size"]
    assert dims["mlp.down_proj.weight"] == ["l", "hidden_size", "intermediate_size"]
    assert dims["self_attn.q_proj.weight"] == ["l", "n", "d", "hidden_size"]
    assert dims["self_attn.k_proj.weight"] == ["l", "g", "d", "hidden_size"]
    assert dims["self_attn.o_proj.weight"] == ["l", "hidden_size", "n", "d"]
    assert "dim l = config.num_hidden_layers" in text


def test_a_square_that_no_name_explains_is_reported(tmp_path):
    config = llama_config(hidden_size=36)
    source = save(tmp_path / "s", {"model.mixer.odd.weight": torch.ones(36, 36)}, config)
    text, _ = imported(source, tmp_path)
    assert [d.name for d in tensors_of_text(text)["model.mixer.odd.weight"].dims] == ["n36", "m36"]
    (line,) = [x for x in text.splitlines() if "odd.weight" in x and ": n36" in x]
    assert "square, 36 by 36" in line
    assert "36 is config.hidden_size: whether a dim is one of them, the author knows." in text


def test_keys_of_one_size_are_distinguished_by_names_of_tensors(tmp_path):
    config = llama_config(intermediate_size=36, vocab_size=36)
    found = tensors_of_text(imported(save(tmp_path / "s", random_of(llama_shapes(config)), config), tmp_path)[0])
    dims = {path: [d.name for d in t.dims] for path, t in found.items()}
    assert dims["model.embed_tokens.weight"] == ["vocab_size", "hidden_size"]
    assert dims["mlp.up_proj.weight"] == ["l", "intermediate_size", "hidden_size"]


def test_a_number_that_is_a_key_by_chance_stays_a_number(tmp_path):
    """Without a class, a key is used only in its role."""
    config = llama_config(num_labels=5)
    source = save(tmp_path / "s", {"score.net.weight": torch.ones(5, 22)}, config)
    text, _ = imported(source, tmp_path)
    assert [d.name for d in tensors_of_text(text)["score.net.weight"].dims] == ["n5", "n22"]
    assert "5 is config.num_labels" in text and "22 is config.intermediate_size" in text


def test_headers_alone_without_a_config(tmp_path):
    save(
        tmp_path / "s",
        {"a.0.w": torch.ones(2, 3), "a.1.w": torch.ones(2, 3), "b": torch.tensor(1.0), "c.x y": torch.ones(4)},
    )
    text, _ = imported(tmp_path / "s", tmp_path)
    assert set(tensors_of_text(text)) == {"w", "b", "c.x y"}
    assert "dim l = 2" in text


@pytest.mark.parametrize(
    "numbers, written",
    [
        ([0, 1, 2, 3], "l"), ([1, 2, 3], "l[1..]"), ([0, 1], "l[..2]"), ([1, 3], "l[1.. by 2]"), ([0, 1, 3], "l[not 2]"),
        ([0, 3], "l[.. by 3]"), ([1], "l[1..2]"), ([0, 1, 2, 5], "l[not 3..5]"), ([0, 2, 3, 4, 6], "l[not 1.. by 4]"),
        ([0, 1, 4, 6], "l[not 2, 3, 5]"),
    ],
)  # fmt: skip
def test_layers_that_only_some_have(numbers, written, tmp_path):
    tensors = {f"layers.{i}.norm": torch.ones(5) for i in range(max(4, numbers[-1] + 1))} | {
        f"layers.{i}.moe": torch.ones(7) for i in numbers
    }
    text, _ = imported(save(tmp_path / "s", tensors), tmp_path)
    found = tensors_of_text(text)
    assert any("moe" in line and f": {written} " in line for line in text.splitlines()), text
    assert len(found) == 2


@pytest.mark.parametrize(
    "names",
    [
        ["a..0", "a..1", ".b"],  # a part without a letter is no number
        ["*.0", ".*.h", "0.0", "1.0"],
        ["a{.0", "a{.1", "}", "{l}", "{{"],  # no hole of a template
        ["0", "1", "#", "##"],  # the mark of a number in a name without other text
        ["999999999", "a.9999.9999", "a.0.0"],  # a number is no count of layers
        ["1", "01", "001"],
    ],
)
def test_odd_names_stay_separate(names, tmp_path):
    source = save(tmp_path / "s", {name: torch.ones(3) for name in names})
    _, layout = imported(source, tmp_path)
    ucpl.convert(source, tmp_path / "back", layout, layout=layout)
    assert ucpl.compare(source, tmp_path / "back", a_layout=layout, b_layout=layout)


def test_layers_that_the_config_lists_use_its_list(tmp_path):
    tensors = {f"layers.{i}.norm": torch.ones(5) for i in range(5)} | {
        f"layers.{i}.mix": torch.ones(7) for i in (1, 2, 4)
    }
    tensors |= {f"layers.{i}.moe": torch.ones(9) for i in (0, 1, 4)}
    config = llama_config(num_hidden_layers=5, layer_types=["full", "mix", "mix", "full", "mix"], dense_layers=[2, 3])
    text, _ = imported(save(tmp_path / "s", tensors, config), tmp_path)
    assert 'let mix = where(config.layer_types, "mix")' in text and "mix  : l[mix] n7" in text
    assert "let dense_layers = config.dense_layers" in text and "moe  : l[not dense_layers] n9" in text


def test_scales_of_blocks_are_counted_by_the_dims_of_their_weights(tmp_path):
    config = llama_config(quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]})
    tensors = random_of(llama_shapes(config))
    name = "model.layers.{}.self_attn.k_proj.weight"  # 12 by 36
    for i in range(4):
        tensors[name.format(i)] = tensors[name.format(i)].to(torch.float8_e4m3fn)
        tensors[name.format(i) + "_scale_inv"] = torch.ones(2, 3)
    text, _ = imported(save(tmp_path / "s", tensors, config), tmp_path)
    found = tensors_of_text(text)
    assert [d.name for d in found["self_attn.k_proj.weight_scale_inv"].dims] == [
        "l",
        "g_d_blocks",
        "hidden_size_blocks",
    ]
    assert "dim g_d = config.num_key_value_heads * config.head_dim" in text and "dim g_d_blocks = ceil(g_d, 8)" in text
    weight = found["self_attn.k_proj.weight"]
    assert weight.dtype == "f8_e4m3fn" and [d.name for d in weight.dims] == ["l", "g_d", "hidden_size"]
    scaling = found["self_attn.k_proj.weight_scale_inv"].scaling
    assert scaling is not None and (scaling.of, [n.value for n in scaling.by]) == (weight.path, [8, 16])
    assert "fp8, in blocks of 8 x 16" in text
    # Two groups of 4 rows are a block: keys and values alike are cut where two groups end.
    assert "g_d@chunk(tp, 8) hidden_size" in text and "g_d_blocks@chunk(tp) hidden_size_blocks" in text
    assert "(g@chunk(tp, 2) d) hidden_size" in text


def round_trip(source, folder, layout):
    """Three ranks and back, bit for bit, and the folder of products."""
    spec = layout.removesuffix(":hf()")
    ucpl.convert(source, folder / "ranks", f"{spec}:tensor_parallel(tp = 3)", layout=layout)
    ucpl.convert(folder / "ranks", folder / "back", layout, layout=f"{spec}:tensor_parallel(tp = 3)")
    ucpl.convert(
        folder / "ranks", folder / "products", f"{spec}:dequantised()", layout=f"{spec}:tensor_parallel(tp = 3)"
    )
    before, after, products = (
        load_file(f / "model.safetensors") for f in (source, folder / "back", folder / "products")
    )
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    return before, products


def test_what_is_written_of_fp8_moves_weights_with_their_scales_and_makes_products(tmp_path):
    config = llama_config(quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]})
    tensors = random_of(llama_shapes(config))
    for name in [n for n in tensors if "_proj" in n]:
        rows, columns = tensors[name].shape
        tensors[name] = (tensors[name] * 50).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.rand(-(-rows // 8), -(-columns // 16))
    source = save(tmp_path / "s", tensors, config)
    _, layout = imported(source, tmp_path)
    before, products = round_trip(source, tmp_path, layout)
    for name, tensor in before.items():
        if (scale := before.get(name + "_scale_inv")) is not None:
            rows, columns = tensor.shape
            each = scale.repeat_interleave(8, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
            assert torch.equal(products[name], (tensor.float() * each).bfloat16())
    assert set(products) == {n for n in before if not n.endswith("_scale_inv")}


def test_what_is_written_of_mxfp4_moves_blocks_with_their_exponents_and_makes_products(tmp_path):
    config = llama_config(num_local_experts=3, quantization_config={"quant_method": "mxfp4"})
    tensors = random_of(llama_shapes(config))
    numbers = torch.Generator().manual_seed(3)
    for i in range(4):
        for name, rows, groups in (("gate_up_proj", 192, 2), ("down_proj", 64, 3)):
            path = f"model.layers.{i}.mlp.experts.{name}"
            tensors[path + "_blocks"] = torch.randint(0, 256, (3, rows, groups, 16), generator=numbers).to(torch.uint8)
            tensors[path + "_scales"] = torch.randint(100, 140, (3, rows, groups), generator=numbers).to(torch.uint8)
    source = save(tmp_path / "s", tensors, config)
    text, layout = imported(source, tmp_path)
    found = tensors_of_text(text)["mlp.experts.down_proj_scales"]
    assert found.dtype == "f8_e8m0fnu" and found.scaling.of == "mlp.experts.down_proj"
    before, products = round_trip(source, tmp_path, layout)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([positive, -positive])
    for name in [n for n in before if n.endswith("_blocks")]:
        bytes_, exponents = before[name], before[name.replace("_blocks", "_scales")].int() - 127
        elements = values[torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2).long()]
        product = torch.ldexp(elements, exponents[..., None]).flatten(-2).bfloat16().transpose(1, 2)
        assert torch.equal(products[name.removesuffix("_blocks")], product)


@pytest.mark.parametrize("sides", [[None, 16], [8, 0], [8, "16"], "8", []])
def test_blocks_with_a_missing_side_are_none(sides, tmp_path):
    config = llama_config(quantization_config={"quant_method": "fp8", "weight_block_size": sides})
    tensors = random_of(llama_shapes(config))
    tensors["model.layers.0.self_attn.k_proj.weight_scale_inv"] = torch.ones(2, 3)
    text, _ = imported(save(tmp_path / "s", tensors, config), tmp_path)
    assert "ceil(" not in text and "config.quantization_config: fp8. Scales" in text


def test_what_files_and_configs_say_stays_within_its_line(tmp_path):
    """Words of a config, and names, are remarks and never statements."""
    said = "fp8\nlet owned = 1\r\nmodel other {\n}\n#"
    config = llama_config(quantization_config={"quant_method": said}, model_type="any")
    tensors = random_of(llama_shapes(config))
    source = save(tmp_path / "s", tensors, config)
    owner = "model.layers.1.input_layernorm.weight"
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt", f"evil {said}.weight": owner})
    text, _ = imported(source, tmp_path)
    named = [(type(s), getattr(s, "name", "")) for s in parse(text, "made").statements]
    assert named == [(nodes.Model, "any_model"), (nodes.Layout, "hf"), (nodes.Layout, "tensor_parallel")]
    assert text.count("let owned") == 2 and all(
        line.lstrip()[0] == "#" for line in text.splitlines() if "owned" in line
    )


@pytest.mark.parametrize("stored", [False, True])
def test_layers_behind_the_last_have_a_switch(stored, tmp_path, monkeypatch):
    config = llama_config(num_nextn_predict_layers=2, model_type="deepseek_v3")
    shapes = llama_shapes(config)
    saved = tuple(hf.FoundTensor(n, s, "f32") for n, s in shapes.items())
    facts = hf.Class((Version(saved, numbers_of(config)),), dropped=(r"model\.layers\.61.*",))
    monkeypatch.setattr(reading, "class_of", lambda *_, **__: facts)
    if stored:
        last = {n.replace("layers.3.", "layers.4."): s for n, s in shapes.items() if "layers.3." in n}
        shapes |= last | {n.replace("layers.4.", "layers.5."): s for n, s in last.items()}
        shapes |= {f"model.layers.{i}.eh_proj.weight": (36, 72) for i in (4, 5)}
    text, _ = imported(save(tmp_path / "s", random_of(shapes), config), tmp_path)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert ("let mtp = config.num_nextn_predict_layers" if stored else "let mtp = 0") in lines
    assert "dim l = config.num_hidden_layers + mtp" in lines
    assert "eh_proj.embed, eh_proj.hidden : l[config.num_hidden_layers..] hidden_size hidden_size2" in lines


def test_layers_of_different_shapes_stay_apart(tmp_path):
    text, _ = imported(save(tmp_path / "s", {f"layers.{i}.w": torch.ones(i + 1) for i in range(3)}), tmp_path)
    assert len(tensors_of_text(text)) == 3


def test_two_towers_have_counts_of_their_own(tmp_path):
    tensors = {f"encoder.layers.{i}.w": torch.ones(3) for i in range(2)} | {
        f"decoder.layers.{i}.w": torch.ones(3) for i in range(5)
    }
    tensors |= {f"decoder.layers.{i}.experts.{e}.w": torch.ones(4) for i in range(5) for e in range(3)}
    text, _ = imported(save(tmp_path / "s", tensors), tmp_path)
    assert "dim l = 5" in text and "dim encoder_l = 2" in text and "dim experts = 3" in text
    assert {*tensors_of_text(text)} == {"encoder.layers.w", "decoder.layers.w", "experts.w"}, (
        "the first two share a name"
    )


def test_tensors_with_one_pattern_share_a_line_and_their_names_are_in_the_key(tmp_path):
    names = ("attn.k_proj.weight", "attn.v_proj.weight", "mlp.weight", "mlp.experts.{}.up.weight")
    tensors = {f"model.layers.{i}.{n.format(e)}": torch.ones(3, 5) for i in range(2) for n in names for e in range(2)}
    tensors |= {"model.embed.weight": torch.ones(7, 5), "mlp.weight": torch.ones(9, 5)}
    text, _ = imported(save(tmp_path / "s", tensors), tmp_path)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert 'let layer = "model.layers.{l}."' in lines
    assert "attn.k_proj.weight, attn.v_proj.weight, model.layers.mlp.weight : l n3 n5" in lines
    assert 'attn.k_proj.weight, attn.v_proj.weight = n3 n5 as "{layer}{name}"' in lines
    assert 'model.layers.mlp.weight = n3 n5 as "model.layers.{l}.mlp.weight"' in lines, (
        "another tensor has its short name"
    )
    assert 'mlp.experts.up.weight = n3 n5 as "{layer}mlp.experts.{experts}.up.weight"' in lines
    assert 'model.embed.weight = n7 n5 as "{name}"' in lines


def test_every_third_layer_and_the_others(tmp_path):
    """Layers by a step, and those between, as Qwen2-MoE's `mlp_only_layers`."""
    tensors = {f"layers.{i}.{'dense' if i % 3 == 0 else 'moe'}.w": torch.ones(3) for i in range(5)}
    text, _ = imported(save(tmp_path / "s", tensors), tmp_path)
    assert "dense.w : l[.. by 3] n3" in text and "moe.w   : l[not 0.. by 3] n3" in text


def test_a_config_is_varied_within_what_its_class_has():
    """Numbers of layers stay so, and single groups vary like several."""
    config: Config = {
        "num_hidden_layers": 5,
        "layer_types": ["a"] * 5,
        "mlp_only_layers": [0, 3],
        "n_groups": 1,
        "num_heads": 6,
    }
    for seed in range(2):
        other = varied(config, {}, seed, Other(True, True))
        assert other["mlp_only_layers"] == [[2, 0], [3, 1]][seed]
        numbers = numbers_of(other)
        assert numbers["n_groups"] > 1 and numbers["num_heads"] % numbers["n_groups"] == 0
    assert varied({"mlp_only_layers": [0, 3]}, {}, 0, Other(True, True)) == {"mlp_only_layers": [2, 0]}


def test_dtypes_that_are_not_the_common_one_are_written(tmp_path):
    save(
        tmp_path / "s",
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.arange(3)},
    )
    found = tensors_of_text(imported(tmp_path / "s", tmp_path)[0])
    assert found["a"].dtype is None and found["c"].dtype == "i64"


def test_what_a_class_adds(tmp_path, monkeypatch):
    """Ties, buffers and a plan of tensor parallelism, as in transformers."""
    config = llama_config(tie_word_embeddings=True)
    shapes = {**llama_shapes(config), "model.seen": (2,)}
    source = save(tmp_path / "s", random_of(shapes), config)
    saved = tuple(hf.FoundTensor(n, s, "f32", n == "model.seen") for n, s in shapes.items())
    facts = hf.Class(
        (Version(saved, numbers_of(config)),),
        {"lm_head.weight": "model.embed_tokens.weight"},
        {
            "model.layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise",
            "model.seen": "odd",
        },
    )
    monkeypatch.setattr(reading, "class_of", lambda *_, **__: facts)
    text, layout = imported(source, tmp_path)
    assert "alias lm_head.weight = model.embed_tokens.weight" in text
    assert tensors_of_text(text)["model.seen"].kind == "buffer"
    assert "model.seen: the class's plan says `odd`" in text
    assert text.count("  mesh pp tp\n") == 1, "a repeated line is a remark of `check`"
    parallel = layout.replace("hf()", "tensor_parallel(tp = 3)")
    ucpl.convert(source, tmp_path / "tp", parallel, layout=layout)
    ucpl.convert(tmp_path / "tp", tmp_path / "back", layout, layout=parallel)
    assert ucpl.compare(source, tmp_path / "back", a_layout=layout, b_layout=layout)
    first = api.open_checkpoint(tmp_path / "tp" / "tp_02.safetensors").extents[
        "model.safetensors", ("model.layers.0.mlp.up_proj.weight",)
    ]
    assert first.shape == (6, 36)  # chunks of 22 over 3: 8 8 6
    stages = layout.replace("hf()", "tensor_parallel(tp = 3, pp = 2)")
    ucpl.convert(tmp_path / "tp", tmp_path / "pp", stages, layout=parallel)
    names = [set(load_file(tmp_path / "pp" / f"pp_0{stage}_tp_02.safetensors")) for stage in range(2)]
    for stage, layers in enumerate([(0, 1), (2, 3)]):
        found = {int(name.split(".")[2]) for name in names[stage] if ".layers." in name}
        assert found == set(layers), "a run of layers for each stage"
    ucpl.convert(tmp_path / "pp", tmp_path / "again", layout, layout=stages)
    assert ucpl.compare(source, tmp_path / "again", a_layout=layout, b_layout=layout)
    with pytest.raises(UcplError, match="E204"):  # nine heads on four ranks: none is cut
        ucpl.convert(source, tmp_path / "no", layout.replace("hf()", "tensor_parallel(tp = 4)"), layout=layout)


@pytest.mark.parametrize(
    "what, code", [("empty", "E395"), ("config alone", "E396"), ("broken", "E395"), ("a list", "E395")]
)
def test_what_cannot_be_imported(what, code, tmp_path):
    text = {"config alone": json.dumps(llama_config()), "broken": "{", "a list": "[]"}.get(what)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UcplError) as caught:
        hf.import_hf(tmp_path)
    assert caught.value.diagnostics[0].code == code


def test_the_verb(tmp_path, capsys):
    from ucpl.cli import main

    assert main(["import", "hf", str(WRITTEN / "llama"), "-o", str(tmp_path / "a.ucpl")]) == 0
    capsys.readouterr()
    assert main(["import", "hf", str(WRITTEN / "llama")]) == 0
    assert (tmp_path / "a.ucpl").read_text() == capsys.readouterr().out
    assert main(["fmt", "--check", str(tmp_path / "a.ucpl")]) == 0
    assert main(["check", str(tmp_path / "a.ucpl"), "--config", str(WRITTEN / "llama" / "config.json")]) == 0
    assert main(["import", "hf", str(tmp_path / "nothing")]) == 3


def test_files_without_names_are_named_where_there_is_no_class(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UcplError, match=r"E396.*a config alone has no names"):
        hf.import_hf(tmp_path)
    (tmp_path / "model.pth").write_bytes(b"PK")
    with pytest.raises(UcplError, match=r"E396.*weights are in model\.pth") as caught:
        hf.import_hf(tmp_path)
    assert "save_pretrained" in caught.value.diagnostics[0].remedy

"""AutoTP's cuts of classes, compared with DeepSpeed's own.

tests/fixtures/autotp.json has both, from DeepSpeed 0.19.8. `python -m tests.interop.autotp_truth` writes it anew;
tests/interop/test_deepspeed_autotp.py does the same with engines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import evolve
from torch import nn

from tests.inference.autotp_records import cuts_in, network_in, recorded
from tests.inference.facts import base_of, model_of, text_of
from ucpl.api import plan
from ucpl.errors import UcplError
from ucpl.extents import Sharding
from ucpl.formats.deepspeed.cuts import info_of
from ucpl.inference import ranks
from ucpl.inference.autotp import AutoTPOptions, cuts_of
from ucpl.inference.hf import classes, networks
from ucpl.inference.hf.modules import EMBEDDING, LINEAR, Heads, Module, Network
from ucpl.inference.parallel import Base, Extended
from ucpl.language import nodes, parse_call

FOUND = json.loads((Path(__file__).parents[1] / "fixtures" / "autotp.json").read_text(encoding="utf-8"))
NETWORKS = {name: network_in(one["network"]) for name, one in FOUND.items()}
CASES = [(name, int(degree)) for name, one in FOUND.items() for degree in one["cuts"]]
# Cuts of DeepSpeed that no checkpoint has: ranks without any of a tensor, and blocks of heads in another order.
ONLY_DEEPSPEED = {
    **dict.fromkeys([("llama_two_heads", 3), ("llama_two_heads", 4)], "E473"),
    **dict.fromkeys([("gpt_bigcode", 2), ("gpt_bigcode", 3), ("gpt_bigcode", 4)], "E473"),
    ("codegen", 3): "E472",
}


def asked(network: Network, degree: int, **more: Any) -> AutoTPOptions:
    return AutoTPOptions(degree, network.heads.kv, **more)


def maps(cuts: dict[str, Sharding], degree: int) -> dict[str, Any]:
    """Cuts through the writer of affine_map, which other tests compare with DeepSpeed."""
    affine: Any = info_of(cuts, degree, {})["affine_map"]
    return cuts_in({pattern.replace("\\", "")[1:-1]: one for pattern, one in affine["params"].items()})


def code_of(error: pytest.ExceptionInfo[UcplError]) -> str:
    return error.value.diagnostics[0].code


@pytest.mark.parametrize(("name", "degree"), CASES)
def test_cuts_are_those_that_deepspeed_makes(name: str, degree: int) -> None:
    network, theirs = NETWORKS[name], FOUND[name]["cuts"][str(degree)]
    code = "E472" if isinstance(theirs, str) else ONLY_DEEPSPEED.get((name, degree))
    if code is not None:
        with pytest.raises(UcplError) as error:
            cuts_of(network, asked(network, degree))
        assert code_of(error) == code
        return
    mine = cuts_of(network, asked(network, degree))
    assert list(mine) == list(network.shapes)
    assert maps(mine, degree) == theirs


def test_classes_are_of_every_way_there_is() -> None:
    """Cases: a plan, a policy, a tied head, an uncut head."""
    assert {bool(network.plan) for network in NETWORKS.values()} == {True, False}
    assert "model.embed_tokens.weight" in FOUND["qwen2_tied"]["cuts"]["2"]
    assert "model.embed_tokens.weight" not in FOUND["gemma_tied"]["cuts"]["2"]
    assert "lm_head.weight" in FOUND["llama"]["cuts"]["2"]
    assert {len(cut[0]) for cut in FOUND["mpt"]["cuts"]["3"].values()} == {1, 3}, "q, k and v are three pieces"


def origin(name: str, tensor: str, **more: Any) -> str:
    network = NETWORKS[name]
    return cuts_of(network, asked(network, 2, **more))[tensor].origin


def test_each_cut_has_its_rule() -> None:
    layer = "model.layers.0"
    assert origin("llama", f"{layer}.self_attn.k_proj.weight") == (
        "colwise of layers.*.self_attn.k_proj, base_model_tp_plan of LlamaConfig"
    )
    assert origin("llama", "lm_head.weight") == "colwise_gather_output of lm_head, _tp_plan of LlamaForCausalLM"
    assert origin("qwen2_tied", "model.embed_tokens.weight") == (
        "lm_head with model.embed_tokens by the vocabulary: embedding_rowwise of model.embed_tokens, _tp_plan of"
        " Qwen2ForCausalLM"
    )
    block = "transformer.h.0"
    assert origin("bloom", f"{block}.self_attention.dense.weight") == (
        "AutoTP: BloomBlock.self_attention.dense is summed over ranks, columns"
    )
    assert origin("bloom", f"{block}.self_attention.query_key_value.bias") == (
        "AutoTP: BloomBlock.self_attention.query_key_value, fused as in BloomBlock"
    )
    assert origin("bloom", f"{block}.mlp.dense_h_to_4h.bias").endswith("is not summed, rows")
    assert origin("bloom", f"{block}.mlp.dense_4h_to_h.bias") == "", "the bias of what is summed is whole"


# ---- options of DeepSpeed's config
# ------------------------------------------------------------------------------------


def test_the_vocabulary_is_cut_on_request_and_uncut_if_refused() -> None:
    tied, opt = NETWORKS["qwen2_tied"], NETWORKS["opt"]
    whole = cuts_of(tied, asked(tied, 2, vocabulary=False))
    assert whole["model.embed_tokens.weight"].dim is None, "what is put together on all ranks unties nothing"
    assert whole["model.layers.0.self_attn.q_proj.weight"].dim == 0
    cut = cuts_of(opt, asked(opt, 2, vocabulary=True))
    assert cut["model.decoder.embed_tokens.weight"].local(1) == (65, 96)
    assert "vocab_parallel_lm_head" in cut["model.decoder.embed_tokens.weight"].origin
    with pytest.raises(UcplError, match="GemmaTextScaledWordEmbedding, which does more than look rows up"):
        cuts_of(NETWORKS["gemma_tied"], asked(NETWORKS["gemma_tied"], 2, vocabulary=True))
    with pytest.raises(UcplError, match="no loss that can be replaced"):
        cuts_of(evolve(opt, takes_loss=False), asked(opt, 2, vocabulary=True))
    with pytest.raises(UcplError, match="0 linear modules are called lm_head or embed_out"):
        cuts_of(NETWORKS["bert"], asked(NETWORKS["bert"], 2, vocabulary=True))
    assert cuts_of(evolve(tied, takes_loss=False), asked(tied, 2))["model.embed_tokens.weight"].dim is None


def test_grains_move_the_cut() -> None:
    network = NETWORKS["llama"]
    fine, coarse = (cuts_of(network, asked(network, 2, grain=grain)) for grain in (1, 32))
    name = "model.layers.0.mlp.down_proj.weight"
    assert [fine[name].local(rank)[1] for rank in (0, 1)] == [67, 66]
    assert [coarse[name].local(rank)[1] for rank in (0, 1)] == [64, 69]


def test_a_plan_that_deepspeed_does_not_know_is_refused_by_its_line() -> None:
    for name, line in (("mixtral", "layers.*.mlp.experts"), ("phi3", "layers.*.self_attn.o_proj")):
        with pytest.raises(UcplError) as error:
            cuts_of(NETWORKS[name], asked(NETWORKS[name], 2))
        (found,) = error.value.diagnostics
        assert found.code == "E472" and line in found.message and "partition_config" in found.remedy


def test_a_class_without_a_plan_that_deepspeed_leaves_out_is_refused() -> None:
    with pytest.raises(
        UcplError, match="GPT2LMHeadModel has no plan of tensor parallelism, and DeepSpeed's AutoTP refuses"
    ):
        cuts_of(NETWORKS["gpt2"], asked(NETWORKS["gpt2"], 2))


def test_fewer_heads_than_ranks_is_named() -> None:
    network = NETWORKS["llama_two_heads"]
    with pytest.raises(UcplError) as error:
        cuts_of(network, asked(network, 4))
    (found,) = error.value.diagnostics
    assert found.code == "E473" and "tp rank 2 of 4 would hold nothing of `model.layers.0.self_attn." in found.message
    assert "2 key-value heads" in found.notes[0] and found.remedy == "choose a tp of at most 2 for this model"


# ---- a model of our own ------------------------------------------------------------------------------------------------


def small(plan: dict[str, str], tied: bool = False) -> Network:
    """An embedding of 6 x 4, a linear module, and a head.

    The head may be one with the embedding.
    """
    parts = (
        Module("embed", "own.Rows", EMBEDDING, {"weight": (6, 4)}),
        Module("up", "own.Linear", LINEAR, {"weight": (8, 4), "bias": (8,)}),
        Module("lm_head", "own.Linear", LINEAR, {"weight": (6, 4)}),
    )
    shapes = {"embed.weight": (6, 4), "up.weight": (8, 4), "up.bias": (8,), "lm_head.weight": (6, 4)}
    if tied:
        del shapes["lm_head.weight"]
    owners = {"lm_head.weight": "embed.weight"} if tied else {}
    said = dict.fromkeys(plan, "a plan")
    return Network(Module("", "own.SmallModel", children=parts), shapes, owners, plan, said, Heads(2, "heads of it"))


def dims(network: Network, degree: int = 2) -> dict[str, int | None]:
    return {name: s.dim for name, s in cuts_of(network, asked(network, degree)).items()}


def test_the_first_line_that_matches_counts() -> None:
    plan = {"up": "rowwise", "*": "colwise"}
    assert dims(small(plan)) == {"embed.weight": 1, "up.weight": 1, "up.bias": None, "lm_head.weight": 0}
    assert dims(small(dict(reversed(plan.items()))))["up.weight"] == 0
    assert dims(small({"up.weight": "colwise"})) == {
        "embed.weight": None, "up.weight": 0, "up.bias": 0, "lm_head.weight": None,
    }  # fmt: skip
    assert dims(small({"p": "colwise"}))["up.weight"] == 0, "from anywhere in the name, as DeepSpeed matches"


def test_a_tie_is_one_cut() -> None:
    gathered = {"embed": "replicated_with_grad_allreduce", "lm_head": "colwise_gather_output"}
    assert dims(small(gathered, tied=True))["embed.weight"] is None
    assert dims(small({**gathered, "embed": "embedding_rowwise"}, tied=True))["embed.weight"] == 0
    assert dims(small({"embed": "embedding_rowwise"}))["embed.weight"] is None, "only with a head"
    with pytest.raises(UcplError, match=r"untie the tensors that share `embed.weight`"):
        cuts_of(small({"embed": "colwise"}, tied=True), AutoTPOptions(2, 0))


def test_a_pattern_that_takes_too_long_is_refused() -> None:
    with pytest.raises(UcplError, match="a pattern that may take too long to match"):
        cuts_of(small({"*a*a*a*a*a": "colwise"}), AutoTPOptions(2, 0))


# ---- a call ------------------------------------------------------------------------------------------------------------


def asks(call: str, network: Network, monkeypatch: pytest.MonkeyPatch, model: nodes.Model | None = None) -> Extended:
    monkeypatch.setattr(networks, "network_of", lambda config: network)
    made = model or model_of(embed_weight=(6, 4), up_weight=(8, 4), up_bias=(8,))
    base: Base = evolve(base_of(call, made), config={"model_type": "own"})
    return ranks.target(base, None, {})


def test_a_config_says_the_class_and_a_call_what_deepspeeds_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small({"up": "colwise", "embed": "embedding_rowwise"}, tied=True)
    made = asks("plainly(dp = 2, tp = 2)", network, monkeypatch)
    assert 'embed.weight = _@tp ... as "embed.weight"' in text_of(made)
    assert 'up.bias = _@tp as "up.bias"' in text_of(made)
    assert made.notes == (
        ("kv_heads", 2, "heads of it"),
        ("tp_grain_size", 1, "DeepSpeed's default"),
        ("cuts over tp", "1 tensor", "lm_head with embed by the vocabulary: embedding_rowwise of embed, a plan"),
        ("cuts over tp", "2 tensors", "colwise of up, a plan"),
        ("whole", "0 tensors", "no rule names them: a copy on every rank"),
        ("alias", "lm_head.weight of embed.weight", "tied in SmallModel"),
    )
    assert made.model is not None and made.model.items[-1] == nodes.Alias("lm_head.weight", "embed.weight")
    call = "plainly(dp = 2, tp = 3, kv_heads = 4, vocab_parallel_lm_head = 0, tp_grain_size = 2)"
    made = asks(call, network, monkeypatch)
    assert made.call == evolve(parse_call("target(dp = 2, tp = 3)"), name="target")
    assert "embed.weight" not in text_of(made) and "up.weight = _@spread(tp, 2)" in text_of(made)
    assert made.notes[:2] == (("kv_heads", 4, "given"), ("tp_grain_size", 2, "given"))


def own(**more: tuple[int, ...]) -> nodes.Model:
    """The tensors of `small`, some of them otherwise."""
    shapes = {"embed.weight": (6, 4), "up.weight": (8, 4), "up.bias": (8,), "lm_head.weight": (6, 4), **more}
    items = [nodes.Tensor(name, tuple(nodes.Dimension(None, n) for n in shape)) for name, shape in shapes.items()]
    return nodes.Model("m", tuple(items))


def test_a_config_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small({"up": "colwise"})
    call = "plainly(dp = 2, tp = 2)"
    assert 'up.bias = _@tp as "up.bias"' in text_of(asks(call, network, monkeypatch, own()))
    with pytest.raises(
        UcplError, match=r"E472.*the model has `a`, and SmallModel.*has no such tensor; it has `embed.weight`"
    ):
        asks(call, network, monkeypatch, own(a=(3, 3)))
    with pytest.raises(UcplError, match=r"E472.*`up.weight` is \[8, 5\], and \[8, 4\] in SmallModel"):
        asks(call, network, monkeypatch, own(**{"up.weight": (8, 5)}))
    with pytest.raises(
        UcplError, match=r"E472.*SmallModel, which the config names, has `up.bias`, and the model has no such"
    ):
        asks(call, network, monkeypatch, model_of(embed_weight=(6, 4), up_weight=(8, 4)))
    with pytest.raises(
        UcplError, match=r"E472.*`lm_head.weight` and `embed.weight` are two tensors of the model, and one in"
    ):
        asks(call, small({"up": "colwise"}, tied=True), monkeypatch, own())


# ---- a class -----------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Half of a transformers class, with the attributes that are read."""

    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise", "model.up": "rowwise"}

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.up = nn.ModuleList([nn.Linear(4, 8), nn.LayerNorm(8)])
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.tied = tied
        vars(self)["_tp_plan"] = {"model.lm_head": "rowwise", "own": "colwise"}

    def tie_weights(self) -> None:
        if self.tied:
            self.lm_head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


class HeadConfig:
    base_model_tp_plan: ClassVar[dict[str, str]] = {"up": "colwise"}
    num_key_value_heads = None
    num_attention_heads = 12
    hidden_size = 96


@pytest.mark.parametrize("tied", [False, True])
def test_a_class_becomes_records(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "built_of", lambda config: (Head(tied), HeadConfig()))
    network = networks.network_of({})
    assert network.owners == ({"lm_head.weight": "embed.weight"} if tied else {})
    assert list(network.shapes.items())[:2] == [("embed.weight", (6, 4)), ("up.0.weight", (8, 4))]
    roles = [(path, m.role, m.class_name) for path, m in network.root.walk()]
    assert roles == [
        ("embed", "embedding", "Embedding"), ("up", "list", "ModuleList"), ("up.0", "linear", "Linear"),
        ("up.1", "norm", "LayerNorm"), ("lm_head", "linear", "Linear"),
    ]  # fmt: skip
    assert network.plan == {"up": "colwise", "lm_head": "colwise", "own": "colwise"}, "model.x is left out where x is"
    assert network.origins["up"] == "base_model_tp_plan of HeadConfig" and network.origins["own"] == "_tp_plan of Head"
    assert network.heads == Heads(12, "num_attention_heads of HeadConfig", 12, 96)
    assert not network.takes_loss and network.inputs == "embed"
    assert network_in(json.loads(json.dumps(recorded(network)))).plan == network.plan


def test_without_transformers_a_config_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UcplError, match=r"E396.*transformers is not installed"):
        classes.built_of({"model_type": "llama"})
    # Of a folder whose headers say all, tp asks for more than headers.
    with pytest.raises(UcplError, match="E396") as caught:
        plan(str(Path(__file__).parents[1] / "fixtures" / "trainer" / "checkpoint-3"), "zero1(tp=2)")
    remedy = caught.value.diagnostics[0].remedy
    assert "pip install" in remedy and "extends zero1" in remedy and ".safetensors" not in remedy

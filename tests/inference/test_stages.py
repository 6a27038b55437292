"""Pipelines and experts in the language: stages, copies, and settings."""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.inference.facts import base_of, checkpoint, model_of, read_again, text_of, with_parallel
from ucpl.errors import UcplError
from ucpl.extents import Section, Sharding
from ucpl.extents.parallel_facts import Expert, Experts
from ucpl.extents.pipeline import Layer, Pipeline
from ucpl.inference import experts as of_experts
from ucpl.inference import ranks
from ucpl.inference.parallel import Base, Extended
from ucpl.language import nodes

MODEL = model_of(a=(6, 4), b=(3,), c=(2, 2), d=(4,))
ZERO = "zero1(dp = 2)"


def stored_pipeline(base: Base, found: Pipeline) -> Extended:
    return ranks.stored(base, with_parallel(checkpoint(), pipeline=found))


def target_pipeline(base: Base, found: Pipeline) -> Extended:
    return ranks.target(base, with_parallel(checkpoint(), pipeline=found), {})


def stored_experts(base: Base, found: Experts) -> Extended:
    return ranks.stored(base, with_parallel(checkpoint(), experts=found))


def target_experts(base: Base, found: Experts) -> Extended:
    return ranks.target(base, with_parallel(checkpoint(), experts=found), {})


def layer(number: int, *tensors: str, tied: str | None = None) -> Layer:
    return Layer(number, f"layer_{number:02d}" if tensors else None, tuple((f"in.{t}", t) for t in tensors), tied)


def pipeline(*bounds: int, methods: tuple[str, ...] = ("uniform",), trusted: dict[str, int] | None = None) -> Pipeline:
    """Five layers.

    A, b, a function, c, and d; the first is tied to the end.
    """
    layers = (layer(0, "a", tied="t"), layer(1, "b"), layer(2), layer(3, "c", "d"), Layer(4, tied="t"))
    return Pipeline(layers, bounds, (24, 3, 0, 8, 24), methods, "names of files", trusted or {})


def refused(call: str, found: Pipeline, **inherited: int) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        target_pipeline(base_of(call, MODEL, **inherited), found)
    d = caught.value.diagnostics[0]
    return d.code, d.message


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_each_place_of_each_tensor_is_an_entry_in_its_layer_s_file() -> None:
    made = stored_pipeline(base_of(ZERO, MODEL), pipeline(0, 2, 5))
    text = text_of(made)
    for line in (
        'file layer_00 = torch "layer_00-model_states.pt"',
        'file layer_03 = torch "layer_03-model_states.pt"',
        "file nowhere = none",
        'a = ... at pp[0] in layer_00 as "in.a"',
        'a = ... at pp[1] in nowhere as "a"',
        'b = ... at pp[0] in layer_01 as "in.b"',
        'c = ... at pp[1] in layer_03 as "in.c"',
        'd = ... at pp[1] in layer_03 as "in.d"',
    ):
        assert line in text, line
    assert "layer_02" not in text and "layer_04" not in text and "any @pp" not in text
    assert made.notes == (("layers of stages", [2, 3], "names of files"),) and made.call.name == "stored"
    read_again(made)


def test_the_copy_that_is_trusted_comes_first_and_the_others_are_any() -> None:
    made = stored_pipeline(base_of(ZERO, MODEL), pipeline(0, 2, 5, trusted={"a": 1}))
    text = text_of(made)
    first, second = text.index("in nowhere as"), text.index('in layer_00 as "in.a"')
    assert first < second and 'a = ... any @pp at pp[0] in layer_00 as "in.a"' in text
    assert 'a = ... at pp[1] in nowhere as "a"' in text
    assert made.notes[1][:2] == ("copy of a", "stage 1")


def test_one_stage_needs_no_coordinate() -> None:
    assert "at pp" not in text_of(stored_pipeline(base_of(ZERO, MODEL), pipeline(0, 5)))


def test_a_tensor_without_elements_has_no_entry() -> None:
    less = evolve(MODEL, items=tuple(i for i in MODEL.items if isinstance(i, nodes.Tensor) and i.path != "b"))
    assert "b = " not in text_of(stored_pipeline(base_of(ZERO, less), pipeline(0, 2, 5)))


@pytest.mark.parametrize(
    ("call", "inherited", "sizes", "origin"),
    [
        ("zero1(dp = 2)", {"pp": 2}, [2, 3], "as the source's"),
        ("zero1(dp = 2, pp = 2)", {"pp": 3}, [2, 3], "as the source's"),
        ("zero1(dp = 2, stages = [4, 1])", {"pp": 3}, [4, 1], "given"),
        ("zero1(dp = 2, stages = [1, 1, 3], partition = \"nosuch\")", {}, [1, 1, 3], "given"),
        ("zero1(dp = 2, pp = 3, partition = \"uniform\")", {}, [2, 2, 1], "partition_method uniform, given"),
        ("zero1(dp = 2, pp = 2, partition = \"parameters\")", {}, [3, 2], "partition_method parameters, given"),
        ("zero1(dp = 2, pp = 1)", {"pp": 2}, [5], "one stage"),
        ("zero1(dp = 2, pp = 3)", {}, [2, 2, 1], "partition_method uniform, which the source's stages [2, 3] follow"),
        ("zero1(dp = 2, pp = 2, layers = 7)", {}, [2, 5], "as the source's"),
        ("zero1(dp = 2, pp = 2, layers = 7, partition = \"uniform\")", {}, [4, 3], "partition_method uniform, given"),
    ],
)  # fmt: skip
def test_which_setting_deals_the_layers(call: str, inherited: dict[str, int], sizes: list[int], origin: str) -> None:
    made = target_pipeline(base_of(call, MODEL, **inherited), pipeline(0, 2, 5))
    assert made.notes == (("layers of stages", sizes, origin),)
    assert {a.name for a in made.call.arguments} <= {"dp", "pp"} and made.call.name == "target"
    read_again(made)


def test_stages_that_are_listed_say_the_degree() -> None:
    made = target_pipeline(base_of("zero1(dp = 2, stages = [1, 1, 3])", MODEL, pp=2), pipeline(0, 2, 5))
    assert nodes.Argument("pp", nodes.Number(3)) in made.call.arguments
    assert 'c = ... at pp[2] in layer_03 as "in.c"' in text_of(made)


def test_one_stage_may_become_several_where_both_methods_agree() -> None:
    even = evolve(pipeline(0, 5, methods=("uniform", "parameters")), elements=(3, 3, 3, 3, 3))
    made = target_pipeline(base_of("zero1(dp = 2, pp = 5)", MODEL), even)
    assert made.notes == (("layers of stages", [1, 1, 1, 1, 1], "both partition methods deal so"),)


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("zero2(dp = 2, pp = 2)", "E477", "`zero2` for a PipelineModule, which DeepSpeed trains at ZeRO stage 0 or 1"),
        ("zero3(dp = 2, stages = [2, 3])", "E477", "`zero3` for a PipelineModule, which DeepSpeed trains at ZeRO stage 0 or 1"),
        ("zero1(dp = 2, stages = [2, 2])", "E477", "stages = [2, 2] are 4 layers, and there are 5"),
        ("zero1(dp = 2, stages = [6, -1])", "E477", "stages = [6, -1] are 5 layers, and there are 5"),
        ("zero1(dp = 2, stages = [])", "E477", "stages = [] are 0 layers, and there are 5"),
        ("zero1(dp = 2, stages = 5)", "E477", "stages = 5 are 0 layers, and there are 5"),
        ("zero1(dp = 2, pp = 3, stages = [2, 3])", "E477", "stages = [2, 3] are 2 stages, and pp is 3"),
        ("zero1(dp = 2, stages = [5, 0])", "E477", "5 layers on 2 stages leave one without any: [5, 0]"),
        ("zero1(dp = 2, pp = 6, partition = \"uniform\")", "E477",
         "5 layers on 6 stages leave one without any"),
        ("zero1(dp = 2, pp = 0)", "E477", "pp = 0: at least one stage is needed"),
        ("zero1(dp = 2, pp = 0 - 1)", "E477", "pp = -1: at least one stage is needed"),
        ("zero1(dp = 2, pp = 2147483648)", "E477", "5 layers on 2147483648 stages leave one without any"),
        ("zero1(dp = 2, layers = 2147483648)", "E477", "layers = 2147483648, and 1000000 are allowed"),
        ("zero1(dp = 2, pp = 2, partition = \"best\")", "E477", "partition = 'best'"),
        ("zero1(dp = 2, layers = 4)", "E477", "layers = 4, and the source has 5 at least"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be(call: str, code: str, message: str) -> None:
    assert refused(call, pipeline(0, 2, 5)) == (code, message)


def test_two_methods_that_deal_otherwise_are_not_chosen_from() -> None:
    found = evolve(pipeline(0, 2, 5, methods=("uniform", "parameters")), elements=(24, 1, 0, 1, 1))
    code, message = refused("zero1(dp = 2, pp = 3)", found)
    assert code == "E476" and "5 layers on pp = 3: [2, 2, 1] by 'uniform' and [1, " in message
    code, message = refused("zero1(dp = 2, pp = 3)", pipeline(0, 2, 5, methods=()))
    assert code == "E476" and "dealt by neither 'uniform' nor 'parameters'" in message


def test_stages_without_a_pipeline_are_refused_where_they_are_asked_for() -> None:
    with pytest.raises(UcplError, match="E475"):
        ranks.target(base_of("zero1(dp = 2, pp = 2)", MODEL), checkpoint(), {})
    for base, source in (
        (base_of("zero1(dp = 2)", MODEL, pp=2), checkpoint()),
        (base_of("zero1(dp = 2)", MODEL), None),
    ):
        made = ranks.target(base, source, {})
        assert made.call == base.call and made.library is base.library


def test_a_pipeline_s_tensors_at_stages_2_and_3_are_a_module_that_is_no_pipeline() -> None:
    made = target_pipeline(base_of("zero3(dp = 2)", MODEL, pp=2), pipeline(0, 2, 5))
    assert made.call.name == "zero3" and nodes.Argument("pp", nodes.Number(1)) in made.call.arguments and not made.notes


@pytest.mark.parametrize("is_by_tp", [False, True])
def test_layers_that_are_cut_have_a_file_for_each_tensor_parallel_rank(is_by_tp: bool) -> None:
    cuts = {"a": Sharding((6, 4), 1, (Section(4, (2, 2)),), "lists")}
    source = with_parallel(checkpoint(), pipeline=evolve(pipeline(0, 2, 5), is_by_tp=is_by_tp))
    text = text_of(ranks.target(base_of("zero1(dp = 2, tp = 2, pp = 2)", MODEL, tp=2), source, cuts))
    for line in (
        'file layer_00 = torch "layer_00-model_{tp:02}-model_states.pt"',
        'a = _ _@tp at pp[0] in layer_00 as "in.a"',
        'b = ... at pp[0] in layer_01 as "in.b"',
    ):
        assert line in text, line
    one = text_of(ranks.target(base_of("zero1(dp = 2, tp = 1)", MODEL, tp=2), source, cuts))
    assert ('"layer_00-model_{tp:02}-model_states.pt"' in one) is is_by_tp and "@tp" not in one


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(ep: int, count: int = 4, *, data_first: bool = False) -> Experts:
    """One tensor of each expert: e0, e1, ..."""
    of = {f"e{i}": Expert(f"m.experts.{i}.w", "m.experts.", i, count, "w") for i in range(count)}
    return Experts(ep, data_first, of)


def expert_model(count: int = 4, elements: int = 6) -> nodes.Model:
    made = model_of(a=(6, 4), **{f"e{i}": (elements,) for i in range(count)})
    groups = (nodes.Group("0", members=("a",)), nodes.Group("1", members=tuple(f"e{i}" for i in range(count))))
    return evolve(made, items=(*made.items, *groups))


def test_experts_are_in_runs_on_the_ranks_of_ep() -> None:
    made = stored_experts(base_of("zero1(dp = 4)", expert_model()), experts(2))
    text = text_of(made)
    for number, rank in enumerate((0, 0, 1, 1)):
        assert f'e{number} = ... at ep[{rank}] in layer_0_expert_{number} as "m.experts.{number}.w"' in text
        assert f'"layer_0_expert_{number}_mp_rank_{{pp * size(tp) + tp:02}}_model_states.pt"' in text
    assert "mesh expert: pp edp ep tp" in text and "edp = dp / ep" in text
    assert nodes.Argument("ep", nodes.Number(2)) in made.call.arguments
    assert "mesh expert: pp ep edp tp" in text_of(
        stored_experts(base_of(ZERO, expert_model()), experts(2, data_first=True))
    )
    assert "at ep" not in text_of(stored_experts(base_of(ZERO, expert_model()), experts(1)))
    read_again(made)


def test_their_flat_buffers_are_shared_by_edp_ranks_and_numbered_by_their_group() -> None:
    text = text_of(stored_experts(base_of("zero1(dp = 4)", expert_model()), experts(2)))
    assert 'group "1" = e0, e1, e2, e3' in text and 'group "0"' not in text
    lines = text.partition("state fp32")[2]
    assert (
        "2 * edp" in lines and "@edp" in lines and "single_partition_of_fp32_groups/1" in lines and "on expert" in lines
    )
    assert "@dp" not in lines and "* dp" not in lines and "expert_ways" in text


@pytest.mark.parametrize(("ep", "origin"), [("", "as the source's"), (", ep = 4", "given"), (", ep = 1", "given")])
def test_the_degree_of_experts_is_the_call_s_or_the_source_s(ep: str, origin: str) -> None:
    made = target_experts(base_of(f"zero1(dp = 4{ep})", expert_model()), experts(2))
    degree = int(ep[-1:] or 2)
    assert made.notes == (
        ("experts of a rank", f"ep {degree}", origin),
        ("edp", 4 // degree, "dp / ep: ranks that hold the same experts"),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("zero3(dp = 4)", "`zero3` for deepspeed.moe, which DeepSpeed saves with ZeRO stage 1 or 2"),
        ("zero1(dp = 4, ep = 3)", "ep = 3 does not divide dp = 4: each expert would not be on equally many ranks"),
        ("zero1(dp = 4, ep = 0)", "ep = 0 does not divide dp = 4: each expert would not be on equally many ranks"),
        ("zero1(dp = 8, ep = 8)", "4 experts of m.experts do not divide by ep = 8"),
    ],
)
def test_degrees_of_experts_that_cannot_be(call: str, message: str) -> None:
    with pytest.raises(UcplError) as caught:
        target_experts(base_of(call, expert_model()), experts(2))
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].message) == ("E478", message)


def test_a_group_as_full_as_it_may_be_and_one_element_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has four experts, or two at ep = 2."""
    base = base_of("zero2(dp = 4, ep = 1)", expert_model())
    monkeypatch.setattr(of_experts, "GROUP_ELEMENTS_MAX", 24)
    assert target_experts(base, experts(2))
    monkeypatch.setattr(of_experts, "GROUP_ELEMENTS_MAX", 23)
    with pytest.raises(UcplError, match="E478: at ep = 1 "):
        target_experts(base, experts(2))
    assert target_experts(evolve(base, call=nodes.Call("zero2", base.call.arguments[:1])), experts(2))

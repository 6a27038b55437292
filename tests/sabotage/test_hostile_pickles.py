"""Pickles made to do harm.

Nothing that they name is imported or called, and each ends soon: in a value or in our own error.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import pathlib
import pickle
import random
import shutil
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucpl
from tests.files.values import FIXTURES, assert_same
from tests.sabotage.cost import soon
from ucpl.errors import UcplError
from ucpl.extents import Global, PickledCall
from ucpl.files.inert import HOLDERS
from ucpl.files.pickles import dumps, loads, unsafe_globals, walk
from ucpl.files.torch_files import read_torch_file


class Run:
    """Unpickled, it would leave a mark."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


@pytest.mark.fault("Hostile input", "a pickle that runs code", "not run; its name is shown")
@pytest.mark.parametrize("protocol", range(6))
def test_code_is_not_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    attack = {"w": Run(os.system, f"touch {mark}"), "x": [Run(eval, f"open({str(mark)!r}, 'w')"), Run(exec, "1/0")]}
    if protocol == 0:
        attack = {"w": Run(os.system, f"touch {mark}")}
    read: Any = loads(pickle.dumps(attack, protocol))
    assert not mark.exists()
    call = read["w"]
    assert isinstance(call, PickledCall) and call.function == Global(os.system.__module__, "system")
    assert f"{os.system.__module__}.system" in unsafe_globals(read)
    dumps(read)
    assert not mark.exists()


@pytest.mark.fault("Hostile input", "a pickle that imports", "nothing is imported")
def test_nothing_is_imported() -> None:
    for module in ("antigravity", "this", "lib2to3.pgen2.pgen"):
        assert module not in sys.modules
        loads(f"c{module}\nx\n.".encode())
        loads(b"\x80\x04" + text(module) + text("x") + b"\x93)R.")
        assert module not in sys.modules


def test_calls_of_calls_stay_inert() -> None:
    """getattr(__import__("os"), "system")("..."), the classic chain."""
    data = (
        b"c__builtin__\ngetattr\n(c__builtin__\n__import__\n"
        + text("os")
        + b"\x85R"
        + text("system")
        + b"t"
        + b"R"
        + text("id")
        + b"\x85R."
    )
    read = loads(data)
    assert isinstance(read, PickledCall) and isinstance(read.function, PickledCall)
    assert read.function.function == Global("builtins", "getattr")
    assert {"builtins.__import__", "builtins.getattr"} <= set(unsafe_globals(read))


def test_a_dict_cannot_shadow_methods_of_its_own() -> None:
    data = b"ccollections\nOrderedDict\n)R}" + text("items") + b"K\x01sb."
    read: Any = loads(data)
    assert list(read.items()) == []


@pytest.mark.fault("Hostile input", "names that put instructions into a written pickle", "refused")
def test_a_name_cannot_smuggle_instructions_into_what_is_written() -> None:
    for module, name in (
        ("a\nb", "c"),
        ("os", "system\nR"),
        ("", "x"),
        ("a b", "c"),
        ("a", "b."),
        ("a", "\x00"),
        ("1a", "b"),
    ):
        with pytest.raises(UcplError, match="E426"):
            loads(b"\x80\x04" + text(module) + text(name) + b"\x93.")


P = b"\x80\x02"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x0atQ"


def tensor(*parts: bytes) -> bytes:
    return P + b"ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(parts) + b"tR."


HOOKS = b"ccollections\nOrderedDict\n)R"

BROKEN = [
    ("nothing", b"", "E420"),
    ("only a protocol", P, "E420"),
    ("a newer protocol", b"\x80\x06N.", "E421"),
    ("no stop", P + b"N", "E420"),
    ("values left over", P + b"NN.", "E420"),
    ("an open mark", P + b"(N.", "E420"),
    ("an empty stack", P + b".", "E420"),
    ("a memo index beyond reason", P + b"Nr\xff\xff\xff\xff.", "E420"),
    ("a memo index beyond reason, as text", b"Np4294967295\n.", "E420"),
    ("a negative memo index", b"Np-1\n.", "E420"),
    ("an unknown memo index", P + b"h\x05.", "E420"),
    ("a text of 4 GiB", P + b"X\xff\xff\xff\xffabc.", "E420"),
    ("a text of 2^63 bytes", P + b"\x8d" + b"\xff" * 7 + b"\x7fabc.", "E420"),
    ("bytes of 2^64", b"\x80\x04\x8e" + b"\xff" * 8 + b"abc.", "E420"),
    ("a bytearray of 2^62 bytes", b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".", "E420"),
    ("a number of 2 GiB", P + b"\x8b\xff\xff\xff\x7fabc.", "E420"),
    ("a number of negative length", P + b"\x8b\xff\xff\xff\xffabc.", "E420"),
    ("a frame beyond the end", b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "E420"),
    ("a number as text, too long", b"L" + b"9" * 5000 + b"L\n.", "E420"),
    ("a number as text, none", b"Ixyz\n.", "E420"),
    ("a float as text, none", b"Fxyz\n.", "E420"),
    ("text that is not UTF-8", P + b"X\x02\x00\x00\x00\xff\xfe.", "E420"),
    ("a name without an end", P + b"cos\nsystem", "E420"),
    ("a truncated float", P + b"G123", "E420"),
    ("an extension code", P + b"\x82\x01.", "E421"),
    ("INST", b"(ios\nsystem\n.", "E421"),
    ("OBJ", b"(cos\nsystem\no.", "E421"),
    ("a buffer out of band", b"\x80\x05\x97.", "E421"),
    ("a persistent id as text", b"Pabc\n.", "E421"),
    ("no instruction at all", P + b"\xfe.", "E421"),
    ("a call of a text", P + text("os.system") + b")R.", "E422"),
    ("a call of a number", P + b"K\x01)R.", "E422"),
    ("a call of a tensor's storage", P + STORAGE + b")R.", "E422"),
    ("a call with a list", P + b"cos\nsystem\n]R.", "E422"),
    ("an object of a text", P + text("x") + b")\x81.", "E422"),
    ("an object with named arguments that are none", b"\x80\x04cm\nC\n)K\x01\x92.", "E422"),
    ("attributes of a list", P + b"]}b.", "E422"),
    ("attributes of a dict", P + b"}}b.", "E422"),
    ("attributes of a name", P + b"cos\nsystem\n}b.", "E422"),
    ("attributes twice", P + b"cm\nC\n)\x81}b}b.", "E422"),
    ("appending to a tuple", P + b")Na.", "E422"),
    ("appending to a dict", P + b"}(Ne.", "E422"),
    ("items of a list", P + b"]K\x00K\x01s.", "E422"),
    ("items of a name", P + b"cos\nenviron\n(K\x00K\x01u.", "E422"),
    ("a key without a value", P + b"}(K\x00u.", "E420"),
    ("a list as a key", P + b"}(]Nu.", "E423"),
    ("a tuple with a list as a key", P + b"}(]\x85Nu.", "E423"),
    ("a number made to collide as a key", P + b"}(\x8a\x10" + b"\x01" * 15 + b"\x00Nu.", "E423"),
    ("a list in a set", b"\x80\x04\x8f(]\x90.", "E423"),
    ("a list in a frozenset", b"\x80\x04(]\x91.", "E423"),
    ("a persistent id of another kind", P + text("x") + b"Q.", "E427"),
    (
        "a storage of an unknown class",
        P + b"(" + text("storage") + b"cos\nsystem\n" + text("0") + text("cpu") + b"K\x01tQ.",
        "E427",
    ),
    ("a storage of negative length", P + STORAGE.replace(b"K\x0a", b"J\xff\xff\xff\xff") + b".", "E427"),
    ("a storage with a number for a name", P + STORAGE.replace(text("0"), b"K\x00") + b".", "E427"),
    ("a tensor of a text", tensor(text("storage"), b"K\x00)", b")", b"\x89", HOOKS), "E427"),
    (
        "a tensor with a float for a size",
        tensor(STORAGE, b"K\x00", b"G" + bytes(8) + b"\x85", b"K\x01\x85", b"\x89", HOOKS),
        "E427",
    ),
    ("a tensor of more strides than sizes", tensor(STORAGE, b"K\x00)", b"K\x01\x85", b"\x89", HOOKS), "E427"),
    ("a tensor with too few arguments", tensor(STORAGE, b"K\x00)"), "E427"),
    (
        "a tensor of 100 dimensions",
        tensor(STORAGE, b"K\x00(" + b"K\x01" * 100 + b"t(" + b"K\x01" * 100 + b"t", b"\x89", HOOKS),
        "E427",
    ),
    ("a parameter with a text for a flag", P + b"ctorch._utils\n_rebuild_parameter\nN" + text("x") + HOOKS + b"\x87R.", "E427"),
    ("a size of texts", P + b"ctorch\nSize\n" + text("x") + b"\x85\x85R.", "E427"),
    ("bytes(2^40)", P + b"c__builtin__\nbytes\n\x8a\x06" + struct.pack("<Q", 2**40)[:6] + b"\x85R.", "E427"),
    ("bytearray(2^40)", P + b"c__builtin__\nbytearray\n\x8a\x06" + struct.pack("<Q", 2**40)[:6] + b"\x85R.", "E427"),
    ("encode with another codec", P + b"c_codecs\nencode\n" + text("x") + text("zip") + b"\x86R.", "E427"),
    ("encode of what is not latin-1", P + b"c_codecs\nencode\n" + text("\u20ac") + text("latin1") + b"\x86R.", "E427"),
    ("complex of texts", P + b"c__builtin__\ncomplex\n" + text("1") + text("2") + b"\x86R.", "E427"),
    ("an OrderedDict of numbers", P + b"ccollections\nOrderedDict\n(K\x01K\x02l\x85R.", "E427"),
    ("a set of a text", P + b"c__builtin__\nset\n" + text("abc") + b"\x85R.", "E427"),
    ("tuples 100,000 deep", P + b")" + b"\x85" * 100_000 + b".", "E424"),
    ("lists 100,000 deep", P + b"]" * 100_000 + b"a" * 99_999 + b".", "E424"),
    ("dicts 1,000 deep", P + b"}" + (b"K\x00}" * 1000) + b"s" * 1000 + b".", "E424"),
    ("calls of calls, 10,000 deep", P + b"cm\nf\n" + b")R" * 10_000 + b".", "E424"),
    ("marks without an end", P + b"(" * 100_000, "E420"),
    (
        "deep by sharing, shallow at first sight",
        P + b"(" + b"]q\x00" + b"".join(b"h%c\x85q%c" % (n, n + 1) for n in range(250)) + b"t.",
        "E424",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_pickles_are_refused_and_say_where(data: bytes, code: str) -> None:
    with soon(len(data)), pytest.raises(UcplError) as caught:
        loads(data, "evil.pt")
    assert caught.value.diagnostics[0].code == code, caught.value
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.message.startswith("evil.pt") and diagnostic.labels[0].file == "evil.pt" and diagnostic.remedy
    assert caught.value.exit_status == 3


@pytest.mark.fault("Hostile input", "pickles that expand exponentially", "refused, in bounded time and memory")
def test_sharing_is_free_until_it_is_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^40 leaves in 300 bytes.

    Read at once, refused by the walk that would meet them all.
    """
    lists = b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (n + 1, n, n) for n in range(40))
    data = P + b"(" + lists + b"t."
    value: Any = loads(data)
    assert len(value) == 41
    assert len(dumps(value)) < 1000 and unsafe_globals(value) == []
    monkeypatch.setattr("ucpl.files.inert.WALK_VALUES_MAX", 10_000)
    with pytest.raises(UcplError, match="E425"):
        list(walk(value))


def test_a_shared_tuple_as_a_key_is_not_hashed_exponentially() -> None:
    data = P + b"}(K\x01" + b"".join(b"2\x86" for _ in range(60)) + b"Nu."
    with pytest.raises(UcplError, match="E423"):
        loads(data)


def test_copying_ones_own_parts_again_and_again_ends() -> None:
    """5,000 conversions of a list of 5,000 are much work.

    The file has 45 kB.
    """
    body = b"](" + b"K\x01" * 5_000 + b"eq\x00" + b"c__builtin__\nset\nq\x01" + b"h\x01h\x00\x85R0" * 5_000
    with soon(len(body)), pytest.raises(UcplError, match="E425"):
        loads(P + body + b".")


@pytest.mark.fault("Hostile input", "cut or flipped pickles, noise", "only errors with a code")
@pytest.mark.parametrize("seed", range(8))
def test_flipped_bytes_and_cuts_never_surprise(seed: int) -> None:
    """Any bytes end in a value or in UcplError, and soon."""
    import io
    import zipfile

    chosen = random.Random(seed)
    sources = [(FIXTURES / "containers" / "dcp.metadata").read_bytes()]
    for name in ("z1_bf16_model_states.pt", "megatron_model_optim_rng.pt"):
        archive = zipfile.ZipFile(io.BytesIO((FIXTURES / "containers" / name).read_bytes()))
        sources.append(archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl"))))
    values = 0
    for _ in range(250):
        data = bytearray(chosen.choice(sources))
        kind = chosen.randrange(4)
        for _ in range(chosen.choice((1, 1, 2, 5, 20))):
            at = chosen.randrange(len(data))
            if kind == 0:
                data[at] ^= 1 << chosen.randrange(8)
            elif kind == 1:
                data[at] = chosen.randrange(256)
            elif kind == 2:
                del data[at : at + chosen.randrange(1, 8)]
            else:
                data[at:at] = chosen.randbytes(chosen.randrange(1, 8))
        if chosen.random() < 0.1:
            del data[chosen.randrange(len(data)) :]
        try:
            value = loads(bytes(data))
        except UcplError:
            continue
        values += 1
        unsafe_globals(value)
        written = dumps(value)
        again = loads(written)
        assert_same(value, again)
        assert dumps(again) == written
    assert values  # some flips are harmless: the fuzz reaches the code behind the reader


def test_noise_never_surprises() -> None:
    chosen = random.Random(0)
    opcodes = bytes(range(0x28, 0x100))
    for _ in range(3000):
        data = bytes(chosen.choice(opcodes) for _ in range(chosen.randrange(60))) + b"."
        try:
            loads(data)
        except UcplError:
            pass


def number(size: int) -> bytes:
    return b"\x8b" + struct.pack("<I", size) + bytes(size - 1) + b"\1"


@pytest.mark.parametrize(
    "data", [number(1025), b"L" + b"9" * 2500 + b"L\n", b"I" + b"9" * 2500 + b"\n"], ids=["8B", "L", "I"]
)
def test_numbers_that_python_does_not_print_are_refused(data: bytes) -> None:
    with pytest.raises(UcplError) as caught:
        loads(P + data + b".")
    assert caught.value.diagnostics[0].code in ("E420", "E425")
    largest: Any = loads(P + number(1024) + b".")
    assert len(str(largest)) < sys.get_int_max_str_digits()
    assert loads(dumps(largest)) == largest
    with pytest.raises(UcplError, match="E440"):
        dumps(largest * 256)


def test_halves_of_characters_are_kept_and_can_be_printed() -> None:
    half = P + b"X\x03\0\0\0\xed\xa0\x80."
    assert loads(half) == "\ud800"
    assert dumps(loads(half)) == dumps("\ud800")
    with pytest.raises(UcplError) as caught:
        loads(P + b"c\xed\xa0\x80\nx\n.", "\ud800.pt")
    assert caught.value.diagnostics[0].message.encode()
    assert caught.value.diagnostics[0].labels[0].file == r"\ud800.pt"


def test_an_archive_s_records_are_not_read_in_full(tmp_path: Path) -> None:
    """`version` and `byteorder` are a few bytes.

    More are refused by the directory, before any is read.
    """
    import zipfile

    for record in ("version", "byteorder"):
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            archive.writestr("a/data.pkl", dumps({}))
            archive.writestr(f"a/{record}", b"little" + b"x" * 100)
        with pytest.raises(UcplError) as caught:
            read_torch_file(tmp_path, "a.pt")
        assert caught.value.diagnostics[0].code == "E402"
        assert record in caught.value.diagnostics[0].message


def test_named_arguments_copied_again_and_again_end() -> None:
    """NEWOBJ_EX copies its dict.

    A hundred thousand copies of a large one are more than the file paid for.
    """
    names = b"".join(text(f"n{i}") + b"N" for i in range(20_000))
    body = b"}(" + names + b"uq\x00" + b"cm\nC\nq\x01" + b"h\x01)h\x00\x920" * 1000 + b"N."
    with pytest.raises(UcplError, match="E425"):
        loads(b"\x80\x04" + body)


# ---- objects of known classes, with contents that their own pickles never have -------------------------------------------

KINDS = ["?", "b", "u1", "i8", ">i4", "f2", "<f4", ">f8", "f16", "c8", "c16", "S3", "S0", "U5", ">U2", "O"]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_numpy_writes_itself_is_plain(protocol: int) -> None:
    for kind in KINDS:
        dtype = np.dtype(kind)
        values: list[Any] = [
            dtype,
            np.zeros((2, 3), dtype),
            np.asfortranarray(np.zeros((2, 3), dtype)),
            np.zeros(0, dtype),
        ]
        if kind != "O":
            values.append(np.zeros(1, dtype)[0])
        for value in (*values, np.random.RandomState(3).get_state(), np.float32(2.5), np.str_("text")):
            read = loads(pickle.dumps(value, protocol))
            assert [name for name in unsafe_globals(read) if name not in HOLDERS] == [], (kind, value)


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 11, 27, 12),
        datetime.date(2026, 11, 27),
        datetime.timedelta(1, 2, 3),
        argparse.Namespace(a=1),
        types.SimpleNamespace(b=[2]),
        collections.deque([1, 2], 5),
        collections.deque(),
        collections.Counter("aab"),
        pathlib.PurePosixPath("a/b").parts,
        pathlib.Path("/a/b"),
        range(1, 9, 2),
        frozenset({1}),
        {1, 2},
        collections.defaultdict(list, {"loss": [1.5]}),
        collections.defaultdict(None, {}),
        pathlib.PurePosixPath("a/b"),
        torch.device("cpu"),
        torch.strided,
    ],
)
def test_what_other_classes_write_themselves_is_plain(value: Any) -> None:
    read = loads(pickle.dumps(value, 2))
    assert [name for name in unsafe_globals(read) if name not in HOLDERS] == []


class Made:
    """Pickled, it is a call with these arguments and this state."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


RECONSTRUCT = np.zeros(1).__reduce__()[0]
SCALAR = np.float64(1).__reduce__()[0]
F8 = Made(np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 0))
HIDDEN = Made(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))
EMPTY = (np.ndarray, (0,), b"b")

MADE = {
    "a dtype whose bytes are objects": Made(RECONSTRUCT, EMPTY, (1, (1,), HIDDEN, False, b"A" * 8)),
    "the dtype alone": HIDDEN,
    "a dtype of another size": Made(np.dtype, ("f8", False, True), (3, "<", None, None, None, 4, 1, 0)),
    "a dtype of other flags": Made(np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 63)),
    "a dtype by its fields": Made(np.dtype, ({"names": ["a"], "formats": ["O"]},)),
    "a dtype of a text with fields": Made(np.dtype, ("O,f8", False, True)),
    "a structured dtype": np.dtype([("a", "O")]),
    "objects that are bytes": Made(RECONSTRUCT, EMPTY, (1, (1,), np.dtype("O"), False, b"A" * 8)),
    "numbers that are a list": Made(RECONSTRUCT, EMPTY, (1, (1,), F8, False, [1.0])),
    "fewer bytes than numbers": Made(RECONSTRUCT, EMPTY, (1, (1 << 40,), F8, False, b"A" * 8)),
    "a negative size": Made(RECONSTRUCT, EMPTY, (1, (-1,), F8, False, b"A" * 8)),
    "an array of a size at once": Made(RECONSTRUCT, (np.ndarray, (1 << 40,), b"b")),
    "an array of another class": Made(RECONSTRUCT, (range, (0,), b"b")),
    "an array by its class": Made(np.ndarray, ((1 << 40,), "O")),
    "a scalar of an object": Made(SCALAR, (np.dtype("O"), b"A" * 8)),
    "a scalar of too few bytes": Made(SCALAR, (F8, b"A")),
    "a deque of a long range": Made(collections.deque, (range(1 << 50),)),
    "a Counter of a long range": Made(collections.Counter, (range(1 << 50),)),
    "a list of a long range": Made(list, (range(1 << 50),)),
    "a tuple of a long range": Made(tuple, (range(1 << 50),)),
    "a defaultdict of a call": Made(collections.defaultdict, (Made(list, (range(3),)),)),
    "a namespace with a state of slots": Made(argparse.Namespace, (), (None, {"__class__": range})),
    "a date of a list": Made(datetime.date, ([1],)),
    "a tensor of a size": Made(torch.Tensor, (1 << 50,)),
    "a nested tensor": Made(torch._utils._rebuild_nested_tensor, (1, 2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("what", MADE)
def test_a_known_class_with_made_contents_is_named(what: str) -> None:
    read = loads(pickle.dumps({"deep": [MADE[what]]}, 2))
    assert any(name.endswith("(...)") for name in unsafe_globals(read) if name not in HOLDERS)


def test_made_contents_go_into_no_target_that_was_not_allowed_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "deepspeed" / "z1_dp4", source)
    for file in source.rglob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["made"] = MADE["a dtype whose bytes are objects"]
        torch.save(state, file)
    with pytest.raises(UcplError, match=r"E504: .*numpy\.dtype\(\.\.\.\)"):
        ucpl.convert(source, tmp_path / "out", to="zero1(dp=2)")
    assert not (tmp_path / "out").exists()
    names = ("numpy.dtype(...)", "numpy._core.multiarray._reconstruct(...)", "numpy.core.multiarray._reconstruct(...)")
    ucpl.convert(source, tmp_path / "out", to="zero1(dp=2)", allow_globals=names)

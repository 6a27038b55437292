"""Sources that are no regular files, huge headers, unwritable names."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from ucpl.errors import UcplError
from ucpl.files.safetensors_files import HEADER_BYTES_FREE, read_safetensors_file
from ucpl.files.texts import read_name, read_small
from ucpl.formats.huggingface.store import read_texts
from ucpl.formats.opening import open_checkpoint


def refusal(path: Path) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        open_checkpoint(path)
    (found,) = caught.value.diagnostics
    return found.code, found.message


def write(path: Path, header: dict[str, Any], data: bytes, padding: int = 0) -> None:
    raw = json.dumps(header).encode("utf-8", "surrogatepass") + b" " * padding
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def test_a_pipe_and_a_device_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", Path("/dev/full")):
        code, message = refusal(path)
        assert code == "E400"
        assert str(path) in message


def test_a_pipe_in_the_place_of_a_small_file_does_not_hold_us_up(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00001.safetensors", {"a": entry(0, 3)}, b"abc")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert refusal(tmp_path) == ("E400", "model.safetensors.index.json is no regular file")
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(b"")
    os.mkfifo(tmp_path / "latest")
    assert refusal(tmp_path) == ("E400", "latest is no regular file")
    os.mkfifo(tmp_path / "config.json")
    assert "config.json" not in read_texts(tmp_path)[0]


def test_a_header_is_read_in_proportion_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    data = bytes(1 << 20)
    for padding, tensors, is_read in (
        (HEADER_BYTES_FREE - 100, b"", True),
        (HEADER_BYTES_FREE + 1, b"", False),
        (HEADER_BYTES_FREE + len(data) // 2, data, True),
        (HEADER_BYTES_FREE + 2 * len(data), data, False),
    ):
        write(path, {"a": entry(0, len(tensors))}, tensors, padding)
        if is_read:
            assert list(read_safetensors_file(tmp_path, path.name).tensors) == ["a"]
        else:
            code, message = refusal(path)
            assert code == "E444"
            assert "a.safetensors" in message


@pytest.mark.parametrize("name", ["\ud800", "a\udfff.b"])
def test_names_that_nothing_can_write_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {name: entry(0, 1)}, b"a")
    code, message = refusal(tmp_path / "a.safetensors")
    assert code == "E431"
    assert message.encode()


@pytest.mark.parametrize("number", ["9" * 5000, "1e999", "-1", "NaN"])
def test_numbers_of_a_header_are_sizes(number: str, tmp_path: Path) -> None:
    raw = b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}}' % number.encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"a")
    assert refusal(tmp_path / "a.safetensors")[0] == "E431"


def test_a_small_text_whose_closing_fails_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(UcplError, match=r"config.json cannot be read: Input") as caught:
        patch.setattr(os, "close", fail)
        read_small(path, 100)
    assert caught.value.diagnostics[0].code == "E400"


def test_small_texts_are_read_as_far_as_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_bytes(b"global_step3\n")
    assert read_name(path) == "global_step3"
    assert read_small(path, 13) == b"global_step3\n"
    assert read_small(path, 12) is None
    for raw in (b"", b" \n", b"a\nb", b"a\0b", b"\xff", b"x" * 5000):
        path.write_bytes(raw)
        assert read_name(path) is None
    path.write_bytes(b"x" * 4096)
    assert read_name(path) == "x" * 4096

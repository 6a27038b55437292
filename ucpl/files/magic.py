"""Files of other programs, identified by their first bytes, with a remedy."""

from __future__ import annotations

from ucpl.records import frozen

__all__ = ["AGAIN", "OWN", "UNPACK", "Description", "holds_text", "magic_of"]

_CHARACTER = 4  # bytes, at most
UNPACK = "unpack it first: {tool}"
AGAIN = "copy or download the file again"
OWN = "read it with its own library, and write its tensors as model.safetensors"

# First bytes: a name, and a way on.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "a gzip file", UNPACK.format(tool="gunzip")),
    (b"\x28\xb5\x2f\xfd", "a zstd file", UNPACK.format(tool="zstd -d")),
    (b"\xfd7zXZ", "an xz file", UNPACK.format(tool="xz -d")),
    (b"BZh", "a bzip2 file", UNPACK.format(tool="bunzip2")),
    (b"\x04\x22\x4d\x18", "an lz4 file", UNPACK.format(tool="lz4 -d")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK.format(tool="7z x")),
    (b"Rar!", "a rar archive", UNPACK.format(tool="unrar x")),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes it", OWN),
    (b"GGUF", "a GGUF file, as llama.cpp writes it", "convert the checkpoint that it was made from"),
    (b"\x93NUMPY", "a NumPy array", OWN),
    (b"version https://git-lfs", "a pointer of Git LFS in place of the file", "fetch the file itself: git lfs pull"),
    (b"<!DOCTYPE", "a web page, so that a download has failed", AGAIN),
    (b"<html", "a web page, so that a download has failed", AGAIN),
    (b"<?xml", "an XML text, so that a download may have failed", AGAIN),
)
# Files without first bytes of their own, by the ends of their names.
_ENDS: tuple[tuple[str, str, str], ...] = (
    (".onnx", "an ONNX model", "convert the checkpoint that it was exported from"),
    (".tflite", "a model of TensorFlow Lite", "convert the checkpoint that it was exported from"),
    (".msgpack", "a msgpack file, as Flax writes it", OWN),
    (".pdparams", "a file of PaddlePaddle", OWN),
    (".pdopt", "a file of PaddlePaddle", OWN),
)


@frozen
class Description:
    """A description, as in `it is ...`, and a remedy."""

    what: str
    remedy: str


def magic_of(head: bytes, name: str = "") -> Description | None:
    """The program of a file, by first bytes and name, or None."""
    found = next(
        (Description(f"it is {what}", remedy) for first, what, remedy in _MAGIC if head.startswith(first)), None
    )
    if found is None and head[257:262] == b"ustar":
        return Description("it is a tar archive", UNPACK.format(tool="tar xf"))
    ended = (Description(f"it is {what}", remedy) for end, what, remedy in _ENDS if head and name.endswith(end))
    return found or next(ended, None)


def holds_text(head: bytes) -> bool:
    """Test whether bytes are lines of UTF-8."""
    text = head.decode(errors="ignore")
    return len(head) - len(text.encode()) < _CHARACTER and all(c.isprintable() or c in "\t\r\n" for c in text)

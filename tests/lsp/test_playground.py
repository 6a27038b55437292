"""The playground of `ucpl show --serve`: its answers, and its guests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cli.command import ROOT, ucpl
from ucpl.lsp.playground import LONGEST, Sheet, serving

SPEC = ROOT / "examples" / "ranks" / "job.ucpl"


@contextmanager
def page_of(path: Path, call: str = "") -> Iterator[str]:
    """The address of a running playground."""
    with serving(Sheet(str(path), path.read_text(), call), 0) as (address, server):
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()


def asked(address: str, rest: str = "", body: object = None, host: str = "", size: int = 0) -> tuple[HTTPResponse, str]:
    url = urlsplit(address)
    connection = HTTPConnection(url.netloc, timeout=60)
    data = body if isinstance(body, str) else json.dumps(body)
    method, sent = ("GET", None) if body is None else ("POST", data)
    connection.request(
        method, url.path + rest, sent, {"Host": host or url.netloc} | ({"Content-Length": str(size)} if size else {})
    )
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def meant(address: str, text: str, call: str = "") -> dict[str, Any]:
    response, out = asked(address, "sheet", {"text": text, "call": call})
    assert response.status == 200, out
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_findings_and_picture_follow_the_text_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "job.ucpl"
    before = SPEC.read_text()
    path.write_text(before)
    with page_of(path) as address:
        _, html = asked(address)
        assert before in unescape(html)
        first = meant(address, before)
        assert (first["findings"], first["layouts"], first["why"]) == ([], ["job"], "")
        assert first["call"] == "job(dp = 2, tp = 2, pp = 2)" and "23,328 elements" in first["picture"]
        more = meant(address, before.replace("v = 61", "v = 63"), "job(dp=3)")
        assert more["call"] == "job(dp = 3, tp = 1, pp = 1)" and "23,376 elements" in more["picture"]
        wrong = meant(address, before.replace("norm  : h", "norm  : hh"))
        assert [one["code"] for one in wrong["findings"]] == ["E205"] and wrong["picture"] == ""
        line = before.replace("norm  : h", "norm  : hh").splitlines()[wrong["findings"][0]["line"] - 1]
        assert line[wrong["findings"][0]["column"] - 1 :].startswith("norm ")
        assert meant(address, before, "job(dp=")["why"].startswith("E")
        assert meant(address, before, "nosuch()")["why"].startswith("E")
    assert path.read_text() == before


def test_imports_and_config_are_read_next_to_the_spec(tmp_path: Path) -> None:
    (tmp_path / "base.ucpl").write_text("ucpl 2\nmodel m {\n  dim n = config.n\n  w : n  dtype f32\n}\n")
    (tmp_path / "config.json").write_text('{"n": 12}')
    path = tmp_path / "mine.ucpl"
    path.write_text(
        'ucpl 2\nfrom "base.ucpl" import m\nlayout cut(dp = 1) of m {\n  mesh dp\n  file f = torch "{dp}.pt"\n'
        '  w = n@dp  in f as "w"\n}\n'
    )
    with page_of(path) as address:
        found = meant(address, path.read_text(), "cut(dp=3)")
    assert found["findings"] == [] and "12 elements" in found["picture"], found


def test_a_text_is_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "odd.ucpl"
    path.write_text("ucpl 2\n# </textarea><script>alert(1)</script>\n")
    with page_of(path, "<b>") as address:
        response, html = asked(address)
    assert "<script>alert" not in html and 'value="<b>"' not in html
    assert response.headers["X-Frame-Options"] == "DENY" and "default-src 'none'" in html


def test_others_get_no_answer(tmp_path: Path) -> None:
    body = {"text": SPEC.read_text(), "call": ""}
    with page_of(SPEC) as address:
        port = urlsplit(address).port
        root = f"http://127.0.0.1:{port}/"
        assert asked(address, host=f"localhost:{port}")[0].status == 200
        for response in (
            asked(root)[0],
            asked(root, "wrong/")[0],
            asked(root, "sheet", body)[0],
            asked(address, host=f"elsewhere.example:{port}")[0],
            asked(address, "sheet", body, host="elsewhere.example")[0],
            asked(address, "../../etc/passwd")[0],
        ):
            assert response.status == 404


@pytest.mark.parametrize("body", ["", "[", "[]", "{}", '{"text": 1, "call": ""}', '{"text": ""}', '"\\ud800"'])
def test_a_wrong_question_is_refused_and_the_next_is_answered(body: str) -> None:
    with page_of(SPEC) as address:
        assert asked(address, "sheet", body)[0].status == 400
        assert asked(address, "sheet", "", size=LONGEST + 1)[0].status == 413
        assert meant(address, SPEC.read_text())["why"] == ""


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ((ROOT / "examples" / "checkpoint",), "E171"),
        ((SPEC, "-D", "v=3"), "E171"),
        *(((SPEC, *more), "E171") for more in (("--rank", "0"), ("--each",), ("--after", "build"), ("--json",))),
        (("nosuch.ucpl",), "E170"),
    ],
)
def test_what_is_served_is_a_spec(argv: tuple[object, ...], code: str) -> None:
    done = ucpl("show", *argv, "--serve", "0")
    assert done.status == (3 if code == "E170" else 2) and code in done.err, done


def test_a_port_that_is_taken_is_named() -> None:
    with page_of(SPEC) as address:
        port = urlsplit(address).port
        done = ucpl("show", SPEC, "--serve", port)
    assert done.status == 2 and f"port {port} cannot be used" in done.err, done
    assert ucpl("show", SPEC, "--serve", 70000).status == 2

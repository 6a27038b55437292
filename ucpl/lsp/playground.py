"""A page with a spec, its findings, and a layout's picture.

The page is served to this machine alone, under a key that only the printed address has. It reads no file but the
spec's imports and config.json, and writes none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import TYPE_CHECKING

from attrs import field

from ucpl.errors import Diagnostic, UcplError
from ucpl.lsp.service import Service
from ucpl.pictures.page import policy_of
from ucpl.records import define

if TYPE_CHECKING:
    from ucpl.placement import Placement

__all__ = ["Sheet", "serving"]

LONGEST = 1 << 20  # bytes of a text that is read


@define(eq=False)
class Sheet:
    """One spec in the page. A single thread at a time answers.

    path: where its imports and its config.json are looked for.
    """

    path: str
    text: str
    call: str
    service: Service = field(factory=Service)
    lock: Lock = field(factory=Lock)

    def answer(self, text: str, call: str) -> dict[str, object]:
        """The findings of a text, and the page of a layout's picture.

        call: as `ucpl show` takes it, without the file; "": the file's first layout, at small degrees.
        """
        with self.lock:
            self.service.put(self.path, text)
            found = [
                {
                    "line": one.start[0] + 1,
                    "column": one.start[1] + 1,
                    "code": one.code or one.rule,
                    "text": one.message,
                }
                for one in self.service.findings(self.path)
            ]
            out: dict[str, object] = {"findings": found, "layouts": self.service.sizes(self.path).layouts()}
            try:
                placement = self._placed(text, call.strip())
            except UcplError as error:
                first = error.diagnostics[0]
                return out | {"picture": "", "why": _text_of(first)}
            from ucpl.pictures.layouts import layout_picture
            from ucpl.pictures.svg import layout_html

            if placement is None:
                why = "no layout of this text can be placed alone: write a call of one, as in zero1(dp=4)"
                return out | {"picture": "", "why": why}
            return out | {"picture": layout_html(layout_picture(placement)), "why": "", "call": placement.layout.call}

    def _placed(self, text: str, call: str) -> Placement | None:
        """Raises: UcplError."""
        from ucpl.conversion.requests import Given, called_in
        from ucpl.conversion.side import located
        from ucpl.layout import load

        if not call:
            sizes = self.service.sizes(self.path)
            call = next((sizes.calls[name] for name in sizes.layouts() if sizes.placement(name) is not None), "")
            if not call:
                return None
        config = self.service.texts.config(self.path)
        library = load((self.path, text), read=self.service.texts.text, keep=True)
        return located(called_in(library, call), Given(config=config.values if config is not None else None)).placement


def _text_of(diagnostic: Diagnostic) -> str:
    lines = [f"{diagnostic.code} {diagnostic.message}", *(label.text for label in diagnostic.labels if label.text)]
    return "\n".join([*lines, diagnostic.remedy] if diagnostic.remedy else lines)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    sheet: Sheet
    key: str


class _Handler(BaseHTTPRequestHandler):
    """Two requests: the page, and the answer to a text."""

    server: _Server
    timeout = 60

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal free."""

    def do_GET(self) -> None:
        if not self._is_ours("/"):
            return self._send(404, "text/plain", "not found")
        self._send(200, "text/html", page(self.server.sheet))

    def do_POST(self) -> None:
        if not self._is_ours("/sheet"):
            return self._send(404, "text/plain", "not found")
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > LONGEST:
            return self._send(413, "text/plain", f"a text has at most {LONGEST} bytes")
        try:
            asked = json.loads(self.rfile.read(int(size)))
            text, call = asked["text"], asked["call"]
            if not isinstance(text, str) or not isinstance(call, str):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            return self._send(400, "text/plain", "a text and a call are asked for")
        self._send(200, "application/json", json.dumps(self.server.sheet.answer(text, call)))

    def _is_ours(self, rest: str) -> bool:
        """True for the printed address.

        Another name for this machine is refused: a site could have given it.
        """
        host = self.headers.get("Host", "")
        port = self.server.server_address[1]
        known = secrets.compare_digest(self.path.encode(), f"/{self.server.key}{rest}".encode())
        return known and host in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(data))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(sheet: Sheet, port: int) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """The address of the page, and its server, which `serve_forever` starts.

    port: 0 takes a free one. Raises: OSError if the port is taken.
    """
    server = _Server(("127.0.0.1", port), _Handler)
    server.sheet, server.key = sheet, secrets.token_urlsafe(18)
    with server:
        yield f"http://127.0.0.1:{server.server_address[1]}/{server.key}/", server


STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--faint:#5b6570;--line:#c9d1d9;--wrong:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e6edf3;--faint:#9aa5b1;--line:#3a434d;--wrong:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;height:100vh;display:grid;grid-template:auto 1fr/minmax(320px,42%) 1fr;gap:8px 12px;padding:10px;
 background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,"DejaVu Sans",sans-serif}
header{grid-column:1/3;display:flex;flex-wrap:wrap;gap:6px 18px;align-items:baseline}
h1{font-size:16px;margin:0;overflow-wrap:anywhere}label{color:var(--faint)}
input,textarea,button{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;color:inherit;background:inherit;
 border:1px solid var(--line);border-radius:4px;padding:3px 7px}
#call{width:min(46ch,60vw)}#left{display:grid;grid-template-rows:1fr auto;gap:8px;min-height:0}
textarea{width:100%;height:100%;resize:none;tab-size:4;white-space:pre;overflow:auto;padding:8px}
#found{margin:0;padding:0;list-style:none;max-height:34vh;overflow:auto;font-size:13px}
#found li{border-top:1px solid var(--line);padding:4px 2px;white-space:pre-wrap;overflow-wrap:anywhere;cursor:pointer}
#found b{color:var(--wrong)}#state{color:var(--faint)}
iframe{width:100%;height:100%;border:1px solid var(--line);border-radius:4px;background:#fff}
#right{display:grid;grid-template-rows:auto 1fr;min-height:0}#why{margin:0;white-space:pre-wrap;color:var(--wrong)}
@media (max-width:760px){body{height:auto;grid-template:auto 60vh 80vh/1fr}header{grid-column:1}}
"""

SCRIPT = """
(function(){
 var $=function(n){return document.getElementById(n);},text=$('text'),call=$('call'),found=$('found');
 var asked=0,shown='',timer=0;
 function place(line,column){
  var lines=text.value.split('\\n'),at=0;for(var i=0;i<line-1&&i<lines.length;i++)at+=lines[i].length+1;
  text.focus();text.setSelectionRange(at+column-1,at+column);
  text.scrollTop=Math.max(0,(line-4))*parseFloat(getComputedStyle(text).lineHeight);}
 function show(answer){
  found.textContent='';
  answer.findings.forEach(function(one){
   var row=document.createElement('li'),mark=document.createElement('b');
   mark.textContent=one.line+':'+one.column+' '+one.code+' ';row.append(mark,one.text);
   row.addEventListener('click',function(){place(one.line,one.column);});found.append(row);});
  var n=answer.findings.length;$('state').textContent=n?n+(n>1?' findings':' finding'):'no findings';
  $('layouts').textContent=answer.layouts.length?'layouts: '+answer.layouts.join(', '):'';
  $('why').textContent=answer.why;
  if(answer.picture&&answer.picture!==shown){shown=answer.picture;$('picture').srcdoc=shown;}
  $('picture').style.opacity=answer.picture?1:.35;
  if(!call.value&&answer.call)call.placeholder=answer.call;}
 function ask(){
  var number=++asked;$('state').textContent='checking';
  fetch('sheet',{method:'POST',body:JSON.stringify({text:text.value,call:call.value})})
   .then(function(r){if(!r.ok)return r.text().then(function(t){throw new Error(t);});return r.json();})
   .then(function(answer){if(number===asked)show(answer);})
   .catch(function(e){if(number===asked)$('state').textContent='no answer: '+e.message;});}
 function soon(){clearTimeout(timer);timer=setTimeout(ask,250);}
 text.addEventListener('input',soon);call.addEventListener('input',soon);
 text.addEventListener('keydown',function(e){if(e.key==='Tab'&&!e.shiftKey){e.preventDefault();
  text.setRangeText('    ',text.selectionStart,text.selectionEnd,'end');soon();}});
 $('copy').addEventListener('click',function(){navigator.clipboard.writeText(text.value);});
 ask();
})();
"""


def page(sheet: Sheet) -> str:
    """The page, with everything that it needs."""
    from ucpl.pictures.look import markup

    policy = policy_of(SCRIPT) + "; connect-src 'self'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markup(sheet.path)} - ucpl</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{markup(sheet.path)}</h1>"
        f'<label>layout <input id="call" spellcheck="false" value="{markup(sheet.call)}"></label>'
        '<span id="layouts"></span><span id="state" role="status"></span>'
        '<button id="copy" title="The file is not changed: copy the text from here">copy the text</button></header>\n'
        f'<div id="left"><textarea id="text" aria-label="spec" spellcheck="false">\n{escape(sheet.text)}</textarea>'
        '<ol id="found" aria-label="findings"></ol></div>\n'
        '<div id="right"><p id="why" role="alert"></p>'
        '<iframe id="picture" title="the layout" sandbox></iframe></div>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )

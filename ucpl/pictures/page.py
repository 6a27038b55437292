"""A self-contained HTML page: style and script inside, everything else forbidden.

Its policy forbids it.
"""

from __future__ import annotations

import base64
import hashlib

from ucpl.pictures.look import COLOURS, DARK, FAMILIES, HATCHINGS, HEATS, LIGHT, WARM, markup, mixed

__all__ = ["bar", "box", "lines_of", "page", "percent", "tag"]

_GRADIENTS = (
    "",
    "repeating-linear-gradient(135deg,var(--t{n}) 0 1px,transparent 1px 6px)",
    "repeating-linear-gradient(45deg,var(--t{n}) 0 1px,transparent 1px 6px)",
    "radial-gradient(var(--t{n}) 1.1px,transparent 1.5px) 0 0/7px 7px",
)

STYLE = """
*{box-sizing:border-box}
body{margin:0;padding:24px clamp(12px,3vw,40px) 72px;background:var(--paper);color:var(--ink);
 font:14px/1.45 system-ui,-apple-system,"Segoe UI","DejaVu Sans",Helvetica,Arial,sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:17px;margin:28px 0 4px}h3{font-size:14px;margin:0;overflow-wrap:anywhere}
p{margin:4px 0;color:var(--faint);max-width:110ch;overflow-wrap:anywhere}
code,.name{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:6px 22px;margin:10px 0;padding:0;list-style:none;font-size:12.5px;
 color:var(--faint)}
.legend li{display:flex;align-items:baseline}
.legend i{flex:none;width:24px;height:13px;margin-right:7px;border:1px solid var(--line)}
.find{margin:10px 0}.find input{font:inherit;width:9em;padding:3px 7px;color:inherit;background:var(--paper);
 border:1px solid var(--line);border-radius:4px}
.rows{display:grid;grid-template-columns:minmax(90px,max-content) 1fr;gap:4px 14px;align-items:center;font-size:12.5px;
 margin:8px 0}
.rows>span:nth-child(odd){overflow-wrap:anywhere}
.bar{display:flex;align-items:center;height:19px;min-width:0}
.bar i{height:100%;border:1px solid var(--line);min-width:1px;display:flex;flex-wrap:wrap;align-content:flex-start;
 justify-content:center;overflow:hidden;white-space:nowrap;font-style:normal}
.bar em{font-style:normal;color:var(--faint);padding-left:8px;white-space:nowrap}
.tensor{border-top:1px solid var(--soft);padding:12px 0 16px;display:grid;grid-template-columns:minmax(150px,230px) 1fr;
 gap:10px 22px}
.tensor>header{font-size:12.5px;color:var(--faint)}.tensor>header .name{font-size:14px;font-weight:600;color:var(--ink)}
.states{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:14px 22px;min-width:0;
 align-items:start}
.states p{font-size:12px;min-height:1.45em;margin:1px 0 3px}
.strips,.cells{position:relative}.strips{height:16px;font-size:11px;color:var(--faint)}
.strips i,.cells i{position:absolute;display:flex;flex-wrap:wrap;align-content:flex-start;justify-content:center;
 overflow:hidden;font-style:normal}
.strips i{top:0;height:16px}.strips i::before,.cells i::before,.bar i::before{content:"";width:0;height:100%}
.cells{border:1px solid var(--line);background:var(--none)}.cells[data-partly]{background:var(--hatched)}
.cells i{border:1px solid;container-type:size}.cells i.on{outline:3px solid var(--ink);outline-offset:-3px}
.finding .cells i:not(.on){opacity:.3}
.cells b,.strips b,.bar b{font-weight:400;font-size:11px;line-height:1;align-self:center;padding:0 1px;white-space:nowrap}
.cells b,.bar b{text-shadow:0 0 2px var(--paper),0 0 2px var(--paper)}
@container (max-height:10px){.cells b{display:none}}
details{margin:8px 0 0 12px;font-size:12.5px}summary{cursor:pointer;color:var(--faint);margin-bottom:4px}
.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:12px;margin:8px 0}
td,th{padding:3px 8px;text-align:left;vertical-align:top;font-weight:400}
th{color:var(--faint);white-space:nowrap}table.lined td,table.lined th{border-top:1px solid var(--soft)}
td.name{min-width:22ch}td.n,th.n{text-align:right;white-space:nowrap}
table.heat td{text-align:center;border:1px solid var(--soft);min-width:26px;height:24px;padding:2px 4px;white-space:nowrap}
table.heat th{text-align:right;padding:2px 6px}table.heat thead th{text-align:center}
.flow{display:flex;flex-wrap:wrap;gap:10px 28px;align-items:flex-start}.flow>*{min-width:0}
.bands{flex:0 1 440px;padding-top:16px}.bands svg{width:100%;height:auto}
#shown{position:fixed;left:0;right:0;bottom:0;padding:8px clamp(12px,3vw,40px);background:var(--paper);
 border-top:1px solid var(--line);
 font-size:12.5px;white-space:pre-line;overflow-wrap:anywhere;max-height:40vh;overflow:auto}
#shown:empty{display:none}
@media (max-width:700px){.tensor{grid-template-columns:1fr}.rows{grid-template-columns:1fr;gap:1px}
 .rows>span:nth-child(odd){margin-top:5px}}
@media print{#shown,.find{display:none}}
"""

# The text of hovering over or touching a cell, below; and the cells of one rank, if its number is asked for.
SCRIPT = """
(function(){
 var shown=document.getElementById('shown'),find=document.getElementById('find'),hits=document.getElementById('hits');
 function say(e){var c=e.target.closest('[title]');if(c)shown.textContent=c.title;}
 document.addEventListener('mouseover',say);document.addEventListener('click',say);document.addEventListener('focusin',say);
 if(!find)return;
 function has(runs,r){return runs.split(' ').some(function(run){var p=run.split(':').map(Number);
  return p.length<2?p[0]===r:r>=p[0]&&r<p[1]&&(r-p[0])%(p[2]||1)===0;});}
 find.addEventListener('input',function(){
  var r=find.value===''?-1:Number(find.value),n=0;
  document.body.classList.toggle('finding',r>=0);
  document.querySelectorAll('.cells i').forEach(function(c){
   var on=r>=0&&has(c.dataset.r,r);c.classList.toggle('on',on);n+=on?1:0;});
  var left=r,at=find.dataset.mesh.split(' ').filter(Boolean).reverse().map(function(a){
   var p=a.split('='),d=Number(p[1]),v=left%d;left=(left-v)/d;return p[0]+' '+v;}).reverse().join(' · ');
  hits.textContent=r<0?'':(n?(at?at+': ':'')+n+' cells hold something of it':'no cell');
 });
})();
"""


def page(title: str, body: str) -> str:
    """A complete file. `body` is markup whose texts are already escaped."""
    mark = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{markup(title)}</title>\n'
        f"<style>{_scheme()}{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f'<div id="shown" role="status"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _scheme() -> str:
    shades = []
    for s in range(FAMILIES):
        n, hatch = s % len(COLOURS), _GRADIENTS[s // len(COLOURS) % HATCHINGS]
        shades.append(
            f".s{s}{{background:{hatch.format(n=n) + ',' if hatch else ''}var(--f{n});border-color:var(--e{n})!important}}"
        )
    heats = [f".h{n}{{background:var(--h{n})}}" for n in range(HEATS + 1)]
    hatched = "repeating-linear-gradient(135deg,var(--line) 0 1px,transparent 1px 6px),var(--none)"
    nobody = f".k{{background:{hatched}}}"
    return (
        f":root{{{_variables(LIGHT)};--hatched:{hatched}}}\n@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n"
        + "".join([*shades, *heats, nobody])
    )


def _variables(paper: dict[str, str]) -> str:
    out = [f"--{name}:{paper[name]}" for name in ("paper", "ink", "faint", "line", "none")]
    out.append(f"--soft:{mixed(paper['line'], paper['paper'], 0.35)}")
    for n, colour in enumerate(COLOURS):
        out += [f"--f{n}:{mixed(colour, paper['paper'])}", f"--e{n}:{mixed(colour, paper['ink'], 0.75)}"]
        out.append(f"--t{n}:{mixed(mixed(colour, paper['ink'], 0.7), mixed(colour, paper['paper']), 0.55)}")
    out += [f"--h{n}:{mixed(WARM, paper['paper'], 0.75 * n / HEATS)}" for n in range(HEATS + 1)]
    return ";".join(out)


def tag(name: str, text: str, **attributes: str) -> str:
    """An element with a text in it. `kind` is its class."""
    told = "".join(f' {"class" if k == "kind" else k}="{markup(v)}"' for k, v in attributes.items())
    return f"<{name}{told}>{markup(text)}</{name}>"


def lines_of(title: str) -> str:
    """A title of several lines as an attribute's value."""
    return "&#10;".join(markup(line) for line in title.split("\n"))


def percent(share: float) -> str:
    return f"{100 * share:.5f}".rstrip("0").rstrip(".") + "%"


def box(place: tuple[float, float, float, float], kind: str, title: str, label: str, data: str = "") -> str:
    """A cell, by its shares of the box around it.

    Its label is hidden if it does not fit. data: markup.
    """
    left, top, width, height = map(percent, place)
    where = f"left:{left};top:{top};width:{width};height:{height}"
    return f'<i class="{kind}" style="{where}" title="{lines_of(title)}"{data}>{_label(label)}</i>'


def _label(text: str) -> str:
    return f"<b>{markup(text)}</b>" if text else ""


def bar(parts: list[tuple[float, str, str, str]], behind: str) -> str:
    """Parts end to end: share, class, title and label of each.

    Behind: the text after them.
    """
    cells = "".join(
        f'<i class="{kind}" style="width:{percent(share)}" title="{lines_of(title)}">{_label(label)}</i>'
        for share, kind, title, label in parts
    )
    return f'<span class="bar">{cells}<em>{markup(behind)}</em></span>'

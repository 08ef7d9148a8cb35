"""The page around the charts: facts, tables, style, script. Text only.

Nothing is loaded from anywhere, so the page works from a file. Without its script it shows the
same; the script adds a tooltip, stretching, highlighting and filters.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

LEGEND = '<p class="legend">' + "".join(
    f'<span><b class="{kind}"></b>{words}</span>'
    for kind, words in (
        ("launch", "kernel"),
        ("copy", "copy"),
        ("host", "host reads or writes"),
        ("mark", "event, wait"),
    )
)
CONTROLS = (
    '<span class="zoom">'
    + "".join(
        f'<label>{words} <input type="range" data-scales="{scaled}" min="0" max="6" step="0.25" '
        'value="0"></label>'
        for scaled, words in (("wide", "stretch time"), ("tall", "stretch memory"))
    )
    + "</span></p>"
)


LONGEST_NUMBER = 24  # letters of a fact that is written large


def page(title: str, sections: Iterable[str]) -> str:
    """The whole document."""
    body = "\n".join(s for s in sections if s)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><body>{_HATCH}<main>{body}</main>"
        f'<div id="tip" hidden></div><script>{_SCRIPT}</script></body></html>\n'
    )


def heading(title: str, under: str = "") -> str:
    """The page's title, and a line under it."""
    return f'<h1>{escape(title)}</h1><p class="under">{escape(under)}</p>'


def chapter(title: str, note: str = "") -> str:
    """A section's title, and what it shows."""
    return f"<h2>{escape(title)}</h2>" + (f'<p class="note">{escape(note)}</p>' if note else "")


def cards(facts: Mapping[str, object], kind: str = "") -> str:
    """Facts side by side: the number large, its name under it; the pointer shows what it means."""
    cells = (
        f'<div class="fact{_size(v)}"{_meaning(k)}><b>{escape(_number(v))}</b>'
        f"<span>{escape(k.replace('_', ' '))}</span></div>"
        for k, v in facts.items()
    )
    return f'<div class="facts {kind}">{"".join(cells)}</div>'


MEANINGS = {
    "commands": "kernels, copies, events and host steps of one run",
    "unrolled": "commands of all the runs that the proof looks at: the steady state",
    "pairs_checked": "pairs of commands that touch a common byte, one of them writing, all ordered",
    "reads_proved": "reads that were traced to the write whose value they mean to see",
    "reuses": "pairs of values that share bytes at different times",
    "peak_bytes": "bytes of all arenas together, as they are laid out",
    "live_bound_bytes": "the most bytes that values alive at once need at the same time: no layout "
    "of these commands in this order can do with less",
    "concurrency_bytes": "bytes that the peak grew by because work that may run at once cannot "
    "share them",
    "ends_complete": "whether a run ends only when all its work is done",
    "approximations": "ops that a rewrite or a kernel rounds, with what each of them gives up",
    "arena_bytes": "bytes of every arena, as they are laid out",
}


def _size(value: object) -> str:
    """The class of a fact that is a sentence rather than a number."""
    return " sentence" if len(_number(value)) > LONGEST_NUMBER else ""


def _meaning(fact: str) -> str:
    """What the pointer shows of a fact, as an attribute."""
    found = MEANINGS.get(fact.replace(" ", "_"))
    return f' title="{escape(found, quote=True)}"' if found else ""


def _number(value: object) -> str:
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def panel(kind: str, title: str, parts: Iterable[str]) -> str:
    """A box that is `bad` (red), `good` (green) or plain; `parts` are ready HTML."""
    return f'<section class="panel {kind}"><h4>{escape(title)}</h4>{"".join(parts)}</section>'


def paragraph(text: str, kind: str = "") -> str:
    """Text in a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, filtered: bool = False) -> str:
    """A table that scrolls; with a field that filters its rows if wanted."""
    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(_number(c))}</td>" for c in row) + "</tr>" for row in rows
    )
    field = '<input class="filter" placeholder="filter, such as blk.0">' if filtered else ""
    return (
        f'{field}<div class="scroll"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


_HATCH = (
    '<svg width="0" height="0" style="position:absolute"><defs><pattern id="hatch" width="7" '
    'height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" '
    'height="7" fill="#d62839" opacity=".16"/><rect width="2.5" height="7" fill="#d62839" '
    'opacity=".75"/></pattern></defs></svg>'
)

_STYLE = """
:root{--ink:#1c2330;--soft:#5d6778;--line:#e2e6ee;--paper:#fff;--ground:#f5f6f9;--race:#d62839;
--launch:#4c7bd9;--copy:#e08a2e;--host:#3f9a68;--mark:#9aa3b2;--on:#fff;--wide:1;--tall:1;
--bad:#fdf0f1;--badink:#8c1522;--good:#eef8f1;--goodink:#1d6b3c}
@media (prefers-color-scheme:dark){:root{--ink:#e7eaf1;--soft:#98a2b4;--line:#2a3240;
--paper:#161b24;--ground:#0f131a;--launch:#5b86dd;--copy:#d08436;--host:#479b6d;--mark:#6d7788;
--bad:#2b1519;--badink:#ff9aa5;--good:#12241a;--goodink:#86d3a4}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);
background:var(--ground);margin:0}
main{max-width:1240px;margin:0 auto;padding:2rem 1.2rem 4rem}
h1{font-size:clamp(1.15rem,4.5vw,1.6rem);letter-spacing:-.01em;margin:0}
h1,h2,h3,h4,.under,.fact{overflow-wrap:anywhere}.fact[title],.fact[data-tip]{cursor:help}
.under{color:var(--soft);margin:.2rem 0 1.2rem}
h2{font-size:1.15rem;margin:2.4rem 0 .2rem;letter-spacing:-.005em}
h3{font:600 .85rem ui-monospace,Menlo,Consolas,monospace;margin:1.2rem 0 .35rem}
h3 i{font:400 .85rem system-ui,sans-serif;color:var(--soft);margin-left:.4rem}
.note{color:var(--soft);font-size:.88rem;margin:.1rem 0 .7rem;max-width:56rem}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;margin:.4rem 0}
.fact{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:.5rem .9rem}
.fact b{display:block;font-size:1.12rem;font-weight:600;font-variant-numeric:tabular-nums}
.fact.sentence b{font-size:.88rem;font-weight:400}.fact span{color:var(--soft);font-size:.78rem}
.legend{display:flex;flex-wrap:wrap;gap:1.1rem;align-items:center;color:var(--soft);
font-size:.8rem;margin:.3rem 0 .5rem}
.legend b{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:.4rem;
vertical-align:-1px}.legend b.mark{height:7px;vertical-align:1px}
b.launch{background:var(--launch)}b.copy{background:var(--copy)}b.host{background:var(--host)}
b.mark{background:var(--mark)}.zoom{margin-left:auto;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.zoom input{vertical-align:middle;width:7.5rem}
.chart{display:flex;background:var(--paper);border:1px solid var(--line);border-radius:10px;
overflow:hidden;padding:.4rem 0 .1rem}
.names{position:relative;flex:0 0 6.2rem;border-right:1px solid var(--line)}
.names span{position:absolute;right:.6rem;max-width:5.4rem;overflow:hidden;white-space:nowrap;
text-overflow:ellipsis;font:12px/16px ui-monospace,Menlo,Consolas,monospace;color:var(--soft)}
.pan{flex:1;overflow-x:auto;overflow-y:hidden}
.pan svg{display:block;width:calc(100% * var(--wide))}.drawn{height:var(--height)}
.grows .drawn{height:calc(var(--height)*var(--tall))}.ticks{height:22px}
svg text{font:11px system-ui,sans-serif}.grid{stroke:var(--line)}
.tick{fill:var(--soft);text-anchor:middle;font-variant-numeric:tabular-nums}
.tick.first{text-anchor:start}.tick.last,.culprit.last{text-anchor:end}
.lane{fill:var(--line)}.bar rect{stroke:var(--paper);stroke-width:.4}
.bar .launch{fill:var(--launch)}.bar .copy{fill:var(--copy)}.bar .host{fill:var(--host)}
.bar .mark{fill:var(--mark)}.label{fill:var(--on);display:none;pointer-events:none}
.label.fits{display:inline}.event{stroke:var(--soft);opacity:.45;stroke-width:1}
.bar.hot rect{fill:var(--race);stroke:var(--race);stroke-width:2}
.culprit{fill:var(--race);font-weight:700;paint-order:stroke;stroke:var(--paper);stroke-width:4px;
stroke-linejoin:round}.race{stroke:var(--race);stroke-width:2;stroke-dasharray:5 4}
.box rect{stroke:var(--paper);stroke-width:.8}.box .label{fill:#14202f}
.raced rect{fill:url(#hatch);stroke:var(--race);stroke-width:2}
.c0{fill:#8fb4f0}.c1{fill:#f6bd7d}.c2{fill:#93d0a6}.c3{fill:#cbaee8}.c4{fill:#86cfd2}
.c5{fill:#ecd57a}.c6{fill:#dba7a0}.c7{fill:#b7bfcc}
.bar:hover rect,.box:hover rect{filter:brightness(1.12);stroke:var(--ink);stroke-width:1.4}
.linking .box:not(.rd):not(.wr):not(:hover),.linking .bar:not(.rd):not(.wr):not(:hover){opacity:.22}
.box.wr rect{stroke:var(--ink);stroke-width:1.6}
.panel{background:var(--paper);border:1px solid var(--line);border-left:4px solid var(--line);
border-radius:10px;padding:.8rem 1.1rem;margin:1rem 0}
.panel h4{margin:0 0 .4rem;font-size:1rem}.panel p{margin:.35rem 0}
.bad{background:var(--bad);border-color:var(--race)}.bad h4{color:var(--badink)}
.good{background:var(--good);border-color:var(--host)}.good h4{color:var(--goodink)}
.sites{display:grid;grid-template-columns:1fr auto 1fr;gap:.8rem;align-items:center;
margin:.6rem 0}.site{background:var(--paper);border:1px solid var(--line);border-radius:8px;
padding:.5rem .7rem;font:12px/1.55 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.site b{display:block;font:600 .78rem system-ui,sans-serif;color:var(--soft)}
.sites .versus{color:var(--race);font-weight:700;text-align:center;font-size:.85rem}
.mono{font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.meter{display:grid;grid-template-columns:13rem 1fr 4rem;gap:.3rem .8rem;align-items:center;
font-size:.86rem;margin:.6rem 0}.meter i{display:block;height:12px;border-radius:6px;
background:var(--line);overflow:hidden}.meter i b{display:block;height:100%}
.strip{display:flex;gap:3px;margin:.5rem 0;overflow:hidden;border-radius:8px}
.strip div{padding:.35rem .5rem;min-width:3px;font-size:.78rem;color:#14202f;white-space:nowrap;
overflow:hidden;text-overflow:ellipsis}
.filter{font:inherit;font-size:.85rem;padding:.3rem .6rem;margin:.2rem 0 .5rem;width:18rem;
max-width:100%;border:1px solid var(--line);border-radius:8px;background:var(--paper);
color:var(--ink)}
.scroll{max-height:24rem;overflow:auto;background:var(--paper);border:1px solid var(--line);
border-radius:10px}table{border-collapse:collapse;width:100%;font-size:.84rem}
th{position:sticky;top:0;background:var(--paper);text-align:left;color:var(--soft);
font-weight:600}td,th{padding:.3rem .8rem;border-bottom:1px solid var(--line);
font-variant-numeric:tabular-nums}
#tip{position:fixed;z-index:9;max-width:34rem;background:#111722;color:#eef1f6;border-radius:8px;
padding:.5rem .7rem;font:12px/1.5 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;
pointer-events:none;box-shadow:0 6px 24px #0004}
@media (max-width:760px){.sites,.meter{grid-template-columns:1fr}.names{flex-basis:4.2rem}
.names span{max-width:3.8rem;right:.2rem;font-size:11px}main{padding:1rem .6rem 3rem}}
@media print{.zoom,.filter{display:none}}
"""

_SCRIPT = """
(()=>{const all=(q,e=document)=>[...e.querySelectorAll(q)],tip=document.getElementById('tip');
all('svg title').forEach(t=>{t.parentNode.dataset.tip=t.textContent;t.remove()});
all('[title]').forEach(e=>{e.dataset.tip=e.title;e.removeAttribute('title')});
const bars={},boxes={},add=(m,k,e)=>(m[k]=m[k]||[]).push(e);
all('.bar').forEach(b=>{for(const k of['r','w'])(b.dataset[k]||'').split(' ').filter(Boolean)
.forEach(v=>add(bars,v,[b,k==='w'?'wr':'rd']))});
all('.box').forEach(b=>add(boxes,b.dataset.b,b));
const clear=()=>{document.body.classList.remove('linking');
all('.rd,.wr').forEach(e=>e.classList.remove('rd','wr'))};
const link=e=>{clear();let n=0;const on=(x,c)=>{x.classList.add(c);n++};
if(e.dataset.b)(bars[e.dataset.b]||[]).forEach(([x,c])=>on(x,c));
for(const[k,c]of[['r','rd'],['w','wr']])(e.dataset[k]||'').split(' ').filter(Boolean)
.forEach(v=>(boxes[v]||[]).forEach(x=>on(x,c)));
if(n)document.body.classList.add('linking')};
addEventListener('mousemove',m=>{const e=m.target.closest&&m.target.closest('[data-tip]');
if(!e){tip.hidden=true;clear();return}
if(tip.on!==e||tip.hidden){tip.on=e;tip.textContent=e.dataset.tip;tip.hidden=false;link(e)}
tip.style.left=Math.max(4,Math.min(m.clientX+14,innerWidth-tip.offsetWidth-8))+'px';
const y=m.clientY+18;tip.style.top=(y+tip.offsetHeight>innerHeight?
Math.max(4,m.clientY-tip.offsetHeight-12):y)+'px'});
const fit=()=>{const sizes=all('.label').map(t=>[t,t.parentNode.querySelector('rect')
.getBoundingClientRect()]);sizes.forEach(([t,r])=>t.classList.toggle('fits',
t.textContent.length*6.3+8<r.width&&r.height>=13))};
all('.zoom input').forEach(z=>z.oninput=()=>{const k=z.dataset.scales;
document.documentElement.style.setProperty('--'+k,2**z.value);
all('.zoom input').filter(o=>o.dataset.scales===k).forEach(o=>o.value=z.value);fit()});
all('.pan').forEach(p=>p.onscroll=()=>all('.pan').forEach(o=>{if(o!==p&&
o.scrollLeft!==p.scrollLeft)o.scrollLeft=p.scrollLeft}));
all('.filter').forEach(f=>f.oninput=()=>all('tbody tr',f.nextElementSibling).forEach(r=>
r.hidden=!r.textContent.toLowerCase().includes(f.value.toLowerCase())));
addEventListener('resize',fit);fit()})();
"""

"""The page at `/`: one self-contained HTML document that shows drafts being accepted, live.

It uses the public /generate with `return_spec_tokens`, and nothing from another host.
"""

from __future__ import annotations

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #d9dde3; --ink: #1b1f24;
  --soft: #626b77; --draft: #0a7f4f; --wash: #d9f4e5; --button: #1f5fd1; --error: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --line: #333a43;
  --ink: #e4e7eb; --soft: #98a2ae; --draft: #6fe0a8; --wash: #17402c; --button: #4f86ec;
  --error: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.75rem 1.25rem 3rem; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem .9rem;
  margin-bottom: 1.1rem; }
h1 { font-size: 1.35rem; margin: 0; letter-spacing: -.01em; }
#model { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
textarea, #out { font: 14px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  tab-size: 4; }
textarea { display: block; width: 100%; min-height: 6.5rem; padding: .8rem 1rem; resize: vertical;
  border: 0; border-radius: 10px 10px 0 0; background: none; color: inherit; }
.bar { display: flex; flex-wrap: wrap; gap: .6rem 1.1rem; align-items: center;
  padding: .65rem 1rem; border-top: 1px solid var(--line); }
label { color: var(--soft); display: flex; align-items: center; gap: .45rem; }
input { width: 5.2rem; appearance: textfield; padding: .28rem .5rem;
  border: 1px solid var(--line); border-radius: 6px; background: var(--page);
  color: var(--ink); font: inherit; }
#seed { width: 6.6rem; }
button { margin-left: auto; min-width: 7rem; padding: .42rem 1.1rem; border: 0;
  border-radius: 7px; background: var(--button); color: #fff; font: inherit; font-weight: 600;
  cursor: pointer; }
button.stop { background: var(--soft); }
:is(textarea, input, button):focus-visible { outline: 2px solid var(--button);
  outline-offset: 1px; }
dl { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1rem 0; }
dl > div { padding: .6rem 1rem .65rem; }
dt { color: var(--soft); font-size: .82rem; }
dd { margin: 0; font-size: 1.45rem; font-weight: 600; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
#out { margin: 0; padding: .9rem 1rem 1.1rem; min-height: 14rem; white-space: pre-wrap;
  overflow-wrap: anywhere; border-top: 1px solid var(--line); }
#out .prompt { color: var(--soft); }
.draft { color: var(--draft); background: var(--wash); border-radius: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: .5rem 1rem;
  color: var(--soft); font-size: .88rem; }
.legend b { font-weight: 500; padding: 0 .3rem; }
.legend .own { color: var(--ink); }
#note { margin-left: auto; }
#note.bad { color: var(--error); }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr 1fr; } button { width: 100%; } }
"""

_BODY = """
<main>
<header><h1>jspec</h1><span id="model">exact speculative decoding</span></header>
<form class="card" id="form">
<textarea id="prompt" aria-label="Prompt" spellcheck="false" required>class Stack:</textarea>
<div class="bar">
<label>Temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.7">
</label>
<label>Max tokens <input id="tokens" type="number" min="1" step="1" value="128"></label>
<label>Seed <input id="seed" type="number" min="0" step="1" placeholder="random"></label>
<button id="go">Generate</button>
</div>
</form>
<dl>
<div class="card"><dt>Acceptance length</dt><dd id="length">–</dd></div>
<div class="card"><dt>Tokens a second</dt><dd id="rate">–</dd></div>
<div class="card"><dt>Tokens</dt><dd id="count">–</dd></div>
<div class="card"><dt>Verifications</dt><dd id="steps">–</dd></div>
</dl>
<div class="card">
<div class="legend"><span><b class="draft">accepted draft tokens</b></span>
<span><b class="own">the target's own</b></span><span id="note" role="status"></span></div>
<pre id="out" aria-label="Output"></pre>
</div>
</main>
"""

_SCRIPT = """
"use strict";
const $ = (id) => document.getElementById(id);
let apiKey = "", running = null;

function headers() {
  const all = {"Content-Type": "application/json"};
  if (apiKey) all.Authorization = "Bearer " + apiKey;
  return all;
}
function note(text, isBad = false) {
  $("note").textContent = text;
  $("note").className = isBad ? "bad" : "";
}
function append(text, kind) {
  const last = $("out").lastElementChild;
  if (last && last.className === kind) { last.textContent += text; return; }
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  $("out").append(span);
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\\n\\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
async function post(payload, signal) {
  const options = {method: "POST", headers: headers(), body: JSON.stringify(payload), signal};
  const answer = await fetch("generate", options);
  if (answer.status === 401 && !apiKey) {
    apiKey = window.prompt("This server asks for an API key") || "";
    if (apiKey) return post(payload, signal);
  }
  if (answer.status === 401) apiKey = "";
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}
function show(meta, first) {
  const seconds = (performance.now() - first.time) / 1000;
  const fresh = meta.completion_tokens - first.tokens;
  $("count").textContent = meta.completion_tokens;
  const rate = seconds > 0 ? fresh / seconds : 0;
  if (rate > 0) $("rate").textContent = rate.toFixed(rate < 100 ? 1 : 0);
  if (meta.spec_verify_ct) {
    $("length").textContent = meta.acceptance_length.toFixed(2);
    $("steps").textContent = meta.spec_verify_ct;
  }
}
async function generate(signal) {
  for (const id of ["length", "rate", "count", "steps"]) $(id).textContent = "–";
  $("out").replaceChildren();
  append($("prompt").value, "prompt");
  const sampling = {temperature: Number($("temperature").value),
    max_new_tokens: Number($("tokens").value)};
  if ($("seed").value) sampling.sampling_seed = Number($("seed").value);
  const answer = await post({text: $("prompt").value, stream: true, return_spec_tokens: true,
    sampling_params: sampling}, signal);
  let first = null, shown = 0, finish = null;
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    const meta = event.meta_info;
    const isAll = event.output_ids.length === meta.completion_tokens;
    first ??= {time: performance.now(), tokens: meta.completion_tokens};
    for (const piece of event.spec_tokens.slice(isAll ? shown : 0)) {
      append(piece.text, piece.accepted ? "draft" : "own");
      shown += 1;
    }
    show(meta, first);
    finish = meta.finish_reason;
  }
  note(finish && finish.type === "length" ? "ended at max tokens" : "ended by itself");
}
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  running = new AbortController();
  $("go").textContent = "Stop";
  $("go").className = "stop";
  note("generating…");
  try { await generate(running.signal); }
  catch (error) {
    if (error.name === "AbortError") note("stopped"); else note(error.message, true);
  }
  running = null;
  $("go").textContent = "Generate";
  $("go").className = "";
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
fetch("server_info", {headers: headers()}).then((answer) => answer.ok ? answer.json() : null)
  .then((info) => {
    if (!info) return;
    const shape = ["num_steps", "eagle_topk", "num_draft_tokens"]
      .map((name) => info["speculative_" + name]).join("/");
    const isPlain = info.speculative_algorithm === "NONE";
    $("model").textContent = info.served_model_name + " · " +
      (isPlain ? "plain decoding" : info.speculative_algorithm + " " + shape) +
      " · " + info.device;
  }).catch(() => {});
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jspec</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>{_BODY}<script>{_SCRIPT}</script>
</body>
</html>
"""

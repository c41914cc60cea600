"use strict";
// Each panel is one streaming request to /generate with `return_spec_tokens`: pieces of text, each
// with the verification ("step") that wrote it, the drafts that it verified ("proposed"), and a flag
// for accepted draft tokens.

const $ = (id) => document.getElementById(id);
const FIELDS = {temperature: "temperature", top_p: "top_p", max_new_tokens: "max_new_tokens"};
const PROMPTS = ["class Stack:", "def read_lines(path):\n", "import json\n\n\ndef load(", "for i in range("];
const TICKS = ["chat", "trees"], STORE = "jspec-page";
const META = ["completion_tokens", "acceptance_length", "spec_verify_ct", "spec_accept_histogram", "sampling_seed", "finish_reason"];
const MAX_PANELS = 8, POLL_MS = 400, NEAR_END_PX = 12;
const panels = [];
let apiKey = "", isAsking = null, hasBranches = true, isLeaving = false, queue = {running: 0, queued: 0};

function make(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}
function headers() {
  const all = {"Content-Type": "application/json"};
  if (apiKey) all.Authorization = "Bearer " + apiKey;
  return all;
}

// Seeds have 64 bits and JavaScript numbers 53, so they are text on this page and numbers in JSON.
// Quotes inside JSON strings are escaped, so no prompt and no answer matches.
function parsed(json) {
  return JSON.parse(json.replace(/"sampling_seed": ?(-?[0-9]+)/g, '"sampling_seed":"$1"'));
}
function written(payload) {
  return JSON.stringify(payload).replace(/"sampling_seed":"(-?[0-9]+)"/g, '"sampling_seed":$1');
}

// Ask for the key once, however many panels are refused without it.
async function askForKey(refused) {
  if (apiKey !== refused) return apiKey;
  isAsking ??= Promise.resolve().then(() => {
    apiKey = window.prompt("This server asks for an API key") || "";
    isAsking = null;
    return apiKey;
  });
  return isAsking;
}
async function post(path, payload, signal) {
  for (;;) {
    const key = apiKey;
    const options = {method: "POST", headers: headers(), body: written(payload), signal};
    const answer = await fetch(path, options);
    if (answer.ok) return answer;
    const message = (await answer.json()).error.message;
    if (answer.status !== 401 || !(await askForKey(key))) throw new Error(message);
  }
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield parsed(data);
    }
  }
}
function whyEnded(finish) {
  if (!finish) return ["broken off", "the stream ended without saying why"];
  if (finish.type === "length") return ["length reached", finish.length + " tokens"];
  if (finish.type === "abort") return ["aborted", finish.message || "by the server"];
  if (typeof finish.matched === "string") return ["stopped", "at " + JSON.stringify(finish.matched)];
  return ["ended by itself", "with its end-of-text token"];
}

// The output: lines of spans, which follow the text's end unless the reader scrolled up.
class Output {
  constructor(element) { this.element = element; this.clear(); }
  clear() {
    this.element.replaceChildren();
    this.line = null;
  }
  append(text, kind, step) {
    const box = this.element;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
    text.split("\n").forEach((part, index) => {
      if (index || !this.line) this.newLine();
      if (part) this.extend(part, kind, step);
    });
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
  newLine() {
    this.line = make("div", "text-line");
    this.element.append(this.line);
    this.indent = 0;
    this.isBlank = true;
  }
  extend(part, kind, step) {
    if (this.isBlank) {
      const blanks = part.match(/^[ \t]*/)[0];
      for (const blank of blanks) this.indent += blank === "\t" ? 4 - this.indent % 4 : 1;
      this.isBlank = blanks.length === part.length;
      this.line.style.setProperty("--indent", Math.min(this.indent, 24));
    }
    const span = make("span", kind, part);
    if (step) span.dataset.step = step;
    this.line.append(span);
  }
}

class Panel {
  constructor(prompt) {
    this.section = $("panel").content.firstElementChild.cloneNode(true);
    this.prompt = this.get("textarea");
    this.prompt.value = prompt;
    this.output = new Output(this.get(".out"));
    this.running = null;
    this.get(".remove").addEventListener("click", () => this.remove());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("bar").requestSubmit();
    });
    const out = this.get(".out");
    for (const kind of ["pointerover", "click"]) {
      out.addEventListener(kind, (event) => this.showStep(event.target.dataset.step));
    }
    this.prompt.addEventListener("input", keepSoon);
    out.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      this.goBy(event.key === "ArrowRight" ? 1 : -1);
    });
    this.reset();
  }
  get(selector) { return this.section.querySelector(selector); }
  remove() {
    this.running?.abort();
    this.section.remove();
    panels.splice(panels.indexOf(this), 1);
    refresh();
    keep();
  }
  // What a reload shows again; null without an answer.
  kept() {
    if (!this.meta) return null;
    const meta = Object.fromEntries(META.map((name) => [name, this.meta[name]]));
    const [word, why] = this.running ? ["stopped", "by a reload"] : [this.get(".word").textContent, this.get(".why").textContent];
    return {meta, word, why, isBad: this.get(".word").classList.contains("bad"), rate: this.get(".rate").textContent,
      seed: this.seed, shown: this.shown, pieces: this.pieces, trees: [...this.trees]};
  }
  restore(answer) {
    this.seed = answer.seed;
    this.shown = answer.shown;
    this.output.append(answer.shown, "prompt");
    for (const piece of answer.pieces) this.add(piece);
    this.trees = new Map(answer.trees);
    this.section.classList.toggle("with-trees", answer.trees.some(([, tree]) => branches(tree)));
    this.meta = answer.meta;
    this.showSeed(this.seed ?? answer.meta.sampling_seed);
    this.showNumbers(answer.meta);
    this.get(".rate").textContent = answer.rate;
    this.say(answer.word, answer.why, answer.isBad);
  }
  say(word, why = "", isBad = false) {
    this.get(".word").textContent = word;
    this.get(".word").classList.toggle("bad", isBad);
    this.get(".why").textContent = why;
  }
  reset() {
    for (const name of ["length", "rate", "count", "steps"]) this.get("." + name).textContent = "–";
    this.get(".seed").replaceChildren();
    this.get(".histogram").hidden = true;
    this.output.clear();
    this.steps = new Map();
    this.trees = new Map();
    this.pieces = [];
    this.section.classList.toggle("with-trees", hasBranches && $("trees").checked);
    this.meta = this.first = this.hot = null;
    this.isWaiting = false;
    this.showStep();
  }
  // Before the first token: the server reports if requests are queued or in prefill.
  showWaiting() {
    if (!this.isWaiting) return;
    if (queue.queued) this.say("queued", queue.queued + " wait, " + queue.running + " run");
    else this.say("reading the prompt");
  }
  async run(sampling) {
    this.running = new AbortController();
    this.reset();
    this.seed = sampling.sampling_seed;  // as entered: the server reports -3 as 2^64 - 3
    this.isWaiting = true;
    this.say("sent");
    try { await this.generate(sampling, this.running.signal); }
    catch (error) {
      if (isLeaving) this.say("stopped", "by a reload");
      else if (error.name === "AbortError") this.say("stopped", "by you");
      else this.say("failed", error.message, true);
    }
    this.isWaiting = false;
    this.running = null;
    refresh();
    keep();
  }
  // The prompt as a request has it: text, or the tokens of a chat of one message, which are shown
  // as the template writes them.
  async asked(signal) {
    const text = this.shown = this.prompt.value;
    if (!$("chat").checked) return {text};
    const chat = await post("tokenize", {messages: [{role: "user", content: text}]}, signal);
    const input_ids = (await chat.json()).tokens;
    const told = await post("detokenize", {tokens: input_ids, skip_special_tokens: false}, signal);
    this.shown = (await told.json()).text;
    return {input_ids};
  }
  async generate(sampling, signal) {
    const wantsTrees = $("trees").checked, asked = await this.asked(signal);
    this.output.append(this.shown, "prompt");
    const answer = await post("generate", {...asked, stream: true, return_spec_tokens: true,
      return_draft_trees: wantsTrees, sampling_params: sampling}, signal);
    let shown = 0, error = null;
    for await (const event of events(answer.body)) {
      if (event.error) { error = event.error.message; break; }
      const isAll = event.output_ids.length === event.meta_info.completion_tokens;
      for (const piece of event.spec_tokens.slice(isAll ? shown : 0)) {
        this.add(piece);
        shown += 1;
      }
      for (const tree of event.meta_info.draft_trees ?? []) this.trees.set(tree.step, tree);
      this.show(event.meta_info);
    }
    if (error) throw new Error(error);
    const [word, why] = whyEnded(this.meta?.finish_reason);
    this.say(word, why, word === "aborted" || word === "broken off");
  }
  add(piece) {
    this.pieces.push(piece);
    this.output.append(piece.text, piece.accepted ? "draft" : "own", piece.step);
    if (!piece.step) return;
    if (!this.steps.has(piece.step)) this.steps.set(piece.step, []);
    this.steps.get(piece.step).push(piece);
  }
  show(meta) {
    this.meta = meta;
    this.isWaiting = false;
    if (!this.first) {
      this.first = {time: performance.now(), tokens: meta.completion_tokens};
      this.showSeed(this.seed ?? meta.sampling_seed);
      this.say("running");
    }
    const seconds = (performance.now() - this.first.time) / 1000;
    const rate = seconds > 0 ? (meta.completion_tokens - this.first.tokens) / seconds : 0;
    if (rate > 0) this.get(".rate").textContent = rate.toFixed(rate < 100 ? 1 : 0);
    this.showNumbers(meta);
  }
  showNumbers(meta) {
    this.get(".count").textContent = meta.completion_tokens;
    if (!meta.spec_verify_ct) return;
    this.get(".length").textContent = meta.acceptance_length.toFixed(2);
    this.get(".steps").textContent = meta.spec_verify_ct;
    this.showHistogram(meta.spec_accept_histogram);
  }
  showSeed(seed) {
    const use = make("button", "quiet", "use again");
    use.type = "button";
    use.addEventListener("click", () => { $("seed").value = seed; keep(); });
    this.get(".seed").replaceChildren("seed " + seed + " ", use);
  }
  showHistogram(counts) {
    const bars = this.get(".bars"), most = Math.max(...counts, 1);
    if (bars.children.length !== 3 * counts.length) {
      bars.replaceChildren(...counts.flatMap((_, index) =>
        [make("span", "", index), make("i"), make("span", "", "0")]));
    }
    counts.forEach((count, index) => {
      bars.children[3 * index + 1].style.width = 100 * count / most + "%";
      bars.children[3 * index + 2].textContent = count;
    });
    this.get(".histogram").hidden = false;
  }
  // Go to the next or previous step; without a current one, to the first or last.
  goBy(by) {
    const known = [...this.steps.keys()], at = known.indexOf(Number(this.hot));
    const next = at < 0 ? (by > 0 ? 0 : known.length - 1) : at + by;
    if (!(next in known)) return;
    this.showStep(String(known[next]));
    this.section.querySelector(".hot")?.scrollIntoView({block: "nearest"});
  }
  showStep(step) {
    const box = this.get(".step");
    if (step && step === this.hot) return;
    this.hot = step;
    for (const span of this.section.querySelectorAll(".hot")) span.classList.remove("hot");
    const pieces = this.steps.get(Number(step));
    if (!pieces) { box.replaceChildren(); return; }
    for (const span of this.section.querySelectorAll(`[data-step="${step}"]`)) span.classList.add("hot");
    const accepted = pieces.filter((piece) => piece.accepted), own = pieces.filter((piece) => !piece.accepted);
    const tree = this.trees.get(Number(step));
    const proposed = tree ? tree.ids.length - 1 : pieces[0].proposed;
    const numAccepted = tree ? tree.accepted.length : accepted.length;
    const said = `Verification ${step}: ${proposed} drafted, ${numAccepted} accepted, then the target's own`;
    if (tree) { box.replaceChildren(said, drawn(tree, own.map((piece) => piece.text).join(""))); return; }
    const chips = make("div", "chips");
    for (const piece of accepted) chips.append(make("span", "chip draft", visible(piece.text)));
    for (const piece of own) chips.append(make("span", "chip", visible(piece.text)));
    const refused = proposed - accepted.length;
    if (refused > 0) chips.append(make("span", "chip no", refused + " not taken"));
    box.replaceChildren(said, chips);
  }
}
function visible(text) { return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥"); }

function branches(tree) { return new Set(tree.parents).size < tree.parents.length; }

// A tree as nested lists from its root: accepted, rejected, and the target's own tokens.
function drawn(tree, own) {
  const last = tree.accepted.at(-1) ?? 0, box = make("div", "tree");
  const items = tree.ids.map((id, node) => {
    const isTaken = tree.accepted.includes(node), item = make("li");
    const chip = make("span", node === 0 ? "chip root" : isTaken ? "chip draft" : "chip no", visible(tree.texts?.[node] ?? String(id)));
    chip.title = (node === 0 ? "the token before" : isTaken ? "accepted" : "not taken") + ", id " + id;
    chip.setAttribute("aria-label", chip.textContent + ", " + chip.title);
    item.append(chip);
    return item;
  });
  const under = (node) => items[node].querySelector(":scope > ul") ?? items[node].appendChild(make("ul"));
  tree.parents.forEach((parent, node) => { if (node) under(parent).append(items[node]); });
  if (own) {
    const item = make("li"), chip = item.appendChild(make("span", "chip", visible(own)));
    chip.title = "the target's own";
    under(last).append(item);
  }
  box.append(make("ul"));
  box.firstChild.append(items[0]);
  return box;
}
function sampling() {
  const found = {};
  for (const [id, name] of Object.entries(FIELDS)) {
    if ($(id).value !== "") found[name] = Number($(id).value);
  }
  const seed = $("seed").value;
  if (seed) found.sampling_seed = String(BigInt(seed));
  return found;
}
function refresh() {
  const isRunning = panels.some((panel) => panel.running);
  $("go").textContent = isRunning ? "Stop" : panels.length > 1 ? "Generate " + panels.length : "Generate";
  $("go").className = isRunning ? "stop" : "";
  $("add").disabled = panels.length >= MAX_PANELS;
  for (const panel of panels) panel.get(".remove").hidden = panels.length === 1;
}
function addPanel(prompt, answer) {
  const panel = new Panel(prompt ?? PROMPTS[panels.length % PROMPTS.length]);
  panels.push(panel);
  $("panels").append(panel.section);
  if (answer) panel.restore(answer);
  refresh();
}

// Prompts, settings and answers outlive a reload, in this browser. The server's key is not kept.
function keep() {
  const fields = Object.fromEntries([...Object.keys(FIELDS), "seed"].map((id) => [id, $(id).value]));
  const ticks = Object.fromEntries(TICKS.map((id) => [id, $(id).checked]));
  for (const isWhole of [true, false]) {  // without the answers if there is no room for them
    const kept = panels.map((panel) => [panel.prompt.value, isWhole ? panel.kept() : null]);
    try {
      localStorage.setItem(STORE, JSON.stringify({fields, ticks, panels: kept}));
      return;
    } catch { /* full, or the browser keeps nothing */ }
  }
}
let keeping = 0;
function keepSoon() {
  clearTimeout(keeping);
  keeping = setTimeout(keep, POLL_MS);
}
function restore() {
  try {
    const {fields, ticks, panels: kept} = JSON.parse(localStorage.getItem(STORE));
    for (const [id, value] of Object.entries(fields)) $(id).value = value;
    for (const [id, value] of Object.entries(ticks)) $(id).checked = value;
    for (const [prompt, answer] of kept.slice(0, MAX_PANELS)) addPanel(prompt, answer);
  } catch { /* nothing is kept, or by another version of this page */ }
  if (!panels.length) addPanel();
}
async function readServer() {
  const answer = await fetch("server_info", {headers: headers()});
  return answer.ok ? answer.json() : null;
}
function showModel(info) {
  const shape = ["num_steps", "eagle_topk", "num_draft_tokens"]
    .map((name) => info["speculative_" + name]).join("/");
  hasBranches = info.speculative_eagle_topk > 1;
  const isPlain = info.speculative_algorithm === "NONE";
  $("model").textContent = [info.served_model_name,
    isPlain ? "plain decoding" : info.speculative_algorithm + " " + shape, info.device].join(" · ");
}
// While a panel runs: the server's numbers of running and waiting requests.
async function watch() {
  while (panels.some((panel) => panel.running)) {
    const info = await readServer().catch(() => null);
    if (info) {
      const live = info.internal_states[0];
      queue = {running: live.num_running_reqs, queued: live.num_queue_reqs};
      $("server").textContent = queue.running + " running, " + queue.queued + " queued";
      for (const panel of panels) panel.showWaiting();
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  $("server").textContent = "";
}
$("bar").addEventListener("submit", (event) => {
  event.preventDefault();
  if (panels.some((panel) => panel.running)) {
    for (const panel of panels) panel.running?.abort();
    return;
  }
  const asked = sampling();
  for (const panel of panels) panel.run(asked);
  refresh();
  watch();
});
$("bar").addEventListener("input", keepSoon);
$("add").addEventListener("click", () => { addPanel(); keep(); });
$("forget").addEventListener("click", () => {
  removeEventListener("pagehide", keep);
  clearTimeout(keeping);
  try { localStorage.removeItem(STORE); } catch { /* the browser keeps nothing */ }
  location.reload();
});
addEventListener("beforeunload", () => { isLeaving = true; });  // streams fail before pagehide
addEventListener("pagehide", keep);
restore();
readServer().then((info) => { if (info) showModel(info); }).catch(() => {});

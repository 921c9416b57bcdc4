// The page: a picture goes to the server, its answer is shown. Nothing is kept but the last answer and the token.

import { overlay, scale } from "/page/draw.js";
import { sample } from "/page/sample.js";
import { mean, walk } from "/page/walk.js";
import { element, percent, short } from "/page/words.js";

const at = (id) => document.getElementById(id);
const state = { model: null, token: "", asked: null, told: null, picture: null };
const SHOWN = 5; // classes

// ---- talking to the server

class Unauthorised extends Error {}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  const told = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Unauthorised("That is not the token this server asks for.");
  if (!response.ok) throw new Error(sentence(told.error || `The server answered with status ${response.status}`));
  return told;
}

const sentence = (words) => words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");

async function start() {
  try {
    const health = await ask("/healthz");
    if (health.token && !state.token) return askToken();
    await meet();
  } catch (error) {
    fail(error);
  }
}

async function meet() {
  const model = await ask("/v1/model");
  state.model = model;
  const size = model.image_size.join(" × ");
  const facts = [model.name, `${short(model.parameters)} parameters`, `${model.classes.toLocaleString("en")} classes`, `${size} pixels`];
  at("model").textContent = facts.join(" · ");
  document.title = `${model.name} · vitlab`;
  at("token").hidden = true;
  at("ask").hidden = false;
}

function askToken() {
  at("token").hidden = false;
  at("ask").hidden = true;
  at("token-value").focus();
}

function fail(error) {
  if (error.name === "AbortError") return;
  document.body.classList.remove("busy");
  if (error instanceof Unauthorised) {
    state.token = "";
    askToken();
  }
  at("status").textContent = "";
  at("error").textContent = error.message;
  at("error").hidden = false;
}

// ---- one picture

async function show(file) {
  if (!file || !state.model) return;
  state.asked?.abort();
  const asked = (state.asked = new AbortController());
  at("error").hidden = true;
  try {
    if (file.size > state.model.max_bytes) {
      throw new Error(`${file.name} has ${short(file.size)}B; this server takes up to ${short(state.model.max_bytes)}B.`);
    }
    document.body.classList.add("busy");
    at("status").textContent = `Looking at ${file.name} …`;
    const form = new FormData();
    form.append("image", file, file.name || "pasted picture");
    const begun = performance.now();
    const told = await ask(`/v1/explain?top_k=${SHOWN}`, { method: "POST", body: form, signal: asked.signal });
    const picture = await decoded(told.picture);
    if (asked.signal.aborted) return;
    Object.assign(state, { told, picture });
    present(Math.round(performance.now() - begun));
  } catch (error) {
    if (state.asked === asked) fail(error);
  }
}

function decoded(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

function present(milliseconds) {
  const { model, told, picture } = state;
  const [top] = told.classes;
  document.body.classList.remove("busy");
  document.body.classList.add("has-result");
  at("result").hidden = false;
  at("status").textContent = `${told.name}: ${top.name}, ${percent(top.probability)}.`;
  at("top-class").textContent = top.name;
  at("top-probability").textContent = percent(top.probability);
  at("top-probability").dataset.value = top.probability;
  at("bars").replaceChildren(...told.classes.map(bar));
  at("footnote").textContent = `${told.name}, answered in ${milliseconds.toLocaleString("en")} ms.`;
  const explained = told.attention !== null;
  for (const id of ["controls", "legend", "walk"]) at(id).hidden = !explained;
  at("look-title").textContent = explained ? "Where it looks" : "What it sees";
  if (explained) {
    at("layer").max = told.attention.length;
    at("head").max = told.attention[0].length;
    walk(at("steps"), model, told, picture);
  }
  look();
}

function bar({ name, probability }) {
  const fill = element("div", { className: "fill" });
  fill.style.width = `${probability * 100}%`;
  const track = element("div", { className: "track", ariaHidden: "true" }, fill);
  const words = [element("span", { className: "name" }, name), element("span", { className: "number" }, percent(probability))];
  return element("li", { className: "bar" }, ...words, track);
}

// ---- where it looks

function look() {
  const { told, picture } = state;
  if (!told) return;
  const map = told.attention && chosen();
  overlay(at("overlay"), picture, map, at("strength").value / 100);
  if (!map) {
    at("overlay").setAttribute("aria-label", "The picture as the model sees it.");
    at("look-words").textContent = told.reason;
    return;
  }
  const words = describe(map);
  at("overlay").setAttribute("aria-label", `The picture with ${words}`);
  at("look-words").textContent = words[0].toUpperCase() + words.slice(1);
}

function chosen() {
  const { told } = state;
  const [layer, head] = [Number(at("layer").value), Number(at("head").value)];
  at("head").disabled = layer === 0;
  say("layer", layer === 0 ? "all layers (rollout)" : layerName(layer));
  say("head", layer === 0 || head === 0 ? "mean of heads" : `${head} of ${told.attention[0].length}`);
  say("strength", `${at("strength").value} %`);
  if (layer === 0) return told.rollout;
  return head === 0 ? mean(told.attention[layer - 1]) : told.attention[layer - 1][head - 1];
}

function layerName(layer) {
  const { model, told } = state;
  if (!model.axial) return `${layer} of ${told.attention.length}`;
  return `block ${Math.ceil(layer / 2)}, ${layer % 2 ? "rows" : "columns"}`;
}

function say(id, words) {
  at(`${id}-word`).textContent = words;
  at(id).setAttribute("aria-valuetext", words);
}

// The map in words, for those who do not see it.
function describe(map) {
  const cells = map.flatMap((row, y) => row.map((value, x) => ({ value, x, y }))).sort((a, b) => b.value - a.value);
  const { x, y } = cells[0];
  const tenth = Math.max(1, Math.round(cells.length / 10));
  const held = cells.slice(0, tenth).reduce((sum, cell) => sum + cell.value, 0);
  const most = tenth > 1 ? `the strongest ${tenth} hold` : "it holds";
  const grid = `${map.length} × ${map[0].length} patches`;
  return `the most attention in row ${y + 1}, column ${x + 1} of ${grid}; ${most} ${percent(held)} of it.`;
}

// ---- what people do

for (const id of ["layer", "head", "strength"]) at(id).addEventListener("input", look);
at("file").addEventListener("change", (event) => {
  show(event.target.files[0]);
  event.target.value = ""; // so that the same file can be chosen again
});
at("sample").addEventListener("click", async () => state.model && show(await sample(state.model.image_size)));
at("token").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = at("token-value").value;
  at("token-value").value = "";
  at("error").hidden = true;
  start();
});

let entered = 0; // dragging over a child leaves its parent, so count
addEventListener("dragenter", () => document.body.classList.toggle("dragging", ++entered > 0));
addEventListener("dragleave", () => document.body.classList.toggle("dragging", --entered > 0));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  entered = 0;
  document.body.classList.remove("dragging");
  picked(event.dataTransfer);
});
addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) picked(event.clipboardData);
});

function picked(data) {
  const file = [...data.files].find((one) => one.type.startsWith("image/")) ?? data.files[0];
  if (file) show(file);
  else fail(new Error("That is no file. Drop a picture from a folder, or save it first."));
}

scale(at("scale"));
start();

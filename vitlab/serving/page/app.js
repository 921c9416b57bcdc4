// The page: sends a picture to the server and shows the answer. It stores nothing but the last answer and the token.

import { overlay, scale } from "/page/draw.js";
import { element, percent, shortNumber } from "/page/format.js";
import { sample } from "/page/sample.js";
import { mean, showSteps } from "/page/steps.js";

const at = (id) => document.getElementById(id);
const state = { model: null, token: "", pending: null, answer: null, picture: null };
const SHOWN_CLASSES = 5;

// ---- requests

class Unauthorized extends Error {}

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
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Unauthorized("That is not this server's token.");
  if (!response.ok) throw new Error(capitalize(answer.error || `The server answered with status ${response.status}`));
  return answer;
}

const capitalize = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

async function start() {
  try {
    const health = await ask("/healthz");
    if (health.token && !state.token) return askToken();
    await loadModel();
  } catch (error) {
    fail(error);
  }
}

async function loadModel() {
  const model = await ask("/v1/model");
  state.model = model;
  const size = model.image_size.join(" × ");
  const facts = [model.name, `${shortNumber(model.parameters)} parameters`, `${model.classes.toLocaleString("en")} classes`, `${size} pixels`];
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
  if (error instanceof Unauthorized) {
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
  state.pending?.abort();
  const pending = (state.pending = new AbortController());
  at("error").hidden = true;
  try {
    if (file.size > state.model.max_bytes) {
      throw new Error(`${file.name} has ${shortNumber(file.size)}B; this server takes up to ${shortNumber(state.model.max_bytes)}B.`);
    }
    document.body.classList.add("busy");
    at("status").textContent = `Looking at ${file.name} …`;
    const form = new FormData();
    form.append("image", file, file.name || "pasted picture");
    const start = performance.now();
    const count = state.model.multi_label ? "" : `?top_k=${SHOWN_CLASSES}`; // by default those that it finds
    const answer = await ask(`/v1/explain${count}`, { method: "POST", body: form, signal: pending.signal });
    const picture = await decodePicture(answer.picture);
    if (pending.signal.aborted) return;
    Object.assign(state, { answer, picture });
    showAnswer(Math.round(performance.now() - start));
  } catch (error) {
    if (state.pending === pending) fail(error);
  }
}

function decodePicture(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

function showAnswer(milliseconds) {
  const { model, answer, picture } = state;
  const top = headline(model, answer);
  document.body.classList.remove("busy");
  document.body.classList.add("has-result");
  at("result").hidden = false;
  at("status").textContent = `${answer.name}: ${[top.name, top.number].filter(Boolean).join(", ")}.`;
  at("answer").classList.toggle("refused", answer.refused === true);
  at("nearest").hidden = !answer.refused;
  at("bars").ariaLabel = answer.refused ? "The classes it resembles most" : "The most probable classes";
  at("top-class").textContent = top.name;
  at("top-probability").textContent = top.number;
  at("top-probability").dataset.value = top.probability;
  at("bars").replaceChildren(...answer.classes.map(bar));
  at("footnote").textContent = `${answer.name}, answered in ${milliseconds.toLocaleString("en")} ms.`;
  const explained = answer.attention !== null;
  for (const id of ["controls", "legend", "walk"]) at(id).hidden = !explained;
  at("look-title").textContent = explained ? "Where it looks" : "What it sees";
  if (explained) {
    at("layer").max = answer.attention.length;
    at("head").max = answer.attention[0].length;
    showSteps(at("steps"), model, answer, picture);
  }
  showAttention();
}

// The best class, all that a multi-label model finds, or that it is none of them.
function headline(model, { classes, refused }) {
  const [best] = classes;
  if (refused) return { name: "None of these", probability: 0, number: "" };
  if (!model.multi_label) return { ...best, number: percent(best.probability) };
  const name = classes.map((one) => one.name).join(", ") || "none of its classes";
  return { name, probability: best?.probability ?? 0, number: classes.length === 1 ? percent(best.probability) : "" };
}

function bar({ name, probability }) {
  const fill = element("div", { className: "fill" });
  fill.style.width = `${probability * 100}%`;
  const track = element("div", { className: "track", ariaHidden: "true" }, fill);
  const words = [element("span", { className: "name" }, name), element("span", { className: "number" }, percent(probability))];
  return element("li", { className: "bar" }, ...words, track);
}

// ---- attention

function showAttention() {
  const { answer, picture } = state;
  if (!answer) return;
  const map = answer.attention && selectedMap();
  overlay(at("overlay"), picture, map, at("strength").value / 100);
  if (!map) {
    at("overlay").setAttribute("aria-label", "The picture as the model sees it.");
    at("look-words").textContent = answer.reason;
    return;
  }
  const words = describeMap(map);
  at("overlay").setAttribute("aria-label", `The picture with ${words}`);
  at("look-words").textContent = words[0].toUpperCase() + words.slice(1);
}

function selectedMap() {
  const { answer } = state;
  const [layer, head] = [Number(at("layer").value), Number(at("head").value)];
  at("head").disabled = layer === 0;
  setOutput("layer", layer === 0 ? "all layers (rollout)" : layerName(layer));
  setOutput("head", layer === 0 || head === 0 ? "mean of heads" : `${head} of ${answer.attention[0].length}`);
  setOutput("strength", `${at("strength").value} %`);
  if (layer === 0) return answer.rollout;
  return head === 0 ? mean(answer.attention[layer - 1]) : answer.attention[layer - 1][head - 1];
}

function layerName(layer) {
  const { model, answer } = state;
  if (!model.axial) return `${layer} of ${answer.attention.length}`;
  return `block ${Math.ceil(layer / 2)}, ${layer % 2 ? "rows" : "columns"}`;
}

function setOutput(id, words) {
  at(`${id}-word`).textContent = words;
  at(id).setAttribute("aria-valuetext", words);
}

// The map as text, for screen readers.
function describeMap(map) {
  const cells = map.flatMap((row, y) => row.map((value, x) => ({ value, x, y }))).sort((a, b) => b.value - a.value);
  const { x, y } = cells[0];
  const tenth = Math.max(1, Math.round(cells.length / 10));
  const held = cells.slice(0, tenth).reduce((sum, cell) => sum + cell.value, 0);
  const most = tenth > 1 ? `the strongest ${tenth} hold` : "it holds";
  const grid = `${map.length} × ${map[0].length} patches`;
  return `the most attention in row ${y + 1}, column ${x + 1} of ${grid}; ${most} ${percent(held)} of it.`;
}

// ---- events

for (const id of ["layer", "head", "strength"]) at(id).addEventListener("input", showAttention);
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

let entered = 0; // dragging over a child leaves its parent, so they are counted
addEventListener("dragenter", () => document.body.classList.toggle("dragging", ++entered > 0));
addEventListener("dragleave", () => document.body.classList.toggle("dragging", --entered > 0));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  entered = 0;
  document.body.classList.remove("dragging");
  showFirst(event.dataTransfer);
});
addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) showFirst(event.clipboardData);
});

function showFirst(data) {
  const file = [...data.files].find((one) => one.type.startsWith("image/")) ?? data.files[0];
  if (file) show(file);
  else fail(new Error("That is not a file. Drop a picture from a folder, or save it first."));
}

scale(at("scale"));
start();

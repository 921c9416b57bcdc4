// "Where it looks": the picture beside the map, which is that of a class, or the attention of some layer and head.

import { overlay, photo } from "/page/draw.js";
import { percent } from "/page/format.js";
import { mean } from "/page/steps.js";

const at = (id) => document.getElementById(id);
export const view = { model: null, answer: null, picture: null, map: null, kind: "class" }; // map: of a class, {index, name, values}

export function showPicture({ model, answer, picture }) {
  Object.assign(view, { model, answer, picture, map: answer.map });
  photo(at("photo"), picture);
  const hasAttention = answer.attention !== null;
  at("kinds").hidden = !hasAttention;
  if (!hasAttention) setKind("class");
  else {
    at("layer").max = answer.attention.length;
    at("head").max = answer.attention[0].length;
  }
  draw();
}

export function showClass(map) {
  view.map = map;
  setKind("class");
  draw();
}

export function setKind(kind) {
  view.kind = kind;
  at(`kind-${kind}`).checked = true;
}

export function draw() {
  const { answer, picture, kind } = view;
  if (!answer) return;
  at("attention").hidden = kind !== "attention";
  setOutput("strength", `${at("strength").value} %`);
  const values = kind === "class" ? view.map.values : selectedAttention();
  overlay(at("overlay"), picture, values, at("strength").value / 100, kind === "class");
  const [title, words] = kind === "class" ? classWords(view.map) : attentionWords(values);
  at("map-title").textContent = title;
  at("least").textContent = kind === "class" ? "nothing" : "least";
  at("overlay").setAttribute("aria-label", `${title}. ${words}`);
  at("look-words").textContent = [words, answer.reason].filter(Boolean).join(" ");
}

function selectedAttention() {
  const { answer } = view;
  const [layer, head] = [Number(at("layer").value), Number(at("head").value)];
  at("head").disabled = layer === 0;
  setOutput("layer", layer === 0 ? "all layers (rollout)" : layerName(layer));
  setOutput("head", layer === 0 || head === 0 ? "mean of heads" : `${head} of ${answer.attention[0].length}`);
  if (layer === 0) return answer.rollout;
  return head === 0 ? mean(answer.attention[layer - 1]) : answer.attention[layer - 1][head - 1];
}

function layerName(layer) {
  const { model, answer } = view;
  if (!model.axial) return `${layer} of ${answer.attention.length}`;
  return `block ${Math.ceil(layer / 2)}, ${layer % 2 ? "rows" : "columns"}`;
}

function setOutput(id, words) {
  at(`${id}-word`).textContent = words;
  at(id).setAttribute("aria-valuetext", words);
}

// ---- the map as text, for screen readers too

function classWords({ name, values }) {
  const title = `What speaks for “${name}”`;
  if (!values.flat().some((value) => value > 0)) return [title, "Nothing in this picture speaks for it."];
  const { row, column, grid, share } = strongest(values);
  return [title, `Strongest in row ${row}, column ${column} of ${grid}; ${share}.`];
}

function attentionWords(values) {
  const [layer, head] = [at("layer-word").textContent, at("head-word").textContent];
  const title = Number(at("layer").value) === 0 ? "Attention, all layers (rollout)" : `Attention, layer ${layer}, ${Number(at("head").value) ? "head " : ""}${head}`;
  const { row, column, grid, share } = strongest(values);
  return [title, `Strongest in row ${row}, column ${column} of ${grid}; ${share}. Attention is not about a class: corners and plain areas may glow.`];
}

function strongest(values) {
  const cells = values.flatMap((line, y) => line.map((value, x) => ({ value, x, y }))).sort((a, b) => b.value - a.value);
  const { x, y } = cells[0];
  const tenth = Math.max(1, Math.round(cells.length / 10));
  const held = cells.slice(0, tenth).reduce((sum, cell) => sum + cell.value, 0);
  const share = tenth > 1 ? `the strongest ${tenth} patches hold ${percent(held)} of it` : `that patch holds ${percent(held)} of it`;
  return { row: y + 1, column: x + 1, grid: `${values.length} × ${values[0].length} patches`, share };
}

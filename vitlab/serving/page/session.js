// The pictures of this session, newest first: in the memory of this page, and gone with it.

import { element, percent } from "/page/format.js";

const at = (id) => document.getElementById(id);
const MOST = 200; // pictures that are kept
const MOST_BYTES = 300e6;
const NOTES = { waiting: "waiting", refused: "None of these", nothing: "none of its classes" };

export const pictures = [];

// file: what is sent; source: what was chosen; truth: the class, of a sample; answer: of /v1/predict or /v1/explain
export function add(sources, truth, choose) {
  const added = sources.map((source) => ({ source, name: source.name || "pasted picture", truth, file: null, thumb: null, answer: null, explanation: null, maps: new Map(), error: null }));
  for (const one of added) one.item = item(one, choose);
  pictures.unshift(...added);
  let bytes = 0;
  const kept = pictures.findIndex((one, i) => i >= MOST || (bytes += one.source.size) > MOST_BYTES);
  if (kept > 0) forget(kept);
  at("session-list").prepend(...added.filter((one) => pictures.includes(one)).map((one) => one.item));
  return added;
}

// Forget the pictures from a place on: by default, all.
export function forget(from = 0) {
  for (const one of pictures.splice(from)) one.item.remove();
}

// Show what is known by now. Elements stay the same ones, so that the keyboard's focus stays where it is.
export function refresh(current) {
  at("session").hidden = pictures.length < 2;
  at("session-count").textContent = summary();
  for (const one of pictures) update(one, one === current);
}

function summary() {
  const failed = pictures.filter((one) => one.error).length;
  const waiting = pictures.filter((one) => !one.error && !one.answer).length;
  const parts = [`${pictures.length} pictures`, waiting && `${waiting} waiting`, failed && `${failed} failed`];
  return parts.filter(Boolean).join(", ");
}

function item(one, choose) {
  const parts = ["frame", "name", "number", "file"].map((className) => element("span", { className }));
  parts[0].ariaHidden = "true";
  const button = element("button", { type: "button", className: "picture" }, ...parts);
  button.addEventListener("click", () => choose(one));
  return element("li", {}, button);
}

function update(one, isCurrent) {
  const button = one.item.firstChild;
  const [frame, name, number, file] = button.children;
  if (one.thumb && !frame.firstChild) frame.append(one.thumb);
  [name.textContent, number.textContent] = guess(one);
  file.textContent = one.name;
  button.classList.toggle("failed", one.error !== null);
  if (isCurrent) button.setAttribute("aria-current", "true");
  else button.removeAttribute("aria-current");
}

function guess({ answer, error }) {
  if (error) return [error, ""];
  if (!answer) return [NOTES.waiting, ""];
  if (answer.refused) return [NOTES.refused, ""];
  const [best] = answer.classes;
  return best ? [best.name, percent(best.probability)] : [NOTES.nothing, ""];
}

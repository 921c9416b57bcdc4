// The page: sends pictures to the server and shows the answers. What it knows is in its memory, and gone with it.

import { offerCamera } from "/page/camera.js";
import { correct, offerCorrection } from "/page/corrections.js";
import { scale } from "/page/draw.js";
import { element, percent, shortNumber } from "/page/format.js";
import * as look from "/page/look.js";
import { fromBase64, prepare } from "/page/pictures.js";
import { drawSample, drawnSample } from "/page/sample.js";
import { ask, hasToken, send, setToken, Unauthorized } from "/page/server.js";
import * as session from "/page/session.js";
import { showSnippets } from "/page/snippets.js";
import { showSteps } from "/page/steps.js";

const at = (id) => document.getElementById(id);
const state = { model: null, classes: [], current: null, pending: null };
const SHOWN_CLASSES = 5;
const AT_ONCE = 4; // requests at one time for many pictures; the server makes batches of them

// ---- the model

async function start() {
  try {
    const health = await ask("/healthz");
    if (health.token && !hasToken()) return askToken();
    await loadModel(health.token);
  } catch (error) {
    fail(error);
  }
}

async function loadModel(needsToken) {
  const [model, { classes }] = await Promise.all([ask("/v1/model"), ask("/v1/classes")]);
  Object.assign(state, { model, classes });
  const size = model.image_size.join(" × ");
  const facts = [model.name, `${shortNumber(model.parameters)} parameters`, `${model.classes.toLocaleString("en")} classes`, `${size} pixels`];
  at("model").textContent = facts.join(" · ");
  document.title = `${model.name} · vitlab`;
  at("token").hidden = true;
  at("ask").hidden = false;
  at("report").hidden = model.report === null;
  if (model.report) at("report").href = model.report;
  if (model.corrections) at("stored").textContent = "Pictures are sent to this server, and stored there only if you correct an answer.";
  for (const id of ["other-class", "right-class"]) at(id).replaceChildren(option("", "Choose …"), ...classes.map((name, i) => option(i, name)));
  showSnippets(at("snippets"), location.origin, needsToken);
  await offerSamples();
}

const option = (value, name) => element("option", { value }, name);

async function offerSamples() {
  const { samples } = state.model.samples ? await ask("/v1/samples") : { samples: [] };
  const drawn = samples.length ? null : drawnSample(state.classes);
  at("sample").hidden = !drawn;
  at("samples").hidden = !samples.length;
  if (drawn) at("sample").onclick = async () => show([await drawSample(drawn)], drawn.label);
  at("sample-list").replaceChildren(...(await Promise.all(samples.map(sampleButton))));
}

async function sampleButton({ label, kind, data }) {
  const file = fromBase64(data, kind, `${label}.${kind === "png" ? "png" : "jpg"}`);
  const { thumb } = await prepare(file, state.model);
  const frame = element("span", { className: "frame", ariaHidden: "true" }, ...(thumb ? [thumb] : []));
  const button = element("button", { type: "button", className: "picture" }, frame, element("span", { className: "name" }, label));
  button.addEventListener("click", () => show([file], label));
  return element("li", {}, button);
}

function askToken() {
  at("token").hidden = false;
  at("ask").hidden = true;
  at("token-value").focus();
}

// A picture without an answer: the one on the page would be taken for it.
function fail(error) {
  hideAnswer();
  complain(error);
}

function hideAnswer() {
  document.body.classList.remove("has-result");
  at("result").hidden = true;
}

function complain(error) {
  document.body.classList.remove("busy");
  if (error instanceof Unauthorized) {
    setToken("");
    askToken();
  }
  at("status").textContent = "";
  at("error").textContent = error.message;
  at("error").hidden = false;
}

// ---- pictures: the first one is shown, the others are answered meanwhile and listed

async function show(files, truth = null) {
  if (!files.length || !state.model) return;
  const [first, ...others] = session.add(files, truth, choose);
  const shown = choose(first);
  const waiting = others.values();
  const worker = async () => {
    for (const one of waiting) await predict(one);
  };
  await Promise.all([shown, ...Array.from({ length: AT_ONCE }, worker)]);
}

async function choose(one) {
  state.pending?.abort();
  const pending = (state.pending = new AbortController());
  state.current = one;
  at("error").hidden = true;
  const start = performance.now();
  try {
    document.body.classList.add("busy");
    at("status").textContent = `Looking at ${one.name} …`;
    refreshSession();
    if (!one.explanation) {
      await ready(one);
      one.explanation = await send(`/v1/explain${count()}`, one.file, { signal: pending.signal });
      one.answer = one.explanation;
      one.maps.set(one.answer.map.index, one.answer.map);
      one.seconds = (performance.now() - start) / 1000;
    }
    const picture = await createImageBitmap(fromBase64(one.explanation.picture, "png", one.name));
    if (!pending.signal.aborted) showAnswer(one, picture);
  } catch (error) {
    if (error.name === "AbortError") return predict(one); // another one is shown by now
    one.error = error.message;
    if (state.pending === pending) fail(error);
  }
  refreshSession();
}

async function predict(one) {
  if (one.answer || !session.pictures.includes(one)) return;
  try {
    await ready(one);
    refreshSession();
    const { images } = await send(`/v1/predict${count()}`, one.file);
    one.answer ??= images[0];
  } catch (error) {
    one.error = error.message;
  }
  refreshSession();
}

async function ready(one) {
  one.error = null;
  if (!one.file) Object.assign(one, await prepare(one.source, state.model));
  one.source = one.file; // the large original may go
}

const count = () => (state.model.multi_label ? "" : `?top_k=${SHOWN_CLASSES}`); // by default those that it finds
const refreshSession = () => session.refresh(state.current);

// ---- the answer

function showAnswer(one, picture) {
  const { model, classes } = state;
  const answer = one.explanation;
  const top = headline(model, answer);
  document.body.classList.remove("busy");
  document.body.classList.add("has-result");
  at("result").hidden = false;
  at("status").textContent = `${one.name}: ${[top.name, top.number].filter(Boolean).join(", ")}.`;
  at("answer").classList.toggle("refused", answer.refused === true);
  at("nearest").hidden = !answer.refused;
  at("bars").ariaLabel = answer.refused ? "The classes it resembles most" : "The most probable classes";
  at("top-class").textContent = top.name;
  at("top-probability").textContent = top.number;
  at("top-probability").dataset.value = top.probability;
  at("bars").replaceChildren(...answer.classes.map(bar));
  at("other").hidden = answer.classes.length === classes.length;
  at("footnote").textContent = footnote(one);
  at("walk").hidden = answer.attention === null;
  if (answer.attention) showSteps(at("steps"), model, answer, picture);
  offerCorrection(model, one);
  look.showPicture({ model, answer, picture });
  markClass();
}

// The best class, all that a multi-label model finds, or that it is none of them.
function headline(model, { classes, refused }) {
  const [best] = classes;
  if (refused) return { name: "None of these", probability: 0, number: "" };
  if (!model.multi_label) return { ...best, number: percent(best.probability) };
  const name = classes.map((one) => one.name).join(", ") || "none of its classes";
  return { name, probability: best?.probability ?? 0, number: classes.length === 1 ? percent(best.probability) : "" };
}

function footnote(one) {
  const known = one.truth === null ? "" : ` Its class in the data: ${one.truth}.`;
  return `${one.name}, answered in ${one.seconds.toFixed(2)} s.${known}`;
}

function bar({ index, name, probability }) {
  const fill = element("span", { className: "fill" });
  fill.style.width = `${probability * 100}%`;
  const track = element("span", { className: "track", ariaHidden: "true" }, fill);
  const words = [element("span", { className: "name" }, name), element("span", { className: "number" }, percent(probability))];
  const button = element("button", { type: "button", className: "bar" }, ...words, track);
  button.dataset.index = index;
  button.addEventListener("click", () => showMap(index));
  return element("li", {}, button);
}

// ---- the map of a class

async function showMap(index) {
  const one = state.current;
  try {
    if (!one.maps.has(index)) {
      document.body.classList.add("busy");
      at("status").textContent = `Looking for what speaks for ${state.classes[index]} …`;
      const { map } = await send(`/v1/map?label=${index}`, one.file);
      one.maps.set(index, map);
    }
    if (one !== state.current) return;
    document.body.classList.remove("busy");
    look.showClass(one.maps.get(index));
    markClass();
    at("status").textContent = `${at("map-title").textContent}. ${at("look-words").textContent}`;
  } catch (error) {
    if (one === state.current) complain(error);
  }
}

// Which class the map is of; none while it shows attention.
function markClass() {
  const shown = look.view.kind === "class" ? look.view.map.index : null;
  const bars = [...document.querySelectorAll("#bars .bar")];
  for (const button of bars) button.setAttribute("aria-pressed", Number(button.dataset.index) === shown);
  const isListed = shown === null || bars.some((button) => Number(button.dataset.index) === shown);
  at("other-class").value = isListed ? "" : shown;
}

// ---- events

for (const id of ["layer", "head", "strength"]) at(id).addEventListener("input", look.draw);
for (const kind of ["class", "attention"]) {
  at(`kind-${kind}`).addEventListener("change", () => {
    look.setKind(kind);
    look.draw();
    markClass();
  });
}
at("larger").addEventListener("click", ({ target }) => {
  target.setAttribute("aria-pressed", at("pair").classList.toggle("stacked"));
});
at("other-class").addEventListener("change", ({ target }) => target.value !== "" && showMap(Number(target.value)));
at("correct-form").addEventListener("submit", (event) => {
  event.preventDefault();
  correct(state.classes);
});
at("file").addEventListener("change", ({ target }) => {
  show([...target.files]);
  target.value = ""; // so that the same file can be chosen again
});
at("forget").addEventListener("click", () => {
  session.forget();
  state.pending?.abort();
  state.current = null;
  hideAnswer();
  document.body.classList.remove("busy");
  at("error").hidden = true;
  at("status").textContent = "This page has forgotten them.";
  refreshSession();
  at("file").focus();
});
at("token").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(at("token-value").value);
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
  showData(event.dataTransfer);
});
addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) showData(event.clipboardData);
});

// The pictures of what was dropped or pasted; browsers give no type to some, and a single file is sent in any case.
function showData({ files }) {
  const pictures = [...files].filter((one) => one.type === "" || one.type.startsWith("image/"));
  if (files.length) show(pictures.length ? pictures : [files[0]]);
  else complain(new Error("That is not a file. Drop a picture from a folder, or save it first."));
}

scale(at("scale"));
offerCamera((file) => show([file]), complain);
start();

// The five steps from pixels to classes, each with a drawing of this picture's numbers and a short text.

import { colors, heat, patches } from "/page/draw.js";
import { element, percent } from "/page/format.js";

export function showSteps(list, model, answer, picture) {
  const steps = [cut(model, picture), tokens(model, answer), positions(model, answer), depths(model, answer), classes(model, answer)];
  list.replaceChildren(...steps.map((step, i) => card(i + 1, step)));
}

function card(number, { title, words, shape, shown, wide, label }) {
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", label);
  if (shown instanceof HTMLCanvasElement) shown.classList.add("one");
  const head = element("h3", {}, title);
  head.dataset.number = number;
  const paragraphs = [...words.map((text) => element("p", {}, text)), element("p", { className: "shape" }, shape)];
  const text = element("div", { className: "words" }, ...paragraphs);
  const parts = wide ? [text, shown] : [shown, text];
  return element("li", { className: wide ? "card step wide" : "card step" }, head, ...parts);
}

// ---- 1

function cut(model, picture) {
  const [h, w] = model.grid;
  const [height, width] = model.image_size;
  const stem = model.stem ? "A small convolutional network reduces the picture to a feature map first; the patches are cut from that map. " : "";
  const inside = model.stem ? "" : ` → ${h * w} patches × ${model.patch * model.patch * 3} numbers`;
  return {
    title: "The picture is cut into patches",
    words: [
      `${stem}To the model a picture is a sequence of patches: ${h} rows of ${w}, ${h * w} in all, each ${model.patch} × ${model.patch} pixels. ` +
        "It has to learn which of them belong together.",
    ],
    shape: `${height} × ${width} pixels × 3 colors${inside}`,
    shown: patches(picture, h, w),
    label: `The picture, cut into ${h} rows of ${w} patches.`,
  };
}

// ---- 2

function tokens(model, answer) {
  const [h, w] = model.grid;
  return {
    title: "Each patch becomes a token",
    words: [
      `One matrix, the same for all patches, turns each of them into a token: a list of ${model.width} numbers. ` +
        "Here every list is shown as one color, so patches that are similar to the model have similar colors.",
    ],
    shape: `${h * w} tokens × ${model.width} numbers`,
    shown: colors(answer.steps.tokens),
    label: "The tokens as a grid of colors: similar colors mean similar tokens.",
  };
}

// ---- 3

const POSITIONS = {
  "1d": "So a learned position is added to each token. The model was not given the grid; where the colors change smoothly, it has learned it.",
  "2d": "So a learned row and a learned column are added to each token.",
  sincos2d: "So a fixed pattern of waves along rows and columns is added to each token.",
  sinusoidal: "So a fixed pattern of waves is added to each token, a different one for every position.",
  relative: "This model adds nothing to the tokens; instead the attention of each layer depends on how far apart any two of them are.",
  none: "This model gets no positions: it sees a set of patches without an order.",
};

function positions(model, answer) {
  const [h, w] = model.grid;
  const only = model.rotary && model.positions === "none";
  const added = only ? "" : ` ${POSITIONS[model.positions]}`;
  const words = [`A list of tokens has no left and right, no above and below.${added}`];
  if (model.rotary) words.push(ROTARY);
  if (model.class_token) words.push(`One more token goes in front: the class token. It has no patch of its own${use(model)}.`);
  if (model.registers) words.push(REGISTERS(model.registers));
  const extra = Number(model.class_token) + model.registers;
  const grid = answer.steps.positions;
  return {
    title: "Each token gets its position",
    words,
    shape: `${h * w}${extra ? ` + ${extra}` : ""} tokens × ${model.width} numbers`,
    shown: grid ? colors(grid) : nothing("no positions are added here"),
    label: grid ? "The positions as a grid of colors: similar colors mean similar positions." : "No positions are added.",
  };
}

const ROTARY = "In every layer a token's queries and keys are turned by angles that grow with its row and column, so attention knows how far apart two patches are.";
const REGISTERS = (count) =>
  count === 1
    ? "A register goes in front too: a token without a patch, in which the model keeps notes of its own."
    : `${count} registers go in front too: tokens without a patch, in which the model keeps notes of its own.`;

const seesToken = (model) => model.pool === "token" || model.pool === "token_mean";
const use = (model) => (seesToken(model) ? "; it collects what the answer needs" : ", and the answer does not use it directly");

const nothing = (text) => element("p", { className: "small" }, text);

// ---- 4

function depths(model, answer) {
  const blocks = answer.steps.depths.length;
  const each = answer.attention.length / blocks; // two attention maps a block where rows and columns take turns
  const who = seesToken(model) ? "the class token looks" : "the tokens look, on average";
  const list = element("div", { className: "depths" });
  answer.steps.depths.forEach((grid, block) => {
    const maps = answer.attention.slice(block * each, (block + 1) * each).flat();
    list.append(element("div", {}, heat(mean(maps)), colors(grid), ...cells(model, answer, block, each), element("span", {}, `${block + 1}`)));
  });
  return {
    title: `${blocks} times over, the tokens look at each other`,
    words: [
      `In each of ${blocks} layers every token looks at all others (attention) and is then transformed on its own by an MLP. ` +
        `Above: where ${who} in that layer, yellow for most. Below: the tokens after it, as colors. At first they show what ` +
        "is in a patch; later, what the patch is part of.",
      ...(model.registers ? [`The small cells are no patches: ${named(model)}; pointing at one shows how much of the attention goes to it.`] : []),
    ],
    shape: `${blocks} layers × ${model.heads} heads, each a table of which token looks at which`,
    shown: list,
    label: `For each of ${blocks} layers, a map of the attention and the tokens as colors.`,
    wide: true,
  };
}

const MOST_CELLS = 9;

// The class token and the registers after a block: a cell each, in the colors of the patches.
function cells(model, answer, block, each) {
  if (!model.registers) return [];
  const row = element("div", { className: "cells" });
  const shares = answer.steps.prefix_attention[(block + 1) * each - 1];
  answer.steps.prefix[block].slice(0, MOST_CELLS).forEach(([red, green, blue], i) => {
    const name = model.class_token && i === 0 ? "class token" : `register ${i + 1 - Number(model.class_token)}`;
    const swatch = element("i", {});
    swatch.style.backgroundColor = `rgb(${red}, ${green}, ${blue})`;
    row.append(element("span", { title: `${name}: ${percent(shares[i])} of the attention` }, swatch, name[0].toUpperCase()));
  });
  return [row];
}

function named(model) {
  const registers = model.registers === 1 ? "R a register" : `R the ${model.registers} registers`;
  return model.class_token ? `C is the class token, ${registers}` : registers;
}

export function mean(maps) {
  return maps[0].map((row, y) => row.map((_, x) => maps.reduce((sum, map) => sum + map[y][x], 0) / maps.length));
}

// ---- 5

// The classes share 100 % among them whatever the picture is, so its distance from the training pictures counts too.
function refusal({ refused, distance }) {
  if (!refused) return "";
  const far = `its distance from the training pictures is ${distance.toFixed(1)}, where 1 is the limit`;
  return ` But these are shares among its own classes, and ${far}: the answer is none of these.`;
}

function classes(model, answer) {
  const who = { token: "The class token", mean: "The mean of all tokens", attention: "A last look at all tokens", token_mean: "The class token, with the mean of all patches," }[model.pool];
  const top = model.multi_label ? answer.classes : answer.classes.slice(0, 3);
  const rest = Math.max(0, 1 - top.reduce((sum, one) => sum + one.probability, 0));
  // probabilities of their own do not add up to one: a bar for each
  const bars = element("div", { className: "bars" });
  for (const row of model.multi_label ? top.map((one) => [one]) : [top]) bars.append(shares(row));
  const others = model.classes - top.length;
  const left = others > 0 ? ` The other ${others.toLocaleString("en")} have ${percent(rest)} together.` : "";
  const named = top.map((one) => `“${one.name}” ${percent(one.probability)}`).join(", ");
  const become = model.multi_label
    ? `each becomes a probability of its own. Those that reach the class's threshold: ${named || "none"}.`
    : `the scores become probabilities: ${named}.${left}${refusal(answer)}`;
  return {
    title: `${who} answers`,
    words: [
      `One last matrix makes a score for each of the ${model.classes.toLocaleString("en")} classes, and ${become}`,
    ],
    shape: `${model.features} numbers → ${model.classes.toLocaleString("en")} scores`,
    shown: bars,
    label: model.multi_label
      ? "A bar for each class found, as long as its probability."
      : "A bar divided among the classes by their probabilities.",
    wide: true,
  };
}

// A bar divided by the probabilities of some classes.
function shares(row) {
  const bar = element("div", { className: "shares" });
  for (const one of row) {
    const part = element("span", {});
    part.style.width = `${one.probability * 100}%`;
    bar.append(part);
  }
  return bar;
}

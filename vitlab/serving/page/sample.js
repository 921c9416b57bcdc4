// A picture to try where a run has none of its own, drawn here: a digit for models of digits, a daisy for those that
// know daisies. For other models there is none: whatever they said of it would be wrong.

import { toFile } from "/page/pictures.js";

const DIGITS = [...Array(10).keys()].map(String);

// The drawing and its class; null where this model knows neither.
export function drawnSample(classes) {
  if (DIGITS.every((name) => classes.includes(name)) && classes.length === 10) return { draw: digit, label: "3" };
  const label = classes.find((name) => name.toLowerCase() === "daisy");
  return label ? { draw: daisy, label } : null;
}

export function drawSample({ draw, label }) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 448;
  draw(canvas.getContext("2d"));
  return toFile(canvas, `${label}.png`, "png");
}

function digit(context) {
  context.fillStyle = "#000";
  context.fillRect(0, 0, 448, 448);
  context.strokeStyle = "#fff";
  context.lineWidth = 62;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  context.arc(205, 135, 84, Math.PI * 1.15, Math.PI * 2.5);
  context.arc(205, 311, 92, Math.PI * 1.5, Math.PI * 2.85);
  context.stroke();
}

function daisy(context) {
  const meadow = context.createLinearGradient(0, 0, 448, 448);
  meadow.addColorStop(0, "#6d9a3c");
  meadow.addColorStop(1, "#2f5a1e");
  context.fillStyle = meadow;
  context.fillRect(0, 0, 448, 448);
  for (let i = 0; i < 240; i++) blade(context, i);
  context.strokeStyle = "#7fae4a";
  context.lineWidth = 13;
  context.beginPath();
  context.moveTo(222, 230);
  context.quadraticCurveTo(248, 350, 226, 460);
  context.stroke();
  for (let ring = 0; ring < 2; ring++) {
    for (let i = 0; i < 17; i++) petal(context, ((i + ring / 2) / 17) * 2 * Math.PI, ring);
  }
  heart(context);
}

// Numbers that look random and are the same every time.
const noise = (i) => Math.abs(Math.sin(i * 127.1) * 43758.5453) % 1;

function blade(context, i) {
  const [x, y] = [noise(i) * 448, noise(i + 500) * 500];
  context.strokeStyle = noise(i + 900) < 0.5 ? "rgb(140 180 80 / 35%)" : "rgb(25 60 20 / 35%)";
  context.lineWidth = 2 + 3 * noise(i + 70);
  context.beginPath();
  context.moveTo(x, y);
  context.quadraticCurveTo(x + 8, y - 30, x + 30 * (noise(i + 33) - 0.5), y - 70);
  context.stroke();
}

function petal(context, angle, ring) {
  context.save();
  context.translate(222, 205);
  context.rotate(angle + 0.05 * Math.sin(angle * 5));
  const shade = context.createLinearGradient(40, 0, 165, 0);
  shade.addColorStop(0, ring ? "#e9e8f0" : "#cfcfdd");
  shade.addColorStop(1, ring ? "#ffffff" : "#efeff5");
  context.fillStyle = shade;
  context.strokeStyle = "rgb(120 120 150 / 45%)";
  context.beginPath();
  context.ellipse(100 - 4 * ring, 0, 66, 17, 0, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
  context.restore();
}

function heart(context) {
  const glow = context.createRadialGradient(212, 192, 8, 222, 205, 52);
  glow.addColorStop(0, "#ffd84a");
  glow.addColorStop(1, "#d18b0f");
  context.fillStyle = glow;
  context.beginPath();
  context.arc(222, 205, 48, 0, 2 * Math.PI);
  context.fill();
  for (let i = 1; i < 200; i++) {
    const [angle, far] = [i * 2.39996, 3.3 * Math.sqrt(i)];
    context.fillStyle = i % 2 ? "rgb(150 90 0 / 45%)" : "rgb(255 235 140 / 60%)";
    context.fillRect(221 + far * Math.cos(angle), 204 + far * Math.sin(angle), 2.4, 2.4);
  }
}

"use strict";
// The page works without this script, but for the filter, the photos of a cell and the cues for scrolling.

const all = (what, where = document) => [...where.querySelectorAll(what)];
const STEP = 24; // photos that are shown at first, and added by "Show more"

// ---- wide tables: shades where there is more to see

for (const box of all(".wide")) {
  const update = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.parentElement.classList.toggle("before", box.scrollLeft > 3);
    box.parentElement.classList.toggle("after", hidden - box.scrollLeft > 3);
    if (hidden > 3) box.tabIndex = 0; // the arrow keys scroll it
    else box.removeAttribute("tabindex");
  };
  box.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(box);
  update();
}

// ---- the photos of a cell of the matrix

const dialog = document.getElementById("cell");
const named = (number) => dialog.querySelector(`option[value="${number}"]`)?.textContent ?? number;

function openCell({ truth, guess, count, images }) {
  const photos = all(`.photo[data-truth="${truth}"][data-guess="${guess}"]`);
  const [title, about, grid] = ["h2", ".about", ".photos"].map((what) => dialog.querySelector(what));
  title.textContent = truth === guess ? `${named(truth)}, found` : `${named(truth)} taken for ${named(guess)}`;
  about.textContent = `${count} of ${images}`;
  if (photos.length < Number(count)) about.textContent += `; ${photos.length} of these are in this file`;
  grid.replaceChildren(...photos.map((photo) => Object.assign(photo.cloneNode(true), { hidden: false })));
  dialog.showModal();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-truth]");
  if (button) openCell(button.dataset);
  if (event.target === dialog) dialog.close(); // beside the window
});

// ---- the matrix is one stop of the Tab key; arrow keys move inside it

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

for (const table of all("table.matrix")) {
  const rows = all("tbody tr", table).map((row) => all("td", row).map((cell) => cell.querySelector("button")));
  const buttons = rows.flat().filter(Boolean);
  const choose = (button) => buttons.forEach((other) => (other.tabIndex = other === button ? 0 : -1));
  choose(buttons.find((button) => button.dataset.truth !== button.dataset.guess) ?? buttons[0]);
  table.addEventListener("keydown", (event) => {
    const move = ARROWS[event.key];
    let y = rows.findIndex((row) => row.includes(event.target));
    if (!move || y < 0) return;
    let x = rows[y].indexOf(event.target);
    do {
      y += move[0];
      x += move[1];
    } while (rows[y] && x >= 0 && x < rows[y].length && !rows[y][x]);
    event.preventDefault();
    rows[y]?.[x]?.focus();
  });
  table.addEventListener("focusin", (event) => {
    if (buttons.includes(event.target)) choose(event.target);
  });
}

// ---- the filter of the mistakes

const form = document.getElementById("filter");
if (form) {
  const photos = all("#wrong .photo");
  const texts = photos.map((photo) => [...all("b", photo).map((b) => b.textContent), photo.title].join(" ").toLowerCase());
  const more = document.getElementById("more");
  let limit = STEP;
  const update = () => {
    const { truth, guess, sure, text } = Object.fromEntries(new FormData(form));
    const [low, high] = sure.split(" ").map(Number);
    const words = text.toLowerCase().split(/\s+/);
    const found = photos.filter(
      ({ dataset }, i) =>
        (!truth || dataset.truth === truth) &&
        (!guess || dataset.guess === guess) &&
        Number(dataset.sure) >= low &&
        Number(dataset.sure) < high &&
        words.every((word) => texts[i].includes(word)),
    );
    const shown = new Set(found.slice(0, limit));
    photos.forEach((photo) => (photo.hidden = !shown.has(photo)));
    more.hidden = found.length <= limit;
    form.querySelector("output").textContent = `${found.length.toLocaleString("en")} of ${photos.length.toLocaleString("en")}`;
  };
  const restart = () => {
    limit = STEP;
    update();
  };
  form.hidden = false;
  form.addEventListener("input", restart);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(restart)); // after the fields are empty
  more.addEventListener("click", () => {
    const next = photos.filter((photo) => !photo.hidden).length;
    limit += STEP;
    update();
    photos.filter((photo) => !photo.hidden)[next]?.focus({ preventScroll: true });
  });
  update();
}

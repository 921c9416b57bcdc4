// "Wrong? Correct it": a picture is stored on the server under its right class, where the server allows that.

import { send } from "/page/server.js";

const at = (id) => document.getElementById(id);
const CALLER = { "X-Requested-With": "vitlab" }; // which no page of another site may send
let current = null;

export function offerCorrection(model, picture) {
  current = picture;
  at("correct").hidden = !model.corrections;
  at("correct").open = false;
  at("right-class").value = "";
  at("correct-result").textContent = picture.corrected ? `Stored as “${picture.corrected}”.` : "";
}

export async function correct(classes) {
  const picture = current;
  const label = Number(at("right-class").value);
  if (!picture || at("right-class").value === "") return;
  const say = (words) => picture === current && (at("correct-result").textContent = words);
  say("Storing it …");
  try {
    await send(`/v1/corrections?label=${label}`, picture.file, { headers: CALLER });
    picture.corrected = classes[label];
    say(`Stored as “${classes[label]}”.`);
  } catch (error) {
    say(`It is not stored. ${error.message}`);
  }
}

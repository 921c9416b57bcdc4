// How a program asks this server, in three languages, with its own address.

import { element } from "/page/format.js";

export function showSnippets(list, origin, needsToken) {
  list.replaceChildren(...Object.entries(snippets(origin, needsToken)).map(([name, code]) => snippet(name, code)));
}

function snippets(origin, needsToken) {
  const bearer = "Bearer TOKEN";
  return {
    curl: `curl ${needsToken ? `-H "Authorization: ${bearer}" ` : ""}-F image=@photo.jpg ${origin}/v1/predict`,
    Python: [
      "import httpx",
      "",
      'with open("photo.jpg", "rb") as photo:',
      `    answer = httpx.post("${origin}/v1/predict", files={"image": photo}${needsToken ? `, headers={"Authorization": "${bearer}"}` : ""})`,
      'for one in answer.json()["images"][0]["classes"]:',
      '    print(one["name"], one["probability"])',
    ].join("\n"),
    JavaScript: [
      'import { openAsBlob } from "node:fs";',
      "",
      "const form = new FormData();",
      'form.append("image", await openAsBlob("photo.jpg"), "photo.jpg");',
      `const options = { method: "POST", body: form${needsToken ? `, headers: { Authorization: "${bearer}" }` : ""} };`,
      `const answer = await fetch("${origin}/v1/predict", options);`,
      "console.log((await answer.json()).images[0].classes);",
    ].join("\n"),
  };
}

function snippet(name, code) {
  const shown = element("pre", { tabIndex: 0, ariaLabel: `${name} example` }, element("code", {}, code));
  shown.setAttribute("role", "region");
  const head = element("div", { className: "snippet-head" }, element("h3", {}, name));
  if (navigator.clipboard) head.append(copyButton(name, code));
  return element("div", { className: "snippet" }, head, shown);
}

function copyButton(name, code) {
  const button = element("button", { type: "button", className: "quiet small-button", ariaLabel: `Copy the ${name} example` }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

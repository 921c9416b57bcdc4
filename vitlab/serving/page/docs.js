// The description of the API, listed from openapi.json.

import { element } from "/page/words.js";

const described = await (await fetch("/openapi.json")).json();

function route(path, verb, { summary, parameters = [], requestBody, responses }) {
  const title = element("h2", {}, element("code", {}, element("span", { className: "verb" }, verb.toUpperCase()), ` ${path}`));
  const card = element("section", { className: "card route" }, title, element("p", {}, summary));
  card.append(element("code", { className: "example" }, example(path, requestBody)));
  const list = element("dl", {});
  for (const one of parameters) add(list, `?${one.name}`, `${one.schema.type}, ${one.schema.default} unless told. ${one.description ?? ""}`);
  if (requestBody) {
    const most = requestBody.content["multipart/form-data"].schema.properties.image.maxItems;
    add(list, "body", most > 1 ? `a form with up to ${most} fields called image, or one image as it is` : "a form with one field called image, or the image as it is");
  }
  for (const [status, one] of Object.entries(responses)) add(list, status, one.description);
  card.append(list);
  return card;
}

function add(list, term, words) {
  list.append(element("dt", {}, term), element("dd", {}, words));
}

const example = (path, takesBody) => `curl ${takesBody ? "-F image=@photo.jpg " : ""}${location.origin}${path}`;

for (const [path, verbs] of Object.entries(described.paths)) {
  for (const [verb, about] of Object.entries(verbs)) document.getElementById("routes").append(route(path, verb, about));
}

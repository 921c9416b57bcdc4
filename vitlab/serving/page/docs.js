// The description of the API, listed from openapi.json.

import { element } from "/page/format.js";

const description = await (await fetch("/openapi.json")).json();

function route(path, verb, { summary, parameters = [], requestBody, responses }) {
  const title = element("h2", {}, element("code", {}, element("span", { className: "verb" }, verb.toUpperCase()), ` ${path}`));
  const card = element("section", { className: "card route" }, title, element("p", {}, summary));
  card.append(element("code", { className: "example", tabIndex: 0 }, example(path, requestBody, parameters)));
  const list = element("dl", {});
  for (const one of parameters) addEntry(list, one.in === "query" ? `?${one.name}` : one.name, `${about(one)} ${one.description ?? ""}`);
  if (requestBody) {
    const most = requestBody.content["multipart/form-data"].schema.properties.image.maxItems;
    addEntry(list, "body", most > 1 ? `a form with up to ${most} fields called image, or one image as the body` : "a form with one field called image, or the image as the body");
  }
  for (const [status, one] of Object.entries(responses)) addEntry(list, status, one.description);
  card.append(list);
  return card;
}

function addEntry(list, term, text) {
  list.append(element("dt", {}, term), element("dd", {}, text));
}

function about({ schema, required }) {
  const { type, enum: values } = schema.anyOf?.[0] ?? schema;
  return `${values ?? schema.enum ?? type}${required ? ", required" : ""}.`;
}

function example(path, takesBody, parameters) {
  const headers = parameters.filter((one) => one.in === "header").map((one) => `-H "${one.name}: ${one.schema.enum}" `);
  const query = parameters.filter((one) => one.in === "query" && one.required).map((one) => `?${one.name}=0`);
  return `curl ${headers.join("")}${takesBody ? "-F image=@photo.jpg " : ""}${location.origin}${path}${query.join("")}`;
}

for (const [path, verbs] of Object.entries(description.paths)) {
  for (const [verb, about] of Object.entries(verbs)) document.getElementById("routes").append(route(path, verb, about));
}

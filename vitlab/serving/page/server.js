// Requests to this server, with its token where it has one. Nothing is ever sent elsewhere.

export class Unauthorized extends Error {}

let token = "";

export const setToken = (value) => (token = value);
export const hasToken = () => token !== "";

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Unauthorized("That is not this server's token.");
  if (!response.ok) throw new Error(capitalize(answer.error || `The server answered with status ${response.status}`));
  return answer;
}

const capitalize = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

export function send(path, file, options = {}) {
  const form = new FormData();
  form.append("image", file, file.name || "pasted picture");
  return ask(path, { method: "POST", body: form, ...options });
}

// Pictures before they are sent: large ones are made smaller here, so that a phone does not upload 12 megapixels.

import { shortNumber } from "/page/format.js";

const SIDE = 1600; // pixels of the longer side; larger pictures are sent at this size
const PER_MODEL = 4; // or this many times the model's, if that is more
const QUALITY = 0.92;
const THUMB = 128; // pixels of the longer side
const KNOWN = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/avif"]; // that the server reads
const OPAQUE = ["image/jpeg", "image/heic", "image/heif", "image/bmp"];

// The file to send and a thumbnail. What this browser cannot decode, HEIC for instance, is sent as it is: the server
// may know it, and else its answer says what to do.
export async function prepare(file, model) {
  let bitmap = null;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" }); // upright
  } catch {
    if (file.size <= model.max_bytes) return { file, thumb: null };
    throw new Error(`${file.name} has ${shortNumber(file.size)}B; this server takes up to ${shortNumber(model.max_bytes)}B.`);
  }
  const side = Math.max(SIDE, PER_MODEL * Math.max(...model.image_size));
  const isSmall = Math.max(bitmap.width, bitmap.height) <= side && file.size <= model.max_bytes;
  const ready = isSmall && KNOWN.includes(file.type) ? file : await redraw(bitmap, side, file);
  const thumb = drawn(bitmap, THUMB);
  bitmap.close();
  return { file: ready, thumb };
}

function drawn(bitmap, side) {
  const factor = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * factor));
  canvas.height = Math.max(1, Math.round(bitmap.height * factor));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

// JPEG has no transparency, so pictures that may have some become PNG.
async function redraw(bitmap, side, file) {
  const kind = OPAQUE.includes(file.type) ? "jpeg" : "png";
  return toFile(drawn(bitmap, side), file.name.replace(/\.\w+$/, "") + (kind === "jpeg" ? ".jpg" : ".png"), kind);
}

export async function toFile(canvas, name, kind) {
  const blob = await new Promise((done) => canvas.toBlob(done, `image/${kind}`, QUALITY));
  return new File([blob], name, { type: blob.type });
}

export function fromBase64(text, kind, name) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new File([bytes], name, { type: `image/${kind}` });
}

// Pixels on canvases: the picture, maps over it, and grids of colors.

// Viridis at 17 points: from dark to light without a turn, and the same to the color-blind.
const VIRIDIS = [
  "440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c",
  "1fa088", "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725",
].map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const SIDE = 720; // longer side of the large canvas, in its own pixels
const FINE = 12; // a map is drawn with this many points a patch
const DIM = 0.2; // how much darker the picture gets under a map of full strength
const FADED = 0.75; // how much of its color it loses there
const MOST = 0.85; // opacity of that map where it is strongest; where it is weak the picture shows through
const KNEE = 0.35; // share of the maximum from where the map is that opaque

export function viridis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const at = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return VIRIDIS[at].map((low, i) => Math.round(low + (VIRIDIS[at + 1][i] - low) * (place - at)));
}

function newCanvas(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

// A canvas of width x height whose pixels are color(x, y), three or four bytes each.
export function painted(width, height, color, canvas = newCanvas(width, height)) {
  const pixels = new ImageData(width, height);
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++, at += 4) {
      pixels.data[at + 3] = 255;
      pixels.data.set(color(x, y), at);
    }
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// A grid of colors, (h, w, 3), one pixel a cell; the style sheet enlarges it without blur.
export function colors(grid) {
  const canvas = painted(grid[0].length, grid.length, (x, y) => grid[y][x]);
  canvas.className = "blocky";
  return canvas;
}

export function scale(canvas) {
  painted(canvas.width, 1, (x) => veil(x / (canvas.width - 1)), canvas);
}

// The color of a share of the maximum, the more transparent the smaller.
function veil(share) {
  return [...viridis(share), Math.round(255 * MOST * Math.min(1, share / KNEE) ** 1.5)];
}

function scaled(map, fromZero = false) {
  const all = map.flat();
  const low = fromZero ? 0 : Math.min(...all);
  const span = Math.max(...all) - low;
  return map.map((row) => row.map((value) => (span > 0 ? (value - low) / span : 0)));
}

// A map, (h, w), in colors, one pixel a cell.
export function heat(map) {
  const share = scaled(map);
  return colors(share.map((row) => row.map(viridis)));
}

// The same drawn smoothly: values between the patches' centers are linear, and then become colors.
function smooth(map, fromZero) {
  const share = scaled(map, fromZero);
  const [h, w] = [map.length, map[0].length];
  const fine = Math.max(2, Math.min(FINE, Math.floor(SIDE / Math.max(h, w))));
  const at = (place, length) => {
    const center = Math.min(Math.max((place + 0.5) / fine - 0.5, 0), length - 1);
    const low = Math.min(Math.floor(center), Math.max(0, length - 2));
    return [low, Math.min(low + 1, length - 1), center - low];
  };
  return painted(w * fine, h * fine, (x, y) => {
    const [x0, x1, u] = at(x, w);
    const [y0, y1, v] = at(y, h);
    const top = share[y0][x0] * (1 - u) + share[y0][x1] * u;
    const bottom = share[y1][x0] * (1 - u) + share[y1][x1] * u;
    return veil(top * (1 - v) + bottom * v);
  });
}

// Few pixels stay squares; many are smoothed as photos are.
function prepare(canvas, picture, side) {
  const factor = side / Math.max(picture.width, picture.height);
  canvas.width = Math.round(picture.width * factor);
  canvas.height = Math.round(picture.height * factor);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = Math.max(picture.width, picture.height) >= 64;
  context.imageSmoothingQuality = "high";
  return context;
}

export function photo(canvas, picture) {
  const context = prepare(canvas, picture, SIDE);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return context;
}

// The picture with a map over it. Under the map it is grayish and darker, so that color and light are the map's.
export function overlay(canvas, picture, map, strength, fromZero) {
  const context = photo(canvas, picture);
  cover(context, "#000", strength * FADED, "saturation");
  cover(context, "#000", strength * DIM, "source-over");
  context.globalAlpha = strength;
  context.imageSmoothingEnabled = true;
  context.drawImage(smooth(map, fromZero), 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
}

function cover(context, color, opacity, how) {
  context.globalCompositeOperation = how;
  context.globalAlpha = opacity;
  context.fillStyle = color;
  context.fillRect(0, 0, context.canvas.width, context.canvas.height);
}

// The picture cut into h x w patches with gaps between them.
export function patches(picture, h, w) {
  const canvas = newCanvas(1, 1);
  const context = prepare(canvas, picture, SIDE);
  const [across, down] = [canvas.width / w, canvas.height / h];
  const gap = Math.max(1.5, Math.min(across, down) * 0.12);
  const [u, v] = [picture.width / w, picture.height / h];
  for (let y = 0; y < h; y++) {
    for (let x = 0; x < w; x++) {
      context.drawImage(
        picture, x * u, y * v, u, v,
        x * across + gap / 2, y * down + gap / 2, across - gap, down - gap,
      );
    }
  }
  return canvas;
}

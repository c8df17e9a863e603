// The data of the page, and the state of the display.

const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data").textContent);
const several = page.panels.length > 1;
const times = document.documentElement.dataset; // milliseconds until the large map and until all maps were drawn
const state = { kind: 0, view: "head", layer: 0, head: 0, side: "query", query: null, key: null, stretch: false };

// Kinds of attention, the layers of each kind, and the weights of each map.

const kinds = [];
for (const panel of page.panels) {
  for (const group of panel.groups) {
    const name = `${group.stack} ${group.kind}`;
    let kind = kinds.find((one) => one.name === name);
    if (!kind) {
      const cross = group.kind === "cross";
      kind = { name, stack: group.stack, cross, layers: [], heads: 0, depth: 0, rollout: false };
      kind.queries = page.words[group.stack];
      kind.keys = cross ? page.words.encoder : kind.queries;
      kinds.push(kind);
    }
    kind.depth = Math.max(kind.depth, group.depth);
    kind.rollout ||= group.rollout.length > 0;
    for (const entry of group.layers) {
      kind.heads = Math.max(kind.heads, entry.heads);
      if (!kind.layers.includes(entry.layer)) kind.layers.push(entry.layer);
    }
    kind.layers.sort((a, b) => a - b);
  }
}
const current = () => kinds[state.kind];
const groupOf = (panel, kind) => panel.groups.find((one) => `${one.stack} ${one.kind}` === kind.name);

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

const unpacked = new Map();
function unpack(entry, rows, columns) {
  if (!unpacked.has(entry)) {
    const scales = bytes(entry.scales);
    const bits = entry.mask === null ? null : bytes(page.masks[entry.mask]);
    const hidden = new Uint8Array(rows * columns);
    if (bits) for (let i = 0; i < hidden.length; i++) hidden[i] = (bits[i >> 3] >> (7 - (i & 7))) & 1;
    unpacked.set(entry, { levels: bytes(entry.weights), scales, hidden });
  }
  return unpacked.get(entry);
}

/** Returns the weights (rows x columns) of one map, NaN for masked cells; null if the panel has no such map. */
function matrix(panel, kind, layer, view, head) {
  const group = groupOf(panel, kind);
  const entry = group && group[view === "rollout" ? "rollout" : "layers"].find((one) => one.layer === layer);
  if (!entry || (view === "head" && head >= entry.heads)) return null;
  const rows = kind.queries.length;
  const columns = kind.keys.length;
  const { levels, scales, hidden } = unpack(entry, rows, columns);
  const values = new Float32Array(rows * columns);
  const seen = levels.length / entry.heads;
  const first = view === "head" ? head : 0;
  const last = view === "head" ? head : entry.heads - 1;
  for (let h = first; h <= last; h++) {
    let place = h * seen;
    for (let t = 0; t < rows; t++) {
      const at = 2 * (h * rows + t);
      // Little-endian 16-bit scale of the row in 1/65535; a level is a multiple of scale / 255.
      const unit = (scales[at] + 256 * scales[at + 1]) / 65535 / 255 / (last - first + 1);
      for (let i = t * columns; i < (t + 1) * columns; i++) {
        if (hidden[i]) values[i] = NaN;
        else values[i] += unit * levels[place++];
      }
    }
  }
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return { rows, columns, values, most };
}

const shownLayer = () => current().layers[state.layer];
const limit = (picture) => (state.stretch && picture.most > 0 ? picture.most : 1);
/** Formats a weight with the number of decimals that its 8 bits justify. */
function number(picture, row, weight) {
  let most = 0;
  for (let s = 0; s < picture.columns; s++) most = Math.max(most, picture.values[row * picture.columns + s] || 0);
  return weight.toFixed(most > 0.25 ? 2 : 3);
}

// Colors: a color map from light to dark, or from dark to light, read from the style sheet.

let colors;
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const text = (name) => style.getPropertyValue(`--${name}`).trim();
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const stops = text("map").split(",").map((stop) => parts(stop.trim()));
  const table = [];
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    table.push(stops[low].map((value, k) => Math.round(value + (place - low) * (stops[low + 1][k] - value))));
  }
  const named = ["paper", "ink", "quiet", "line", "accent", "hidden", "hatch"];
  colors = Object.fromEntries(named.map((name) => [name, text(name)]));
  // Byte order of a pixel: red, green, blue, opacity.
  const pixel = (rgb) => new Uint32Array(new Uint8Array([...rgb, 255]).buffer)[0];
  colors.pixels = table.map(pixel);
  colors.hiddenPixel = pixel(parts(colors.hidden));
  colors.css = table.map((rgb) => `rgb(${rgb})`);
  // Text color: black or white, whichever has more contrast to the relative luminance (WCAG 2).
  colors.over = table.map((rgb) => {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
  });
  byId("gradient").style.background = `linear-gradient(to right, ${text("map")})`;
}
const level = (weight, most) => Math.min(255, Math.round((255 * weight) / most));

function paintPixels(canvas, picture, rows, columns) {
  // One pixel per cell; if there are more cells than pixels, a pixel shows the largest weight of its cells.
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const best = new Float32Array(rows * columns).fill(-1);
  for (let t = 0; t < picture.rows; t++) {
    const row = Math.floor((t * rows) / picture.rows) * columns;
    for (let s = 0; s < picture.columns; s++) {
      const value = picture.values[t * picture.columns + s];
      const at = row + Math.floor((s * columns) / picture.columns);
      if (value > best[at]) best[at] = value;
    }
  }
  const most = limit(picture);
  const pixels = new Uint32Array(image.data.buffer);
  best.forEach((value, i) => {
    pixels[i] = value < 0 ? colors.hiddenPixel : colors.pixels[level(value, most)];
  });
  context.putImageData(image, 0, 0);
}

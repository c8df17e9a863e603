"use strict";
{
const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data").textContent);
const { rows, columns, patch, tokens, words, width, height } = page;
const positions = tokens.length + rows * columns;
const MEAN = -1; // the query of a model without a class token: the mean over all patches
const first = page.classToken || words ? 0 : MEAN;
const state = { view: page.views[0], layer: page.layers.length - 1, head: 0, query: first };
const canvas = byId("picture");
const context = canvas.getContext("2d");
let gray = null;

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

/** Returns the weights of one query in one head over all positions. A map is unpacked when it is first shown. */
function row(entry, head, query) {
  if (typeof entry.weights === "string") {
    Object.assign(entry, { scales: bytes(entry.scales), weights: bytes(entry.weights) });
  }
  const queries = entry.queries;
  const at = head * queries + query;
  // Little-endian 16-bit scale of the row in 1/65535; a level is a multiple of scale / 255.
  const unit = (entry.scales[2 * at] + 256 * entry.scales[2 * at + 1]) / 65535 / 255;
  return Float64Array.from(entry.weights.subarray(at * positions, (at + 1) * positions), (level) => unit * level);
}
function mean(list) {
  const total = new Float64Array(positions);
  for (const weights of list) weights.forEach((weight, i) => (total[i] += weight / list.length));
  return total;
}
const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);

/** Returns the shown weights over all positions. */
function weights() {
  const { view, layer, head, query } = state;
  const entry = view === "pooling" ? page.pooling : view === "rollout" ? page.rollout[layer] : page.layers[layer];
  const heads = view === "head" || view === "pooling" ? [head] : range(0, entry.heads);
  const all = view === "pooling" ? [0] : query === MEAN ? range(tokens.length, positions) : [query];
  return mean(heads.map((one) => mean(all.map((i) => row(entry, one, i)))));
}
const named = (i) => {
  if (words) return `\u201c${words[i]}\u201d`;
  if (i === MEAN) return "The mean over all patches";
  if (i < tokens.length) return `The ${tokens[i]}`;
  const place = i - tokens.length;
  return `The patch in row ${Math.floor(place / columns) + 1}, column ${(place % columns) + 1}`;
};

function draw() {
  const found = weights();
  const parts = found.subarray(tokens.length);
  const largest = parts.reduce((most, one) => Math.max(most, one), 0);
  if (gray) {
    context.putImageData(gray, 0, 0);
    const scale = canvas.width / width;
    const side = patch * scale;
    parts.forEach((weight, i) => {
      context.fillStyle = `rgba(214, 26, 28, ${largest > 0 ? (0.8 * weight) / largest : 0})`;
      context.fillRect((i % columns) * side, Math.floor(i / columns) * side, side, side);
    });
    if (!words && state.query >= tokens.length && state.view !== "pooling") {
      const place = state.query - tokens.length;
      context.strokeStyle = "#ffffff";
      context.lineWidth = Math.max(2, side / 12);
      context.strokeRect((place % columns) * side, Math.floor(place / columns) * side, side, side);
      context.strokeStyle = "#000000";
      context.lineWidth /= 2;
      context.strokeRect((place % columns) * side, Math.floor(place / columns) * side, side, side);
    }
  }
  const best = parts.indexOf(largest);
  const where = `row ${Math.floor(best / columns) + 1}, column ${(best % columns) + 1}`;
  const who = state.view === "pooling" ? "The pooling" : named(state.query);
  const verb = state.view === "rollout" ? "depends most on the patch in" : "attends most to the patch in";
  const others = found.subarray(0, tokens.length).reduce((sum, one) => sum + one, 0);
  const rest = tokens.length ? `; ${others.toFixed(3)} goes to learned tokens, which are not drawn` : "";
  byId("summary").textContent = `${who} ${verb} ${where}: ${largest.toFixed(3)}${rest}.`;
  canvas.setAttribute("aria-label", `The image with its attention. ${byId("summary").textContent}`);
}

function show(change) {
  Object.assign(state, change);
  const entry = state.view === "pooling" ? page.pooling : page.layers[state.layer];
  state.head = Math.max(0, Math.min(entry.heads - 1, state.head));
  const slide = (name, count, value, text) => {
    Object.assign(byId(name), { max: count, value: value + 1, disabled: count < 2 });
    byId(name).setAttribute("aria-valuetext", text);
    byId(`${name}-shown`).textContent = text;
  };
  slide("layer", page.layers.length, state.layer, `${page.layers[state.layer].layer + 1} of ${page.depth}`);
  slide("head", entry.heads, state.head, `${state.head + 1} of ${entry.heads}`);
  byId("layers").hidden = state.view === "pooling";
  byId("heads").hidden = state.view === "mean" || state.view === "rollout";
  byId("tokens").hidden = state.view === "pooling";
  for (const button of byId("tokens").children) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.i) === state.query));
  }
  for (const radio of document.querySelectorAll("#views input")) radio.checked = radio.value === state.view;
  draw();
}

function patchAt(event) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * (width / patch));
  const at = Math.floor(((event.clientY - box.top) / box.height) * (height / patch));
  return column >= 0 && column < columns && at >= 0 && at < rows ? at * columns + column : null;
}
function point(event) {
  const place = patchAt(event);
  if (place !== null && state.query !== tokens.length + place) show({ query: tokens.length + place });
}
if (!words) canvas.addEventListener("pointermove", (event) => event.pointerType !== "touch" && point(event));
if (!words) canvas.addEventListener("click", point);
if (!words) canvas.addEventListener("keydown", (event) => {
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (event.key === "Escape") show({ query: first });
  if (!move) return;
  event.preventDefault();
  const started = state.query >= tokens.length;
  const place = started ? state.query - tokens.length : 0;
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  const down = within(Math.floor(place / columns) + (started ? move[0] : 0), rows);
  const across = within((place % columns) + (started ? move[1] : 0), columns);
  show({ query: tokens.length + down * columns + across });
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("controls").addEventListener("input", ({ target }) => {
  if (target.name === "view") show({ view: target.value });
  else show({ [target.id]: Number(target.value) - 1 });
});

byId("title").textContent = page.title;
const names = { head: "one head", mean: "mean of the heads", rollout: "rollout", pooling: "pooling" };
for (const view of page.views) {
  const radio = Object.assign(document.createElement("input"), { type: "radio", name: "view", value: view });
  const label = document.createElement("label");
  label.append(radio, names[view]);
  byId("views").append(label);
}
const patchQueries = [...tokens.entries(), ...(page.classToken ? [] : [[MEAN, "mean over all patches"]])];
const queries = words ? [...words.entries()] : patchQueries;
if (words) {
  byId("tokens").setAttribute("aria-label", "Generated words");
  byId("how").textContent = "Point at a word, or tap it, to see which parts of the image the model attended to when it predicted the word.";
  canvas.removeAttribute("tabindex"); // the words are the controls
}
for (const [i, name] of queries) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
  button.dataset.i = i;
  button.addEventListener("click", () => show({ query: i }));
  if (words) {
    button.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && show({ query: i }));
    button.addEventListener("focus", () => show({ query: i }));
  }
  byId("tokens").append(button);
}
for (const [name, text] of page.facts) {
  byId("facts").append(
    Object.assign(document.createElement("dt"), { textContent: name }),
    Object.assign(document.createElement("dd"), { textContent: text }),
  );
}
show({});
const image = new Image();
image.addEventListener("load", () => {
  // Enlarge small images by a whole factor, so that the edges of patches stay sharp.
  const scale = Math.max(1, Math.ceil(700 / width));
  Object.assign(canvas, { width: width * scale, height: height * scale });
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  gray = context.getImageData(0, 0, canvas.width, canvas.height);
  const pixels = gray.data;
  for (let i = 0; i < pixels.length; i += 4) {
    pixels[i] = pixels[i + 1] = pixels[i + 2] = (pixels[i] + pixels[i + 1] + pixels[i + 2]) / 3;
  }
  draw();
  document.documentElement.dataset.complete = Math.round(performance.now());
});
image.src = page.image;
}

// A panel: the attention maps of one model.

class Panel {
  constructor(data) {
    this.data = data;
    this.queries = new Words("query", this);
    this.keys = new Words("key", this);
    this.map = new LargeMap(this);
    this.grid = new Grid(this);
    this.title = make("p");
    this.summary = make("p", { className: "summary" });
    this.missing = make("p", { className: "missing", hidden: true });
    this.note = make("p", { className: "note" });
    this.sides = { query: make("p", { className: "side" }), key: make("p", { className: "side" }) };
    this.other = make("div", {}, this.sides.key, this.keys.element);
    const button = (text, work) => make("button", { type: "button", textContent: text, onclick: work });
    const caption = () => (several ? `${data.name}: ${pictureName()}` : pictureName());
    const keep = (kind, type, text) => this.picture && save(`${fileName(this)}.${kind}`, type, text(this.picture));
    const files = make("span", {});
    files.append(
      button("SVG", () => keep("svg", "image/svg+xml", (picture) => svg(picture, caption()))),
      " ",
      button("CSV", () => keep("csv", "text/csv", csv)),
    );
    files.firstChild.setAttribute("aria-label", "Save the large map as SVG");
    files.lastChild.setAttribute("aria-label", "Save the weights of the large map as CSV");
    this.element = make("section", { className: "panel" });
    this.element.setAttribute("aria-label", data.name);
    this.element.append(
      ...(several ? [make("h2", { textContent: data.name })] : []),
      make("div", { className: "sides" }, make("div", {}, this.sides.query, this.queries.element), this.other),
      make("div", { className: "picture" },
        make("div", { className: "caption" }, this.title, files), this.summary, this.missing, this.map.element),
      make("div", { className: "all" }, make("p", { className: "side", textContent: "Rows: layers; columns: heads" }),
        this.grid.element, this.note),
    );
  }
  /** Updates the panel for another kind of attention, with other words. */
  fill() {
    const kind = current();
    const asks = `Queries (${kind.stack})`;
    this.queries.fill(kind.queries, kind.stack, asks);
    this.keys.fill(kind.cross ? kind.keys : [], "encoder", "Keys (encoder)");
    this.sides.query.textContent = kind.cross ? asks : `${capital(kind.stack)} words: point at a word, or tap it`;
    this.sides.key.textContent = "Keys (encoder)";
    this.other.hidden = !kind.cross;
    this.grid.fill();
    const without = [];
    for (let layer = 0; layer < kind.depth; layer++) if (!kind.layers.includes(layer)) without.push(layer + 1);
    const which = without.length === 1 ? `Layer ${without[0]} has` : `Layers ${without.join(", ")} have`;
    this.note.textContent = without.length ? `${which} no ${kind.cross ? "cross" : "self"}-attention.` : "";
  }
  /** Draws another matrix of the same words. */
  draw() {
    this.picture = matrix(this.data, current(), shownLayer(), state.view, state.head);
    this.title.textContent = pictureName();
    this.missing.hidden = Boolean(this.picture);
    this.missing.textContent = `${this.data.name} does not have this layer or head.`;
    this.map.element.hidden = !this.picture;
    const { queries, keys } = current();
    const sizes = `${queries.length} queries by ${keys.length} keys`;
    this.map.element.setAttribute("aria-label", `${pictureName()}: ${sizes}; the arrow keys move the selected cell`);
    this.map.lay();
    this.grid.mark();
    this.mark();
  }
  /** Highlights the selected word or cell. */
  mark() {
    const { picture } = this;
    const { side, query, key } = state;
    const { cross } = current();
    const at = (t, s) => picture.values[t * picture.columns + s];
    const byRow = picture && side === "query" && query !== null ? (s) => at(query, s) : null;
    const byColumn = picture && side === "key" && key !== null ? (t) => at(t, key) : null;
    if (cross) {
      const asks = side === "query" ? query : null;
      this.queries.show(picture, byColumn, asks, side === "key" ? query : null, (t) => t);
      this.keys.show(picture, byRow, side === "key" ? key : null, side === "query" ? key : null, () => query);
    } else {
      this.queries.show(picture, byRow, query, key, () => query);
    }
    this.map.mark();
    this.summary.textContent = picture ? this.describe(picture) : "";
  }
  describe(picture) {
    const kind = current();
    const { side, query, key } = state;
    if (side === "query" && query !== null && key !== null) return `${relation(picture, query, key)}.`;
    if ((side === "query" ? query : key) === null) return "Point at a word or a cell, or tap it.";
    const chosen = side === "query" ? query : key;
    const count = side === "query" ? picture.columns : picture.rows;
    const place = (i) => (side === "query" ? [chosen, i] : [i, chosen]);
    const weights = Array.from({ length: count }, (_, i) => {
      const [t, s] = place(i);
      return [picture.values[t * picture.columns + s], i];
    }).filter(([weight]) => weight > 0);
    const sum = weights.reduce((total, [weight]) => total + weight, 0);
    const others = side === "query" ? kind.keys : kind.queries;
    const best = weights.sort(([a], [b]) => b - a).slice(0, 4);
    const list = best.map(([weight, i]) => `${quoted(others, i)} ${number(picture, place(i)[0], weight)}`).join(", ");
    if (side === "key") return `${quoted(kind.keys, key)} receives most attention from ${list || "no word"}.`;
    const verb = state.view === "rollout" ? "depends on" : "attends to";
    return `${quoted(kind.queries, query)} ${verb} ${list || "nothing"}. Its weights sum to ${sum.toFixed(2)}.`;
  }
}

// The state of the page, and the controls that change it.

const panels = page.panels.map((data) => new Panel(data));
function say(text) {
  byId("live").textContent = text;
}
function choose(side, i, other) {
  const next = side === "query" ? { side, query: i, key: other } : { side, key: i, query: other };
  if (Object.entries(next).every(([name, value]) => state[name] === value)) return;
  Object.assign(state, next);
  for (const panel of panels) panel.mark();
}
/** Applies a change of the state and redraws the affected parts. */
function show(change, done) {
  const before = { ...state };
  Object.assign(state, change);
  const kind = current();
  state.layer = Math.max(0, Math.min(kind.layers.length - 1, state.layer));
  state.head = Math.max(0, Math.min(kind.heads - 1, state.head));
  if (state.view === "rollout" && !kind.rollout) state.view = "mean";
  const refill = done || before.kind !== state.kind;
  let left = panels.length;
  const painted = () => --left || (done && done());
  if (refill) {
    Object.assign(state, { side: "query", query: kind.queries.length - 1, key: null });
    for (const panel of panels) panel.fill();
  }
  for (const panel of panels) panel.draw();
  times.firstPicture ??= Math.round(performance.now());
  for (const panel of panels) {
    if (refill || before.stretch !== state.stretch) panel.grid.paint(painted);
  }
  controls();
}
function controls() {
  const kind = current();
  const range = (id, most, value, shown) => {
    const slider = byId(id);
    slider.max = most;
    slider.value = value;
    slider.disabled = most < 2;
    slider.setAttribute("aria-valuetext", shown);
    byId(`${id}-shown`).textContent = shown;
  };
  range("layer", kind.layers.length, state.layer + 1, `${shownLayer() + 1} of ${kind.depth}`);
  const heads = { mean: `mean of ${kind.heads}`, rollout: "rollout" };
  range("head", kind.heads, state.head + 1, heads[state.view] ?? `${state.head + 1} of ${kind.heads}`);
  for (const radio of document.querySelectorAll("#kinds input")) radio.checked = Number(radio.value) === state.kind;
  for (const radio of document.querySelectorAll("#views input")) radio.checked = radio.value === state.view;
  document.querySelector("#rollout input").disabled = !kind.rollout;
  const most = Math.max(...panels.map((panel) => (panel.picture ? limit(panel.picture) : 0)));
  byId("most").textContent = state.stretch && !several ? most.toFixed(2) : state.stretch ? "largest" : "1";
  const hides = (picture) => picture && picture.values.some(Number.isNaN);
  byId("hidden-legend").hidden = !panels.some((panel) => hides(panel.picture));
  const explanations = {
    head: `Attention weights: how much each query attends to each ${kind.cross ? "encoder word" : "word"}.`,
    mean: "Attention weights, averaged over the heads of the layer.",
    rollout: "Rollout: how much each word after this layer depends on each input word, through all layers up to it.",
  };
  const last = kind.stack === "decoder" ? "A row is the last word that the model read before it predicts the next one." : "";
  byId("explained").textContent = `${explanations[state.view]} ${page.rows ?? last}`.trim();
}

const preference = matchMedia("(prefers-color-scheme: dark)");
let theme = null;
function dress() {
  const dark = theme === null ? preference.matches : theme === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${dark ? "light" : "dark"} colors`);
  readColors();
}
function dressAgain() {
  dress();
  for (const panel of panels) {
    panel.draw();
    panel.grid.paint();
  }
}
preference.addEventListener("change", dressAgain);
byId("theme").addEventListener("click", () => {
  theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  dressAgain();
});

byId("title").textContent = page.title;
const entry = ([name, text]) => {
  const value = make(name === "Command" ? "code" : "bdi", { textContent: text });
  return make("div", {}, make("dt", { textContent: name }), make("dd", {}, value));
};
byId("texts").append(...page.texts.map(entry));
byId("facts").append(...page.facts.map(entry));
byId("kinds").append(
  ...kinds.map((kind, i) => {
    const radio = make("input", { type: "radio", name: "kind", value: String(i) });
    return make("label", {}, radio, make("span", { textContent: `${kind.stack} ${kind.cross ? "cross" : "self"}` }));
  }),
);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("controls").addEventListener("input", ({ target }) => {
  if (target.name === "kind") show({ kind: Number(target.value) });
  else if (target.name === "view") show({ view: target.value });
  else if (target.id === "layer") show({ layer: Number(target.value) - 1 });
  else if (target.id === "head") show({ head: Number(target.value) - 1, view: "head" });
  else if (target.id === "stretch") show({ stretch: target.checked });
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") choose("query", null, null);
});
byId("panels").className = several ? "several" : "one";
byId("panels").append(...panels.map((panel) => panel.element));
dress();
const cross = kinds.findIndex((kind) => kind.cross);
show({ kind: Math.max(0, cross), layer: Infinity }, () => {
  times.complete = Math.round(performance.now());
});

// Words.

function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && key !== "role") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const kindName = (kind) => `${kind.stack} ${kind.cross ? "cross" : "self"}-attention`;
const quoted = (words, i) => `\u201c${words[i]}\u201d (${i + 1})`;
const isWritten = (stack, i) => stack === "decoder" && page.writtenFrom !== null && i >= page.writtenFrom;
function pictureName() {
  const which = { head: `head ${state.head + 1}`, mean: "mean of the heads", rollout: "rollout" }[state.view];
  return `${capital(kindName(current()))}, layer ${shownLayer() + 1} of ${current().depth}, ${which}`;
}
function relation(picture, t, s) {
  const kind = current();
  const value = picture.values[t * picture.columns + s];
  const [from, to] = [quoted(kind.queries, t), quoted(kind.keys, s)];
  if (Number.isNaN(value)) return `${to} is masked for ${from}`;
  const verb = state.view === "rollout" ? "depends on" : "attends to";
  return `${from} ${verb} ${to}: ${number(picture, t, value)}`;
}

/** Scrolls a box, but not the page, until a part of it is visible. */
function reveal(box, part) {
  const [outer, inner] = [box.getBoundingClientRect(), part.getBoundingClientRect()];
  for (const [scroll, start, end] of [["scrollLeft", "left", "right"], ["scrollTop", "top", "bottom"]]) {
    if (inner[start] < outer[start]) box[scroll] += inner[start] - outer[start] - 4;
    else if (inner[end] > outer[end]) box[scroll] += inner[end] - outer[end] + 4;
  }
}

/** A list of words; one of them is selected by pointer or keyboard. */
class Words {
  constructor(side, panel) {
    this.side = side;
    this.panel = panel;
    this.element = make("div", { className: "words", role: "listbox", "data-side": side });
    this.element.addEventListener("pointerover", (event) => this.point(event));
    this.element.addEventListener("click", (event) => this.point(event));
    this.element.addEventListener("keydown", (event) => this.press(event));
  }
  fill(words, stack, label) {
    this.element.setAttribute("aria-label", label);
    this.items = words.map((word, i) => {
      const item = make("div", { className: "word", role: "option", "data-i": i, tabIndex: -1 });
      item.classList.toggle("written", isWritten(stack, i));
      item.append(make("bdi", { textContent: word }), make("span", { className: "weight" }));
      return item;
    });
    this.element.replaceChildren(...this.items);
  }
  point(event) {
    const item = event.target.closest(".word");
    if (item && event.pointerType !== "touch") choose(this.side, Number(item.dataset.i), null);
    else if (item && event.type === "click") choose(this.side, Number(item.dataset.i), null);
  }
  press(event) {
    const last = this.items.length - 1;
    const now = Number(event.target.dataset.i);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, Enter: now, " ": now }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(last, next));
    choose(this.side, to, null);
    this.items[to].focus();
    say(this.panel.summary.textContent);
  }
  /** Shows weights by position (NaN: masked; null: no weights); `asks` is the selected word, `met` its counterpart. */
  show(picture, weights, asks, met, row) {
    this.items.forEach((item, i) => {
      const weight = weights ? weights(i) : null;
      const hid = weight !== null && Number.isNaN(weight);
      const shade = weight === null || hid ? null : level(weight, limit(picture));
      item.style.backgroundColor = shade === null ? "" : colors.css[shade];
      item.style.color = shade === null ? "" : colors.over[shade];
      item.lastChild.textContent = shade === null ? "" : number(picture, row(i), weight);
      item.classList.toggle("hid", hid);
      item.classList.toggle("asks", i === asks);
      item.classList.toggle("met", i === met && i !== asks);
      item.setAttribute("aria-selected", String(i === asks));
      item.tabIndex = i === (asks ?? 0) ? 0 : -1;
    });
    if (asks !== null && !this.element.matches(":hover")) reveal(this.element, this.items[asks]);
  }
}

// The small maps: one row per layer, with its heads, their mean, and the rollout.

const columnsOf = (kind) => [
  ...Array.from({ length: kind.heads }, (_, head) => ({ view: "head", head, label: String(head + 1) })),
  { view: "mean", head: 0, label: "mean" },
  ...(kind.rollout ? [{ view: "rollout", head: 0, label: "rollout" }] : []),
];
const isShown = (layer, column) =>
  layer === state.layer && column.view === state.view && (column.view !== "head" || column.head === state.head);

class Grid {
  constructor(panel) {
    this.panel = panel;
    this.element = make("div", { className: "grid", role: "grid" });
    this.element.addEventListener("click", (event) => {
      const thumb = event.target.closest(".thumb");
      if (thumb) this.go(Number(thumb.dataset.layer), Number(thumb.dataset.column));
    });
    this.element.addEventListener("keydown", (event) => this.press(event));
  }
  fill() {
    const kind = current();
    this.columns = columnsOf(kind);
    const shape = Math.max(0.5, Math.min(2, kind.keys.length / kind.queries.length));
    this.element.style.gridTemplateColumns = `auto repeat(${this.columns.length}, minmax(var(--thumb), 110px))`;
    this.element.setAttribute("aria-label", `${capital(kindName(kind))}: every layer and head`);
    const header = make("div", { role: "row" }, make("span", { role: "columnheader", textContent: "" }));
    for (const { label } of this.columns) header.append(make("span", { role: "columnheader", textContent: label }));
    this.thumbs = [];
    const rows = kind.layers.map((layer, i) => {
      const row = make("div", { role: "row" }, make("span", { role: "rowheader", textContent: String(layer + 1) }));
      this.thumbs.push(
        this.columns.map((column, c) => {
          const name = column.view === "head" ? `head ${column.label}` : column.label;
          const thumb = make("button", { type: "button", className: "thumb", role: "gridcell", tabIndex: -1 });
          thumb.setAttribute("aria-label", `layer ${layer + 1}, ${name}`);
          thumb.title = `layer ${layer + 1}, ${name}`;
          Object.assign(thumb.dataset, { layer: i, column: c });
          thumb.style.aspectRatio = String(shape);
          thumb.append(make("canvas", { width: 1, height: 1, "aria-hidden": "true" }));
          row.append(thumb);
          return thumb;
        }),
      );
      return row;
    });
    this.element.replaceChildren(header, ...rows);
  }
  /** Draws a few maps at a time, so that the page stays responsive. */
  paint(done = () => {}) {
    const kind = current();
    const todo = this.thumbs.flat();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const some = () => {
      const end = performance.now() + 30;
      while (turn === this.turn && todo.length && performance.now() < end) {
        const thumb = todo.shift();
        const column = this.columns[Number(thumb.dataset.column)];
        const layer = kind.layers[Number(thumb.dataset.layer)];
        const picture = matrix(this.panel.data, kind, layer, column.view, column.head);
        thumb.disabled = !picture;
        if (!picture) continue;
        paintPixels(thumb.firstChild, picture, Math.min(128, picture.rows), Math.min(128, picture.columns));
      }
      if (turn === this.turn) todo.length ? setTimeout(some) : done();
    };
    some();
  }
  mark() {
    this.thumbs.forEach((row, layer) =>
      row.forEach((thumb, c) => {
        const shown = isShown(layer, this.columns[c]);
        thumb.setAttribute("aria-selected", String(shown));
        thumb.tabIndex = shown ? 0 : -1;
        if (shown) reveal(this.element, thumb);
      }),
    );
  }
  go(layer, c) {
    const { view, head } = this.columns[c];
    show(view === "head" ? { layer, view, head } : { layer, view });
  }
  press(event) {
    const thumb = event.target.closest(".thumb");
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const ends = { Home: [0, -Infinity], End: [0, Infinity] };
    const move = moves[event.key] ?? ends[event.key];
    if (!thumb || !move) return;
    event.preventDefault();
    let layer = Math.max(0, Math.min(this.thumbs.length - 1, Number(thumb.dataset.layer) + move[0]));
    let column = Math.max(0, Math.min(this.columns.length - 1, Number(thumb.dataset.column) + move[1]));
    // A model may have fewer layers or heads than the other one: skip the maps that it does not have.
    while (this.thumbs[layer]?.[column]?.disabled) [layer, column] = [layer + move[0], column + move[1]];
    const next = this.thumbs[layer]?.[column];
    if (!next) return;
    this.go(layer, column);
    next.focus();
    say(pictureName());
  }
}

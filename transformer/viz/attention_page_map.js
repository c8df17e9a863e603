// The large map.

class LargeMap {
  constructor(panel) {
    this.panel = panel;
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.tip = make("div", { className: "tip", hidden: true });
    this.element = make("div", { className: "map", tabIndex: 0, role: "group" }, this.canvas, this.tip);
    this.element.setAttribute("aria-roledescription", "attention map");
    const point = (event) => {
      const cell = this.cellAt(event);
      if (cell) choose("query", ...cell);
    };
    this.element.addEventListener("pointermove", (event) => event.pointerType !== "touch" && point(event));
    this.element.addEventListener("click", point);
    this.element.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.element.clientWidth !== this.width && this.lay()).observe(this.element);
  }
  press(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const ends = { Home: -Infinity, End: Infinity };
    const picture = this.panel.picture;
    if (!picture || !(event.key in moves || event.key in ends)) return;
    event.preventDefault();
    const [down, right] = moves[event.key] ?? [0, ends[event.key]];
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    const [query, key] = [state.query ?? 0, state.key ?? 0];
    const started = state.query !== null && state.key !== null;
    const [t, s] = started ? [query + down, key + right] : [query, key];
    choose("query", within(t, picture.rows), within(s, picture.columns));
    say(this.panel.summary.textContent);
  }
  cellAt(event) {
    const picture = this.panel.picture;
    if (!picture || !this.cell) return null;
    const box = this.canvas.getBoundingClientRect();
    const t = Math.floor((event.clientY - box.top - this.top) / this.cell);
    const s = Math.floor((event.clientX - box.left - this.left) / this.cell);
    if (t < 0 || t >= picture.rows || s >= picture.columns) return null;
    return [t, s < 0 ? null : s];
  }
  /** Computes the layout and draws the map without the selection. */
  lay() {
    const picture = this.panel.picture;
    const kind = current();
    const width = (this.width = this.element.clientWidth);
    if (!picture || !width) return;
    const probe = this.canvas.getContext("2d");
    const face = (this.face = getComputedStyle(document.body).fontFamily);
    const cut = (word) => (Array.from(word).length > 16 ? `${Array.from(word).slice(0, 15).join("")}\u2026` : word);
    this.names = { queries: kind.queries.map(cut), keys: kind.keys.map(cut) };
    probe.font = `14px ${face}`;
    const longest = (words) => words.reduce((most, word) => Math.max(most, probe.measureText(word).width), 0);
    const [down, across] = [longest(this.names.queries), longest(this.names.keys)];
    this.left = Math.ceil(Math.min(down, 0.3 * width)) + 8;
    const room = (width - this.left - 2) / picture.columns;
    this.cell = Math.min(64, room, Math.max(14, 700 / picture.rows));
    this.size = Math.max(9, Math.min(14, 0.85 * this.cell));
    this.font = `${this.size}px ${face}`;
    this.upright = across + 4 > this.cell;
    this.top = this.upright ? Math.ceil((across * this.size) / 14) + 10 : 22;
    this.stride = Math.max(1, Math.ceil((this.size * 1.05) / this.cell));
    this.height = Math.ceil(this.top + picture.rows * this.cell + 2);
    // A canvas that exceeds the limit of a browser (Firefox: 32,767 pixels per side) stays blank.
    this.ratio = Math.min(3, window.devicePixelRatio || 1, 32767 / Math.max(this.height, width));
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.canvas.style.height = `${this.height}px`;
    this.base = make("canvas", { width: this.canvas.width, height: this.canvas.height });
    this.paintBase(this.base.getContext("2d"), picture, kind);
    this.mark();
  }
  paintBase(context, picture, kind) {
    const { left, top, cell } = this;
    const [across, down] = [picture.columns * cell, picture.rows * cell];
    context.scale(this.ratio, this.ratio);
    const pixels = make("canvas");
    paintPixels(pixels, picture, picture.rows, picture.columns);
    context.imageSmoothingEnabled = false;
    context.drawImage(pixels, left, top, across, down);
    this.hatch(context, picture);
    if (cell >= 9) {
      context.strokeStyle = colors.line;
      context.globalAlpha = 0.6;
      context.lineWidth = 0.5;
      context.beginPath();
      for (let s = 1; s < picture.columns; s++) context.rect(left + s * cell, top, 0, down);
      for (let t = 1; t < picture.rows; t++) context.rect(left, top + t * cell, across, 0);
      context.stroke();
      context.globalAlpha = 1;
    }
    context.strokeStyle = colors.quiet;
    context.lineWidth = 1;
    context.strokeRect(left, top, across, down);
    for (let t = 0; t < picture.rows; t += this.stride) this.name(context, "queries", t, kind);
    for (let s = 0; s < picture.columns; s += this.stride) this.name(context, "keys", s, kind);
  }
  hatch(context, picture) {
    const { left, top, cell } = this;
    const path = new Path2D();
    let any = false;
    for (let t = 0; t < picture.rows; t++) {
      for (let s = 0; s < picture.columns; s++) {
        const start = s;
        while (s < picture.columns && Number.isNaN(picture.values[t * picture.columns + s])) s++;
        if (s > start) path.rect(left + start * cell, top + t * cell, (s - start) * cell, cell);
        any ||= s > start;
      }
    }
    if (!any) return;
    context.save();
    context.clip(path);
    context.strokeStyle = colors.hatch;
    context.lineWidth = 0.8;
    context.beginPath();
    const [across, down] = [picture.columns * cell, picture.rows * cell];
    for (let x = 0; x < across + down; x += 6) {
      context.moveTo(left + x, top);
      context.lineTo(left + x - down, top + down);
    }
    context.stroke();
    context.restore();
  }
  name(context, axis, i, kind, chosen = false) {
    const { left, top, cell } = this;
    const stack = axis === "keys" && kind.cross ? "encoder" : kind.stack;
    context.save();
    context.font = chosen ? `600 ${Math.max(11, this.size)}px ${this.face}` : this.font;
    const text = this.names[axis][i];
    const room = axis === "queries" ? left - 6 : this.upright ? top - 8 : undefined;
    context.textBaseline = "middle";
    if (axis === "queries") {
      context.translate(left - 5, top + (i + 0.5) * cell);
      context.textAlign = "right";
    } else {
      context.translate(left + (i + 0.5) * cell, this.upright ? top - 5 : top - 9);
      if (this.upright) context.rotate(-Math.PI / 2);
      context.textAlign = this.upright ? "left" : "center";
    }
    const high = 0.62 * this.size + 1;
    if (chosen) {
      // Cover the plain label, and the neighboring labels if there is no room for all of them.
      const wide = Math.min(context.measureText(text).width, room ?? Infinity);
      const begin = { right: -wide, left: 0, center: -wide / 2 }[context.textAlign];
      context.fillStyle = colors.paper;
      context.fillRect(begin - 2, -high, wide + 4, 2 * high);
    }
    context.fillStyle = chosen || isWritten(stack, i) ? colors.accent : colors.ink;
    context.fillText(text, 0, 0, room);
    context.restore();
  }
  /** Draws the prepared map, and the selected row and cell on top. */
  mark() {
    const picture = this.panel.picture;
    this.tip.hidden = true;
    if (!this.base) return;
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.base, 0, 0);
    if (!picture) return;
    context.scale(this.ratio, this.ratio);
    const { left, top, cell } = this;
    const kind = current();
    const [t, s] = [state.query, state.key];
    context.strokeStyle = colors.accent;
    context.lineWidth = 2;
    if (t !== null) {
      context.strokeRect(left, top + t * cell, picture.columns * cell, cell);
      this.name(context, "queries", t, kind, true);
    }
    if (s !== null) {
      if (t === null) context.strokeRect(left + s * cell, top, cell, picture.rows * cell);
      this.name(context, "keys", s, kind, true);
    }
    if (t === null || s === null) return;
    context.strokeRect(left + s * cell + 1, top + t * cell + 1, Math.max(2, cell - 2), Math.max(2, cell - 2));
    this.tip.textContent = relation(picture, t, s);
    this.tip.hidden = false;
    const below = top + (t + 1) * cell + 6;
    const above = top + t * cell - this.tip.offsetHeight - 6;
    const x = Math.min(left + (s + 0.5) * cell, this.element.clientWidth - this.tip.offsetWidth);
    const y = below + this.tip.offsetHeight > this.height && above > 0 ? above : below;
    this.tip.style.transform = `translate(${Math.max(0, x)}px, ${y}px)`;
  }
}

// Export of the large map as SVG and CSV.

function save(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
function fileName(panel) {
  const kind = current();
  const which = state.view === "head" ? `head${state.head + 1}` : state.view;
  const of = several ? `_${panel.data.name.replace(/[^\p{L}\p{N}]+/gu, "-")}` : "";
  return `${kind.stack}_${kind.cross ? "cross" : "self"}_layer${shownLayer() + 1}_${which}${of}`;
}
function csv(picture) {
  const kind = current();
  const field = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const lines = ["query,key,query_word,key_word,weight"];
  for (let t = 0; t < picture.rows; t++) {
    for (let s = 0; s < picture.columns; s++) {
      const value = picture.values[t * picture.columns + s];
      if (Number.isNaN(value)) continue;
      lines.push([t + 1, s + 1, field(kind.queries[t]), field(kind.keys[s]), value.toFixed(5)].join(","));
    }
  }
  return `${lines.join("\r\n")}\r\n`;
}
function svg(picture, caption) {
  const kind = current();
  const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escaped = (text) => text.replace(/[&<>"]/g, (found) => escapes[found]);
  const cell = 20;
  const margin = (words) => 16 + 7.5 * Math.min(24, Math.max(...words.map((word) => Array.from(word).length)));
  const [left, top] = [margin(kind.queries), margin(kind.keys) + 28];
  const [across, down] = [picture.columns * cell, picture.rows * cell];
  const paths = new Map();
  for (let t = 0; t < picture.rows; t++) {
    for (let s = 0; s < picture.columns; s++) {
      const value = picture.values[t * picture.columns + s];
      const fill = Number.isNaN(value) ? "url(#hidden)" : colors.css[level(value, limit(picture))];
      paths.set(fill, `${paths.get(fill) ?? ""}M${left + s * cell} ${top + t * cell}h${cell}v${cell}h-${cell}z`);
    }
  }
  const rows = kind.queries.map(
    (word, t) => `<text x="${left - 6}" y="${top + t * cell + 14}" text-anchor="end">${escaped(word)}</text>`,
  );
  const heads = kind.keys.map((word, s) => {
    const place = `translate(${left + s * cell + 14} ${top - 6}) rotate(-90)`;
    return `<text transform="${place}">${escaped(word)}</text>`;
  });
  const width = Math.max(left + across + 10, 7.2 * caption.length + 20);
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${top + down + 10}"`,
    ` font-family="system-ui, sans-serif" font-size="12" fill="${colors.ink}">`,
    `<title>${escaped(caption)}</title>`,
    `<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">`,
    `<path fill="${colors.hidden}" d="M0 0h6v6H0z"/><path fill="${colors.hatch}" d="M0 0h1v6H0z"/></pattern></defs>`,
    `<path fill="${colors.paper}" d="M0 0h${width}v${top + down + 10}H0z"/>`,
    `<text x="10" y="18" font-size="13">${escaped(caption)}</text>`,
    ...[...paths].map(([fill, path]) => `<path fill="${fill}" d="${path}"/>`),
    `<path fill="none" stroke="${colors.quiet}" d="M${left} ${top}h${across}v${down}h-${across}z"/>`,
    ...rows,
    ...heads,
    "</svg>\n",
  ].join("\n");
}

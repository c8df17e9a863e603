"use strict";
// Show the step and the value of each line at the pointer, a touch or the position chosen with the arrow keys.
const shown = (value) => (value === null ? "not finite" : Number(value.toPrecision(5)).toLocaleString("en"));
for (const figure of document.querySelectorAll("figure[data-right]")) {
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const output = figure.querySelector("output");
  const resting = output.textContent;
  const lines = JSON.parse(figure.querySelector("script").textContent);
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const { left, width, right } = Object.fromEntries(Object.entries(figure.dataset).map(([k, v]) => [k, Number(v)]));
  let place = steps.length;
  const nearest = (sorted, wanted) => {
    let low = 0;
    let high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= wanted) low = middle;
      else high = middle;
    }
    return wanted - sorted[low] <= sorted[high] - wanted ? low : high;
  };
  const show = (index) => {
    place = Math.min(Math.max(index, 0), steps.length - 1);
    const step = steps[place];
    const x = left + (width * step) / right;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.removeAttribute("hidden");
    const values = lines.map((line) => {
      const near = nearest(line.steps, step);
      const at = line.steps[near] === step ? "" : ` (step ${line.steps[near].toLocaleString("en")})`;
      return `${line.label ? `${line.label} ` : ""}${shown(line.values[near])}${at}`;
    });
    output.textContent = `step ${step.toLocaleString("en")}: ${values.join("; ")}`;
  };
  const rest = () => {
    cursor.setAttribute("hidden", "");
    output.textContent = resting;
  };
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    show(nearest(steps, ((x - left) / width) * right));
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", rest);
  figure.addEventListener("blur", rest);
  figure.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -steps.length, End: steps.length };
    if (!(event.key in by)) return;
    event.preventDefault();
    show(place + by[event.key]);
  });
}

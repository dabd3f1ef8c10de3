// Charts in SVG: axes, lines, points and bars. Colours and widths live in the style
// sheet (classes such as `tail` or `run-2`), so that light, dark and print need no redrawing.

const MARGIN = { top: 12, right: 14, bottom: 42, left: 62 };

function linearScale(domain, range) {
  const slope = (range[1] - range[0]) / (domain[1] - domain[0] || 1);
  return (value) => range[0] + (value - domain[0]) * slope;
}

function axisScale(axis, range) {
  const bend = axis.bend ?? ((value) => value);
  const inner = linearScale(axis.domain.map(bend), range);
  return (value) => inner(bend(value));
}

function niceTicks(low, high, about = 5) {
  const rough = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0); // + 0: no minus zero
  return ticks;
}

const LOG_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 1e5, 1e6, 1e7];

function logTicks(low, high, most) {
  const inside = LOG_STEPS.filter((tick) => tick >= low && tick <= high);
  const powers = inside.filter((tick) => Number.isInteger(Math.log10(tick)));
  return inside.length <= most ? inside : powers.length > 1 ? powers : inside.filter((_, i) => i % 2 === 0);
}

const percentAxis = (label, domain = [0, 1]) => ({
  label,
  domain,
  format: (value) => `${Number((100 * value).toFixed(1))} %`,
});

function logAxis(label, values) {
  const low = Math.max(1, Math.min(...values));
  const high = Math.max(low * 1.5, ...values);
  return {
    label,
    domain: [low / 1.15, high * 1.15],
    bend: (v) => Math.log(Math.max(v, 0.5)),
    log: true,
    format: whole,
  };
}

// figure: { x, y, series: [{ kind, name, class, points: [{ x, y, title }], close }], label, height }
function chart(host, figure) {
  const width = Math.max(260, Math.min(host.clientWidth || 520, 1100));
  const height = figure.height ?? Math.round(Math.min(340, Math.max(230, width * 0.56)));
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const x = axisScale(figure.x, [inner.left, inner.right]);
  const y = axisScale(figure.y, [inner.bottom, inner.top]);
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": figure.label,
    class: "chart",
  });
  drawing.append(axes(figure, x, y, inner, width));
  for (const series of figure.series) drawing.append(...marks(series, x, y, inner));
  const wasOpen = host.querySelector("details.data")?.open ?? false;
  replace(host, legend(figure.series), drawing, dataTable(figure, wasOpen));
}

function axes(figure, x, y, inner, width) {
  const group = svg("g", { class: "axes", "aria-hidden": "true" });
  const about = width < 420 ? 4 : 6;
  const xTicks =
    figure.x.ticks ?? (figure.x.log ? logTicks(...figure.x.domain, about + 3) : niceTicks(...figure.x.domain, about));
  const yTicks = figure.y.ticks ?? (figure.y.log ? logTicks(...figure.y.domain, 7) : niceTicks(...figure.y.domain, 5));
  for (const tick of yTicks) {
    group.append(
      svg("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: inner.left - 8, y: y(tick) + 4, "text-anchor": "end" }, figure.y.format(tick)),
    );
  }
  for (const tick of xTicks) {
    group.append(
      svg("line", { class: "tick", x1: x(tick), x2: x(tick), y1: inner.bottom, y2: inner.bottom + 5 }),
      svg("text", { x: x(tick), y: inner.bottom + 18, "text-anchor": "middle" }, figure.x.format(tick)),
    );
  }
  group.append(
    svg("line", { class: "base", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
    svg(
      "text",
      { class: "label", x: (inner.left + inner.right) / 2, y: inner.bottom + 36, "text-anchor": "middle" },
      figure.x.label,
    ),
    svg(
      "text",
      {
        class: "label",
        "text-anchor": "middle",
        transform: `translate(12 ${(inner.top + inner.bottom) / 2}) rotate(-90)`,
      },
      figure.y.label,
    ),
  );
  return group;
}

function marks(series, x, y, inner) {
  const points = series.points.filter((point) => isNumber(point.x) && isNumber(point.y));
  const colour = series.class ?? "";
  const place = (point) => `${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`;
  if (!points.length) return [];
  if (series.kind === "line") return [svg("path", { class: `line ${colour}`, d: `M${points.map(place).join("L")}` })];
  if (series.kind === "bars") return points.map((point) => bar(point, series, x, y, inner));
  const dots = points.map((point) =>
    svg(
      "circle",
      { class: `dot ${colour} ${point.class ?? ""}`, cx: x(point.x), cy: y(point.y), r: point.r ?? 4 },
      svg("title", {}, point.title ?? ""),
    ),
  );
  const names = points
    .filter((point) => point.text)
    .map((point) =>
      svg(
        "text",
        {
          class: "mark",
          x: x(point.x) + (point.dx ?? 8),
          y: y(point.y) + (point.dy ?? -6),
          "text-anchor": (point.dx ?? 8) < 0 ? "end" : "start",
        },
        point.text,
      ),
    );
  if (series.kind === "points") return [...dots, ...names];
  return [svg("path", { class: `line ${colour}`, d: `M${points.map(place).join("L")}` }), ...dots, ...names];
}

function bar(point, series, x, y, inner) {
  const left = x(point.x);
  const width = Math.max(0.8, x(point.end) - left - (series.gap ?? 1));
  return svg(
    "rect",
    {
      class: `column ${series.class ?? ""} ${point.class ?? ""}`,
      x: left,
      width,
      y: y(point.y),
      height: Math.max(0, inner.bottom - y(point.y)),
    },
    svg("title", {}, point.title ?? ""),
  );
}

function legend(series) {
  const named = series.filter((one) => one.name);
  if (!named.length) return null;
  return el(
    "ul",
    { class: "legend" },
    named.map((one) =>
      el(
        "li",
        {},
        el("span", { class: `key ${one.kind} ${one.class ?? ""}`, "aria-hidden": "true" }),
        nameOf(one.name),
      ),
    ),
  );
}

// The same numbers as a table, for screen readers and for copying; filled when it is opened.
function dataTable(figure, open) {
  const body = el("div", {});
  const opened = () => {
    if (body.childElementCount) return;
    const rows = figure.series
      .filter((one) => !one.silent)
      .flatMap((one) =>
        one.points.map((point) => [one.name ?? figure.label, point.name ?? short(point.x), short(point.y)]),
      );
    replace(body, table(["series", figure.x.label, figure.y.label], rows.slice(0, 600), { label: figure.label }));
  };
  return el("details", { class: "data", open, ontoggle: opened }, el("summary", {}, "Numbers"), body);
}

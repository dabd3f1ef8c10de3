// Building the page. Text is always inserted as text nodes, so names of classes are never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const byId = (id) => document.getElementById(id);

// Names may be written from right to left: each keeps its own direction.
const nameOf = (text, attributes = {}) => el("bdi", attributes, text);

function replace(host, ...children) {
  host.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// -- number formats ----------------------------------------------------------------------------------------------

const MINUS = "−";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const signed = (text) => text.replace("-", MINUS);
const percent = (value, digits = 1) => (isNumber(value) ? signed(`${(100 * value).toFixed(digits)} %`) : "–");
const whole = (value) => (isNumber(value) ? value.toLocaleString("en-US") : "–");
const short = (value, digits = 3) => (isNumber(value) ? signed(digitsOf(value, digits)) : "–");
const decimal = (value, digits = 3) => (isNumber(value) ? signed(decimalsOf(value, digits)) : "–");

// Utilities may be on any scale: numbers too long for a cell are written with an exponent.
function digitsOf(value, digits) {
  const power = Math.abs(value) >= 1e7;
  return power ? value.toExponential(digits - 1).replace(/\.?0*e\+/, "e") : String(Number(value.toPrecision(digits)));
}

// A fixed number of decimals, none above 10,000; significant digits where decimals would show nothing.
function decimalsOf(value, digits) {
  const size = Math.abs(value);
  const tells = size === 0 || (size >= 10 ** -digits && size < 1e7);
  return tells ? value.toFixed(size < 1e4 ? digits : 0) : digitsOf(value, 3);
}

function difference(value, percents) {
  if (!isNumber(value)) return "";
  const size = Math.abs(percents ? 100 * value : value);
  const text = percents ? size.toFixed(1) : decimalsOf(size, 3);
  if (Number(text) === 0) return "±0";
  return (value > 0 ? "+" : MINUS) + text;
}

function parseNumber(text) {
  const clean = text.trim().replace(MINUS, "-").replace(",", ".");
  const value = clean === "" ? NaN : Number(clean);
  return Number.isFinite(value) ? value : null;
}

const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

// -- tables and downloads -----------------------------------------------------------------------------------------

function table(headers, rows, attributes = {}) {
  const head = el(
    "thead",
    {},
    el(
      "tr",
      {},
      headers.map((text) => el("th", { scope: "col" }, text)),
    ),
  );
  const lines = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, i) => (i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell))),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": attributes.label },
    el("table", { class: attributes.class }, head, el("tbody", {}, lines)),
  );
}

function download(name, kind, text) {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

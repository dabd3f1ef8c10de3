// A matrix of true classes against actions, as a table: each class up to fifty, blocks of classes beyond, which open.

const MOST_SHOWN = 50;
const PARTS = 10; // a block too large to show its classes opens into this many

const classBlock = (problem, y) => ({
  name: problem.names[y],
  classes: [y],
  single: true,
  region: problem.regionOf?.[y],
});

function blocksOf(problem, members) {
  if (members.length <= MOST_SHOWN) return members.map((y) => classBlock(problem, y));
  const size = Math.ceil(members.length / PARTS);
  return Array.from({ length: Math.ceil(members.length / size) }, (_, i) => {
    const part = members.slice(i * size, (i + 1) * size);
    const region = problem.regionOf?.[part[0]];
    return { name: `${problem.names[part[0]]} … (${part.length})`, classes: part, region };
  });
}

// How the whole problem can be divided: by class where there are few, else by region, by group, or in parts.
function divisions(problem) {
  const all = problem.classOrder;
  const found = {};
  if (all.length <= MOST_SHOWN) found["by class"] = blocksOf(problem, all);
  if (Object.keys(problem.regions).length > 1 && all.length > 3) {
    found["by region"] = Object.entries(problem.regions).map(([name, classes]) => ({ name, classes, region: name }));
  }
  const grouped = Object.entries(problem.groups);
  if (grouped.length) found["by group"] = withTheRest(problem, grouped);
  if (!Object.keys(found).length || all.length > MOST_SHOWN) found["by frequency"] = blocksOf(problem, all);
  return found;
}

// Groups may leave out classes; where they overlap, the class belongs to the first one.
function withTheRest(problem, grouped) {
  const taken = new Set();
  const blocks = grouped.map(([name, members]) => {
    const classes = members.filter((y) => !taken.has(y));
    classes.forEach((y) => taken.add(y));
    return { name, classes };
  });
  const rest = problem.classOrder.filter((y) => !taken.has(y));
  if (rest.length) blocks.push({ name: "other", classes: rest });
  return blocks.filter((block) => block.classes.length);
}

// Columns: the actions that decide for the classes of each block, then all other actions.
function columnsFor(problem, blocks) {
  const deciding = blocks.map((block) => ({
    ...block,
    actions: block.classes.map((y) => problem.actionOf[y]).filter((a) => problem.allowed[a]),
  }));
  const handing = [...problem.actions.keys()]
    .filter((a) => problem.decidedClass[a] < 0 && problem.allowed[a])
    .map((a) => ({ name: problem.actions[a], actions: [a], classes: [], abstains: true, single: true }));
  return [...deciding.filter((block) => block.actions.length), ...handing];
}

// spec: { host, label, problem, cell(row, column) -> element, onHeader(axis, block) }
class MatrixView {
  constructor(spec) {
    this.spec = spec;
    this.way = Object.keys(divisions(spec.problem))[0];
    this.path = [];
    this.layOut();
  }

  get problem() {
    return this.spec.problem;
  }

  blocks() {
    const place = this.path.at(-1);
    const whole = divisions(this.problem)[this.way];
    return place ? { rows: place.rows, columns: place.columns } : { rows: whole, columns: whole };
  }

  open(row, column) {
    const rows = row.single ? [row] : blocksOf(this.problem, row.classes);
    const columns = column.abstains || column.single ? [column] : blocksOf(this.problem, column.classes);
    this.path.push({ name: `${row.name} → ${column.name}`, rows, columns });
    this.layOut();
    this.spec.host.querySelector(".steps button")?.focus();
  }

  goTo(depth) {
    this.path.length = depth;
    this.layOut();
  }

  // The frame is built when the division, the zoom or the actions change; `paint` only fills it.
  layOut() {
    const { rows, columns } = this.blocks();
    this.rows = rows;
    this.columns = this.path.length
      ? columnsFor(this.problem, columns).filter((c) => !c.abstains)
      : columnsFor(this.problem, columns);
    this.cells = rows.map((row) => this.columns.map((column) => this.spec.cell(row, column, this)));
    const size = Math.max(rows.length, this.columns.length);
    const density = size > 14 ? "dense" : size > 8 ? "wide" : "";
    const grid = el(
      "table",
      { class: `matrix ${density}`, "aria-label": this.spec.label },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("td", { class: "corner" }, "true ↓ decided →"),
          this.columns.map((c) => this.header("column", c)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row, i) =>
          el(
            "tr",
            {},
            this.header("row", row),
            this.cells[i].map((cell) => el("td", {}, cell)),
          ),
        ),
      ),
    );
    grid.addEventListener("keydown", (event) => this.moveFocus(event));
    replace(this.spec.host, this.steps(), el("div", { class: "scroll" }, grid));
    this.paint();
  }

  header(axis, block) {
    const scope = axis === "row" ? "row" : "col";
    const face = [el("span", { class: `swatch ${block.region ?? ""}`, "aria-hidden": "true" }), nameOf(block.name)];
    const title =
      block.classes.length > 1 ? `${block.name}: ${plural(block.classes.length, "class", "classes")}` : block.name;
    if (!this.spec.onHeader) return el("th", { scope, title }, el("span", { class: "name" }, face));
    const press = () => this.spec.onHeader(axis, block);
    return el(
      "th",
      { scope, title },
      el(
        "button",
        { type: "button", class: "name", onclick: press, "aria-label": `Set the ${axis} ${block.name}` },
        face,
      ),
    );
  }

  steps() {
    const ways = Object.keys(divisions(this.problem));
    const choose = el(
      "select",
      {
        "aria-label": "How the matrix is divided",
        onchange: (event) => {
          this.way = event.target.value;
          this.goTo(0);
        },
      },
      ways.map((way) => el("option", { value: way }, way)),
    );
    choose.value = this.way;
    const trail = this.path.map((place, i) =>
      el("button", { type: "button", class: "quiet", onclick: () => this.goTo(i + 1) }, nameOf(place.name)),
    );
    if (!trail.length && ways.length < 2) return null;
    return el(
      "div",
      { class: "steps" },
      ways.length > 1 ? choose : null,
      trail.length
        ? el("button", { type: "button", class: "quiet", onclick: () => this.goTo(0) }, "← whole matrix")
        : null,
      trail,
    );
  }

  paint() {
    this.spec.paint?.(this);
  }

  // Arrow keys go from cell to cell; in a text field left and right still move the caret inside the text.
  moveFocus(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    const row = this.cells.findIndex((line) => line.includes(event.target));
    if (row < 0) return;
    const column = this.cells[row].indexOf(event.target);
    const input = event.target;
    const inside =
      input.value !== undefined &&
      step[1] !== 0 &&
      input.selectionStart === input.selectionEnd &&
      (step[1] > 0 ? input.selectionEnd < input.value.length : input.selectionStart > 0);
    const next = this.cells[row + step[0]]?.[column + step[1]];
    if (inside || !next) return;
    event.preventDefault();
    next.focus();
    next.select?.();
  }
}

// One hue for gains and one for losses, stronger farther from 0; text stays readable in light and dark.
function shade(element, value, scale) {
  const strength = scale > 0 ? Math.min(1, Math.abs(value) / scale) : 0;
  element.style.setProperty("--strength", strength.toFixed(3));
  element.classList.toggle("gain", value > 0);
  element.classList.toggle("loss", value < 0);
}

// The controls of the utility editor. They change the workbench, which decides again and notifies its listeners.

function makeEditor(workbench) {
  const view = new MatrixView({
    host: byId("utility-matrix"),
    label: "Utility: rows are true, columns are decided",
    problem: workbench.problem,
    cell: (row, column, self) => utilityCell(workbench, row, column, self),
    onHeader: (axis, block) => aimAssignment(axis, block),
    paint: (self) => paintUtility(workbench, self),
  });
  const repaint = (frame) => {
    if (frame) view.goTo(0);
    else view.paint();
    paintControls(workbench);
  };
  wirePresets(workbench, repaint);
  wireSliders(workbench, repaint);
  wirePrior(workbench);
  wireAssignment(workbench);
  wireFiles(workbench, repaint);
  workbench.onChange(() => repaint(false));
  paintControls(workbench);
}

// -- the matrix -----------------------------------------------------------------------------------------------------

// The cells of a block are its mistakes; right decisions are left out, unless the cell is a single one.
function cellsOf({ problem }, row, column) {
  const alone = row.classes.length === 1 && column.actions.length === 1;
  const cells = [];
  for (const y of row.classes) {
    for (const a of column.actions) if (alone || problem.decidedClass[a] !== y) cells.push(y * problem.actionCount + a);
  }
  return cells;
}

function utilityCell(workbench, row, column, view) {
  const what = column.abstains ? `choosing ${column.name}` : `deciding ${column.name}`;
  const input = el("input", {
    inputmode: "decimal",
    autocomplete: "off",
    "aria-label": `Utility of ${what} when ${row.name} is true`,
  });
  input.cells = cellsOf(workbench, row, column);
  input.disabled = !input.cells.length;
  input.addEventListener("input", () => {
    const value = parseNumber(input.value);
    input.setAttribute("aria-invalid", value === null ? "true" : "false");
    byId("utility-hint").textContent = value === null ? "A cell needs a number, such as -1 or 0.5." : "";
    if (value === null) return;
    input.cells.forEach((cell) => (workbench.U[cell] = value));
    workbench.changed();
  });
  input.addEventListener("blur", () => view.paint());
  if (row.single && column.single) return input;
  input.addEventListener("dblclick", () => view.open(row, column));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // or the same key press would push the button that gets the focus
    view.open(row, column);
  });
  return input;
}

function paintUtility(workbench, view) {
  const { U } = workbench;
  const scale = U.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  let blocks = false;
  view.cells.forEach((line) =>
    line.forEach((input) => {
      const value = U[input.cells[0]];
      const same = input.cells.every((cell) => U[cell] === value);
      const mean = input.cells.reduce((total, cell) => total + U[cell], 0) / (input.cells.length || 1);
      blocks ||= input.cells.length > 1;
      shade(input, mean, scale);
      input.placeholder = same ? "" : `≈ ${short(mean)}`;
      if (input === document.activeElement) return;
      input.value = same && input.cells.length ? short(value, 6) : "";
      input.setAttribute("aria-invalid", "false");
    }),
  );
  const hint =
    "A cell of several classes sets all their mistakes at once; ≈ is the mean of different values. Enter or a double click opens it.";
  byId("utility-hint").textContent = blocks ? hint : "";
}

// -- controls -------------------------------------------------------------------------------------------------------

function paintControls(workbench) {
  const { problem } = workbench;
  const penalty = workbench.penalty();
  const known = problem.counts !== null;
  setPair("penalty", penalty ?? 0, penalty === null ? "" : short(penalty), !known);
  byId("penalty-hint").textContent = !known
    ? "Needs training counts of the classes, which this report does not have."
    : penalty === null
      ? "These cells have different values; the slider sets them all."
      : "";
  const abstains = problem.allowed[workbench.abstainAction];
  const value = workbench.abstainValue();
  byId("abstain").checked = abstains;
  setPair("abstain-range", value ?? 0, value === null ? "" : short(value), !abstains, "abstain-value");
  byId("abstain-hint").textContent = abstains
    ? value === null
      ? "The classes have different values; the slider sets them all."
      : "A sample is abstained on where every decision has a lower expected utility."
    : "";
  setPair("temperature", Math.log2(workbench.temperature), short(workbench.temperature), false);
  byId("prior").value = workbench.prior.target;
  paintPrior(workbench);
  byId("command").textContent =
    "rfdlc decide PREDICTIONS --utility utility.csv uses the utility; --decider decider.json uses temperature and prior as well.";
}

function setPair(slider, value, text, disabled, field = `${slider}-value`) {
  byId(slider).disabled = disabled;
  byId(field).disabled = disabled;
  if (document.activeElement !== byId(slider)) byId(slider).value = value;
  if (document.activeElement !== byId(field)) byId(field).value = text;
}

function wirePresets(workbench, repaint) {
  const presets = {
    given: () => workbench.reset(),
    "one-hot": () => workbench.oneHot(),
    "tail-sensitive": () => {
      const penalty = workbench.penalty() || -1;
      workbench.oneHot();
      workbench.setPenalty(penalty);
    },
  };
  for (const button of byId("presets").querySelectorAll("button")) {
    button.disabled = button.dataset.preset === "tail-sensitive" && workbench.problem.counts === null;
    button.addEventListener("click", () => {
      presets[button.dataset.preset]();
      repaint(true);
      workbench.changed();
    });
  }
}

// A slider with a field for exact numbers beside it. `apply` gets a number.
function wirePair(workbench, slider, field, fromSlider, apply) {
  byId(slider).addEventListener("input", () => {
    apply(fromSlider(Number(byId(slider).value)));
    byId(field).value = "";
    workbench.changed();
  });
  byId(field).addEventListener("input", () => {
    const value = parseNumber(byId(field).value);
    byId(field).setAttribute("aria-invalid", String(value === null));
    if (value === null) return;
    apply(value);
    workbench.changed();
  });
}

function wireSliders(workbench, repaint) {
  const same = (value) => value;
  wirePair(workbench, "penalty", "penalty-value", same, (value) => workbench.setPenalty(value));
  wirePair(workbench, "abstain-range", "abstain-value", same, (value) => workbench.setAbstain(true, value));
  wirePair(
    workbench,
    "temperature",
    "temperature-value",
    (power) => Number((2 ** power).toPrecision(3)),
    (value) => {
      if (value > 0) workbench.temperature = value;
    },
  );
  byId("abstain").addEventListener("change", (event) => {
    workbench.setAbstain(event.target.checked, workbench.abstainValue() ?? 0);
    repaint(true);
    workbench.changed();
  });
}

// -- prior ----------------------------------------------------------------------------------------------------------

function wirePrior(workbench) {
  const unknown = workbench.runs.some((run) => run.carried_prior === null);
  byId("carried-control").hidden = !unknown;
  byId("carried").querySelector("[value=train]").disabled = workbench.problem.counts === null;
  byId("prior").querySelector("[value=train]").disabled = workbench.problem.counts === null;
  byId("carried").addEventListener("change", (event) => {
    workbench.prior.carried = event.target.value;
    workbench.changed();
  });
  byId("prior").addEventListener("change", (event) => {
    const [run] = workbench.runs;
    workbench.prior.own ??= [
      ...(workbench.targetPrior(run) ?? workbench.carriedPrior(run) ?? workbench.namedPrior("uniform")),
    ];
    workbench.prior.target = event.target.value;
    drawOwnPrior(workbench);
    workbench.changed();
  });
}

function paintPrior(workbench) {
  const stuck = workbench.prior.target !== "given" && workbench.runs.some((run) => !workbench.carriedPrior(run));
  const impossible = workbench.runs.some((run) => {
    const [target, carried] = [workbench.targetPrior(run), workbench.carriedPrior(run)];
    return target && carried && target.some((share, y) => share > 0 && carried[y] === 0);
  });
  byId("own-prior").hidden = workbench.prior.target !== "own";
  byId("prior-hint").textContent = stuck
    ? "Choose which prior the probabilities carry: the correction needs it."
    : impossible
      ? "A class without training samples cannot be corrected for: the prior is not corrected."
      : "";
}

// Shares of blocks of classes; inside a block the classes keep their proportions.
function drawOwnPrior(workbench) {
  const blocks = Object.values(divisions(workbench.problem))[0];
  const fields = blocks.map((block) => {
    const share = block.classes.reduce((total, y) => total + workbench.prior.own[y], 0);
    return el(
      "label",
      {},
      nameOf(block.name),
      el("input", { inputmode: "decimal", value: String(Number((100 * share).toPrecision(4))) }),
      "%",
    );
  });
  const inputs = fields.map((field) => field.querySelector("input"));
  const start = [...workbench.prior.own];
  const apply = () => {
    const wanted = inputs.map((input) => parseNumber(input.value));
    const total = wanted.reduce((sum, value) => sum + (value ?? 0), 0);
    inputs.forEach((input, i) => input.setAttribute("aria-invalid", String(wanted[i] === null || wanted[i] < 0)));
    if (wanted.some((value) => value === null || value < 0) || total <= 0) return;
    blocks.forEach((block, i) => spread(workbench.prior.own, start, block.classes, wanted[i] / total));
    workbench.changed();
  };
  inputs.forEach((input) => input.addEventListener("input", apply));
  replace(byId("own-prior"), fields);
}

function spread(prior, start, classes, share) {
  const before = classes.reduce((total, y) => total + start[y], 0);
  for (const y of classes) prior[y] = before > 0 ? (share * start[y]) / before : share / classes.length;
}

// -- rows, columns and groups ---------------------------------------------------------------------------------------

let assignable = { true: [], decided: [] };

function wireAssignment(workbench) {
  const fillChoices = () => {
    const { problem } = workbench;
    const sets = [
      ...Object.entries(problem.regions).map(([name, classes]) => ({ name: `any ${name} class`, key: name, classes })),
      ...Object.entries(problem.groups).map(([name, classes]) => ({ name: `any of ${name}`, key: name, classes })),
    ];
    const everything = { name: "anything", key: "", classes: problem.classOrder };
    const singles = problem.classOrder.map((y) => ({ name: problem.names[y], key: problem.names[y], classes: [y] }));
    assignable = {
      true: [everything, ...sets, ...singles],
      decided: [everything, ...sets, ...singles].map((one) => ({
        ...one,
        actions: one.classes.map((y) => problem.actionOf[y]).filter((a) => a >= 0),
      })),
    };
    problem.actions.forEach((name, a) => {
      if (problem.decidedClass[a] < 0 && problem.allowed[a]) assignable.decided.push({ name, key: name, actions: [a] });
    });
    for (const side of ["true", "decided"]) {
      const select = byId(`assign-${side}`);
      const before = select.value;
      replace(
        select,
        assignable[side].map((one, i) => el("option", { value: String(i) }, one.name)),
      );
      if (before && assignable[side][before]) select.value = before;
    }
  };
  fillChoices();
  byId("assign-true").addEventListener("focus", fillChoices);
  byId("assign-decided").addEventListener("focus", fillChoices);
  byId("assign-set").addEventListener("click", () => {
    const value = parseNumber(byId("assign-value").value);
    byId("assign-value").setAttribute("aria-invalid", String(value === null));
    if (value === null) return;
    const rows = assignable.true[byId("assign-true").value];
    const columns = assignable.decided[byId("assign-decided").value];
    workbench.assign(rows.classes, columns.actions, value);
    workbench.changed();
  });
}

// A click on the head of a row or column fills in the form, except for the value.
function aimAssignment(axis, block) {
  const [aimed, other] = axis === "row" ? ["true", "decided"] : ["decided", "true"];
  const place = assignable[aimed].findIndex((one) => one.key === block.name);
  if (place < 0) return;
  byId(`assign-${aimed}`).value = String(place);
  byId(`assign-${other}`).value = "0";
  byId("assign").scrollIntoView({ block: "nearest" });
  byId("assign-value").focus();
  byId("assign-value").select();
}

// -- files ----------------------------------------------------------------------------------------------------------

function wireFiles(workbench, repaint) {
  const runNow = () => Number(byId("run").value || 0);
  byId("save-utility").addEventListener("click", () => download("utility.csv", "text/csv", utilityCsv(workbench)));
  byId("save-decisions").addEventListener("click", () =>
    download("decisions.csv", "text/csv", decisionsCsv(workbench, runNow())),
  );
  byId("save-decider").addEventListener("click", () =>
    download("decider.json", "application/json", deciderJson(workbench, runNow())),
  );
  byId("open-utility").addEventListener("change", async (event) => {
    const file = event.target.files[0];
    if (!file) return;
    const read = readUtility(await file.text(), workbench.problem);
    event.target.value = "";
    if (read.problem) {
      byId("command").textContent = `${file.name} cannot be used: ${read.problem}.`;
      return;
    }
    applyUtility(workbench, read);
    repaint(true);
    workbench.changed();
  });
}

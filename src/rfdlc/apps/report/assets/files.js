// Files in and out: utilities as the library reads and writes them, decisions, and a decider.

const quoted = (text) => (/[",\r\n;\t]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const csvLine = (cells) => `${cells.map((cell) => quoted(String(cell))).join(",")}\r\n`;

function utilityCsv({ problem, U }) {
  const allowed = [...problem.actions.keys()].filter((a) => problem.allowed[a]);
  const lines = problem.names.map((name, y) => csvLine([name, ...allowed.map((a) => U[y * problem.actionCount + a])]));
  return csvLine(["true", ...allowed.map((a) => problem.actions[a])]) + lines.join("");
}

function decisionsCsv(workbench, index) {
  const { problem, runs, results, base } = workbench;
  const run = runs[index];
  const lines = Array.from(run.targets, (y, i) =>
    csvLine([
      run.embedded.ids?.[i] ?? run.rows[i],
      problem.names[y],
      problem.actions[results[index].actions[i]],
      problem.actions[base[index].actions[i]],
      Number(results[index].confidence[i].toPrecision(6)),
    ]),
  );
  return csvLine(["id", "target", "action", "action_before", "largest_probability"]) + lines.join("");
}

// The decider of a run with the utility, temperature and prior of the page: softmax(log p / T0 + b) at a further
// temperature T is softmax(log p / (T0 T) + b / T).
function deciderJson(workbench, index) {
  const { problem, U, runs, temperature } = workbench;
  const run = runs[index];
  const allowed = [...problem.actions.keys()].filter((a) => problem.allowed[a]);
  const fitted = run.decider.fitted ?? { temperature: 1, bias: null, prior: null };
  const carried = workbench.carriedPrior(run);
  const target = workbench.targetPrior(run);
  return JSON.stringify({
    ...run.decider,
    rule: "expected-utility",
    calibration: run.decider.calibration ?? "temperature",
    fitted: {
      temperature: fitted.temperature * temperature,
      bias: fitted.bias?.map((b) => b / temperature) ?? null,
      prior: fitted.prior,
    },
    train_prior: run.decider.train_prior ?? carried,
    target_prior: carried ? target : null,
    utility: {
      classes: { names: problem.names, counts: problem.counts, groups: groupNames(problem) },
      actions: allowed.map((a) => problem.actions[a]),
      matrix: problem.names.map((_, y) => allowed.map((a) => U[y * problem.actionCount + a])),
    },
  });
}

const groupNames = (problem) =>
  Object.fromEntries(
    Object.entries(problem.groups).map(([name, members]) => [name, members.map((y) => problem.names[y])]),
  );

// -- reading --------------------------------------------------------------------------------------------------------

function parseCsv(text) {
  const firstLine = text.slice(0, (text.indexOf("\n") + 1 || text.length + 1) - 1);
  const delimiter = [",", ";", "\t"].sort((a, b) => firstLine.split(b).length - firstLine.split(a).length)[0];
  const rows = [[]];
  let cell = "";
  let inside = false;
  for (let i = 0; i < text.length; i++) {
    const character = text[i];
    if (inside && character === '"' && text[i + 1] === '"') cell += text[++i];
    else if (character === '"' && (inside || cell === "")) inside = !inside;
    else if (!inside && character === delimiter) {
      rows.at(-1).push(cell);
      cell = "";
    } else if (!inside && (character === "\n" || character === "\r")) {
      if (character === "\r" && text[i + 1] === "\n") i++;
      rows.at(-1).push(cell);
      cell = "";
      rows.push([]);
    } else cell += character;
  }
  rows.at(-1).push(cell);
  return rows.filter((row) => row.some((one) => one !== ""));
}

// Rows and columns are matched by name. The result says in words what is wrong, or is the matrix ready to use.
function readUtility(text, problem) {
  const [header, ...lines] = parseCsv(text.replace(/^\uFEFF/, ""));
  if (!header || !lines.length) return { problem: "it needs a first line of actions and one line a class" };
  const actions = header.slice(1).map((name) => name.trim());
  const rows = new Map(lines.map((line) => [line[0].trim(), line.slice(1).map(Number)]));
  const missing = problem.names.find((name) => !rows.has(name.trim()));
  if (missing !== undefined) return { problem: `it has no line for the class “${missing}”` };
  if (rows.size !== problem.names.length)
    return { problem: `it has ${rows.size} classes, expected ${problem.names.length}` };
  if (new Set(actions).size !== actions.length) return { problem: "an action appears more than once" };
  const bad = [...rows].find(
    ([, values]) => values.length !== actions.length || values.some((v) => !Number.isFinite(v)),
  );
  if (bad) return { problem: `the line of “${bad[0]}” needs ${actions.length} finite numbers` };
  return { actions, rows: problem.names.map((name) => rows.get(name.trim())) };
}

function applyUtility(workbench, { actions, rows }) {
  const { problem } = workbench;
  const trimmed = problem.actions.map((name) => name.trim());
  const unknown = actions.filter((name) => !trimmed.includes(name));
  if (unknown.length) workbench.addColumns(unknown);
  const places = actions.map((name) => problem.actions.findIndex((known) => known.trim() === name));
  problem.actions.forEach((_, a) => (problem.allowed[a] = places.includes(a)));
  rows.forEach((values, y) => values.forEach((value, i) => (workbench.U[y * problem.actionCount + places[i]] = value)));
}

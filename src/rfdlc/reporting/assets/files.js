// Files: utilities as the library reads and writes them, decisions, and a decider.

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

const divided = (values, by) => (Array.isArray(values) ? values.map((value) => divided(value, by)) : values / by);

// The decider of a run with the utility, temperature and prior of the page: softmax(W log p + b) at a further
// temperature T is softmax((W / T) log p + b / T).
function deciderJson(workbench, index) {
  const { problem, U, runs, temperature } = workbench;
  const run = runs[index];
  const allowed = [...problem.actions.keys()].filter((a) => problem.allowed[a]);
  const fitted = run.calibration ?? { weight: 1, bias: 0, prior: null, power: 1 };
  const carried = workbench.carriedPrior(run);
  const target = workbench.targetPrior(run);
  return JSON.stringify({
    ...run.decider,
    rule: "expected-utility",
    model: {
      ...run.decider.model,
      calibrator: {
        name: "matrix-scaling",
        weight: divided(fitted.weight, temperature),
        bias: divided(fitted.bias, temperature),
        prior: fitted.prior,
        power: fitted.power,
      },
      train_prior: run.decider.model.train_prior ?? carried,
      target_prior: carried ? target : null,
    },
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

// As the library: the first delimiter that splits all lines into the same number of cells, more than one.
function parseCsv(text) {
  const tables = [",", ";", "\t"].map((delimiter) => ({ delimiter, rows: splitCsv(text, delimiter) }));
  const even = ({ rows }) => rows.length && rows[0].length > 1 && rows.every((row) => row.length === rows[0].length);
  return tables.find(even) ?? tables[0];
}

// Where semicolons separate cells, a comma is a decimal point; an empty cell is not a number.
function cellNumber(cell, delimiter) {
  return cell.trim() === "" ? NaN : Number(delimiter === ";" ? cell.replace(",", ".") : cell);
}

function splitCsv(text, delimiter) {
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

// As the library's `rows_are_actions`, by the word of the lines in the corner cell.
const ACTION_WORDS = /(?<!\p{L})(decided|decisions?|actions?|predicted|predictions?|pred|chosen|taken|answers?)(?!\p{L})/iu;

// Rows and columns are matched by name. The result is the matrix, or says what is wrong.
function readUtility(text, problem) {
  const { delimiter, rows: found } = parseCsv(text.replace(/^\uFEFF/, ""));
  const [header, ...lines] = found;
  if (!header || !lines.length) return { problem: "it needs a first line of actions and one line per class" };
  const [corner, ...actions] = header.map((name) => name.trim());
  const cells = lines.flatMap((line) => line.slice(1));
  if (delimiter === ";" && [",", "."].every((sign) => cells.some((cell) => cell.includes(sign))))
    return { problem: "it has decimal commas and decimal points: remove the thousands separators" };
  const numbers = (line) => line.slice(1).map((cell) => cellNumber(cell, delimiter));
  const rows = new Map(lines.map((line) => [line[0].trim(), numbers(line)]));
  if (rows.has(corner)) return { problem: "it needs a first column that holds the true classes" };
  if (ACTION_WORDS.test(corner.split(/[\\/|×→]|->|\bx\b|\bby\b|\bvs\b/)[0]))
    return { problem: `its lines are actions (“${corner}”): give it a line per true class` };
  const missing = problem.names.find((name) => !rows.has(name.trim()));
  if (missing !== undefined) return { problem: `it has no line for the class “${missing}”` };
  if (lines.length !== problem.names.length)
    return { problem: `it has ${lines.length} lines of classes, expected ${problem.names.length}` };
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

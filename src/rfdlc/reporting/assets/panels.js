// Panels that follow the editor: consequences, changes, confusion and mistakes.

// -- consequences ---------------------------------------------------------------------------------------------------

const ROUNDING = 1e-12; // sums of the same numbers in another order may differ by this share

function changeMark(before, now, { unit, direction, cost }) {
  const same = Math.abs(now - before) <= ROUNDING * Math.abs(before);
  const text = difference(same ? 0 : cost ? before - now : now - before, unit === "%");
  const sign = { higher: 1, lower: -1 }[direction];
  const way = text === "±0" || text === "" || !sign ? "same" : (now - before) * sign > 0 ? "better" : "worse";
  return el("span", { class: `change ${way}` }, text);
}

// The metrics that the page itself computes, labelled as in the registry.
const editedMetrics = ({ workbench, now }) => workbench.problem.metrics.filter(({ name }) => name in now[0].metrics);

function drawConsequences(state) {
  const { workbench, before, now } = state;
  const single = workbench.runs.length === 1;
  const heads = single ? ["As given", "Now", "Change"] : workbench.runs.map(runHead);
  const body = editedMetrics(state).map((metric) => [
    metricName(metric),
    ...workbench.runs.flatMap((_, i) => {
      const [was, is] = [before[i].metrics[metric.name], now[i].metrics[metric.name]];
      const value = el("span", { "data-metric": metric.name, "data-run": i, "data-value": is }, shown(is, metric));
      const mark = changeMark(was, is, metric);
      return single ? [shown(was, metric), value, mark] : [el("span", {}, value, " ", mark)];
    }),
  ]);
  replace(byId("consequences"), table(["", ...heads], body, { class: "numbers", label: "Metrics as given and now" }));
}

function drawStrip(state) {
  const { workbench, before, now, index } = state;
  const wanted = ["accuracy", "accuracy_by_region.tail", "false_head_rate", "mean_utility", "abstention_rate"];
  const chips = editedMetrics(state)
    .filter(({ name }) => wanted.includes(name))
    .map((metric) =>
      el(
        "div",
        {},
        el("span", { class: "name" }, metric.nested ? "Tail accuracy" : capital(metric.label)),
        el("strong", {}, shown(now[index].metrics[metric.name], metric)),
        changeMark(before[index].metrics[metric.name], now[index].metrics[metric.name], metric),
      ),
    );
  const moved = state.moved.samples.length;
  chips.push(
    el(
      "div",
      {},
      el("span", { class: "name" }, "Samples that change"),
      el("strong", { id: "changed-count" }, whole(moved)),
      el("span", { class: "change same" }, `of ${whole(workbench.runs[index].size)}`),
    ),
  );
  replace(byId("strip"), chips);
}

function drawChanges(state) {
  const { workbench, moved, index } = state;
  const { problem } = workbench;
  const host = byId("changes");
  if (!moved.samples.length) {
    replace(
      host,
      el(
        "p",
        { class: "hint" },
        `None: the decisions are those of the given ${problem.worth}. Edit the matrix or move a slider.`,
      ),
    );
    return;
  }
  const rows = moved.moves
    .slice(0, 12)
    .map((move) => [
      el("span", { class: "kind" }, nameOf(problem.actions[move.from]), " → ", nameOf(problem.actions[move.to])),
      whole(move.count),
      whole(move.righted),
      whole(move.wronged),
      difference(move.gain, false),
    ]);
  const more =
    moved.moves.length > 12
      ? el("p", { class: "hint" }, `and ${plural(moved.moves.length - 12, "more kind", "more kinds")} of change`)
      : null;
  const samples = [...moved.samples].sort((a, b) => Math.abs(b.gain) - Math.abs(a.gain)).slice(0, 40);
  const lines = samples.map(({ sample, gain }) => [
    sampleName(workbench.runs[index], sample),
    nameOf(problem.names[workbench.runs[index].targets[sample]]),
    nameOf(problem.actions[workbench.base[index].actions[sample]]),
    nameOf(problem.actions[workbench.results[index].actions[sample]]),
    difference(gain, false),
  ]);
  const wasOpen = host.querySelector("details")?.open ?? false;
  replace(
    host,
    table(["From → to", "Samples", "Now right", "No longer right", problem.sign < 0 ? "Cost saved" : "Utility gained"], rows, {
      class: "numbers",
      label: "Changes by kind",
    }),
    more,
    el(
      "details",
      { open: wasOpen },
      el("summary", {}, `The ${plural(samples.length, "sample")} with the largest effect`),
      table(["Sample", "True", "Was", "Is", "Gain"], lines, { class: "numbers", label: "Samples that change" }),
    ),
  );
}

function sampleName(run, sample) {
  const row = run.rows[sample];
  const picture = run.thumbnails[row];
  return el(
    "span",
    { class: "sample" },
    picture ? el("img", { src: picture, alt: "" }) : null,
    nameOf(run.embedded.ids?.[sample] ?? `#${row}`),
  );
}

// -- confusion ------------------------------------------------------------------------------------------------------

const CONFUSION_MODES = { share: "share of the row", count: "samples", cost: "total cost" };

function makeConfusion(getState) {
  let mode = "share";
  const view = new MatrixView({
    host: byId("confusion-matrix"),
    label: "Confusion: rows are true, columns are decided",
    problem: getState().workbench.problem,
    cell: (row, column, self) => confusionCell(row, column, self),
    paint: (self) => paintConfusion(getState(), self, mode),
  });
  replace(
    byId("confusion-mode"),
    Object.entries(CONFUSION_MODES).map(([key, label]) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(key === mode),
          onclick: (event) => {
            mode = key;
            for (const button of byId("confusion-mode").children)
              button.setAttribute("aria-pressed", String(button === event.target));
            view.paint();
          },
        },
        label,
      ),
    ),
  );
  return { view, paint: () => view.paint(), relayout: () => view.goTo(0) };
}

function confusionCell(row, column, view) {
  const opens = !(row.single && column.single);
  const show = (event) => (byId("confusion-detail").textContent = event.currentTarget.getAttribute("aria-label"));
  const cell = el("button", {
    type: "button",
    class: opens ? "opens" : "",
    onfocus: show,
    onmouseenter: show,
    onclick: opens ? () => view.open(row, column) : null,
  });
  cell.row = row;
  cell.column = column;
  return cell;
}

function paintConfusion(state, view, mode) {
  const { workbench, now, index } = state;
  const { problem } = workbench;
  const counts = now[index].counts;
  const costs = regretMatrix(workbench.U, problem);
  const found = view.cells.map((line) =>
    line.map((cell) => blockTotals(counts, costs, problem, cell.row.classes, cell.column.actions)),
  );
  const rowTotals = view.rows.map((row) =>
    row.classes.reduce((total, y) => total + rowSum(counts, y, problem.actionCount), 0),
  );
  const most = Math.max(1e-12, ...found.flat().map((one) => (mode === "cost" ? one.cost : 0)));
  view.cells.forEach((line, i) =>
    line.forEach((cell, j) => {
      const { count, cost, right } = found[i][j];
      const share = rowTotals[i] ? count / rowTotals[i] : 0;
      const value = mode === "cost" ? cost / most : share;
      cell.textContent =
        mode === "cost"
          ? cost
            ? short(cost)
            : "·"
          : mode === "count"
            ? count
              ? whole(count)
              : "·"
            : count
              ? percent(share, share < 0.095 ? 1 : 0).replace(" %", "")
              : "·";
      shade(cell, mode !== "cost" && right === count ? value : -value, 1);
      const verb = cell.column.abstains ? "abstained as" : "decided as";
      const opening = cell.classList.contains("opens") ? " Opens into its classes." : "";
      cell.setAttribute(
        "aria-label",
        `${cell.row.name} ${verb} ${cell.column.name}: ${plural(count, "sample")}, ${percent(share)} of the row, total cost ${short(cost)}${count ? ` (${short(cost / count)} per sample)` : ""}.${opening}`,
      );
    }),
  );
}

// The cells that cost most, independent of what the matrix shows.
function drawCostly(state) {
  const { workbench, now, index } = state;
  const { problem } = workbench;
  const costs = regretMatrix(workbench.U, problem);
  const counts = now[index].counts;
  const total = counts.reduce((sum, count, cell) => sum + count * costs[cell], 0);
  const cells = [...counts.keys()]
    .filter((cell) => counts[cell] * costs[cell] > 0)
    .sort((a, b) => counts[b] * costs[b] - counts[a] * costs[a])
    .slice(0, 9);
  const rows = cells.map((cell) => [
    el(
      "span",
      { class: "kind" },
      nameOf(problem.names[Math.floor(cell / problem.actionCount)]),
      " → ",
      nameOf(problem.actions[cell % problem.actionCount]),
    ),
    whole(counts[cell]),
    short(costs[cell]),
    percent((counts[cell] * costs[cell]) / total, 0),
  ]);
  replace(
    byId("costly"),
    rows.length
      ? table(["True → decided", "Samples", "Cost each", "Share"], rows, {
          class: "numbers",
          label: "Costliest cells",
        })
      : el("p", { class: "hint" }, "No cost: every sample got the best action."),
  );
}

function rowSum(counts, y, actionCount) {
  let total = 0;
  for (let a = 0; a < actionCount; a++) total += counts[y * actionCount + a];
  return total;
}

function blockTotals(counts, costs, problem, classes, actions) {
  const totals = { count: 0, cost: 0, right: 0 };
  for (const y of classes) {
    for (const a of actions) {
      const cell = y * problem.actionCount + a;
      totals.count += counts[cell];
      totals.cost += counts[cell] * costs[cell];
      if (problem.decidedClass[a] === y) totals.right += counts[cell];
    }
  }
  return totals;
}

// -- mistakes -------------------------------------------------------------------------------------------------------

const MOST_MISTAKES = 30;

// The library's list covers all samples; after an edit, the page ranks the embedded samples.
function currentMistakes(state) {
  const { workbench, index } = state;
  const run = workbench.runs[index];
  if (!workbench.isEdited()) return run.mistakes;
  const { problem, U } = workbench;
  const result = workbench.results[index];
  const costs = regretMatrix(U, problem);
  const costOf = (i) => costs[run.targets[i] * problem.actionCount + result.actions[i]];
  const worst = [...run.targets.keys()]
    .filter((i) => costOf(i) > 0)
    .sort((a, b) => costOf(b) - costOf(a) || result.confidence[b] - result.confidence[a])
    .slice(0, MOST_MISTAKES);
  return worst.map((i) => {
    const decided = problem.decidedClass[result.actions[i]];
    const belief = (y) => probability(run, i, y, result.levels, result.ratio);
    return {
      id: run.embedded.ids?.[i] ?? String(run.rows[i]),
      row: run.rows[i],
      true: run.targets[i],
      action: result.actions[i],
      cost: costOf(i),
      true_probability: belief(run.targets[i]),
      decided_probability: decided >= 0 ? belief(decided) : null,
    };
  });
}

function drawMistakes(state) {
  const { workbench, index } = state;
  const { problem } = workbench;
  const run = workbench.runs[index];
  const listed = currentMistakes(state).slice(0, MOST_MISTAKES);
  const pictures = Object.keys(run.thumbnails).length > 0;
  const looked = Object.keys(run.attention ?? {}).length > 0;
  const where = looked ? " Coloured: what spoke for the class that was decided (Grad-CAM)." : "";
  byId("mistakes-text").textContent = listed.length
    ? `Cost is how much more the best action would have been worth. The costliest come first; among equals, those with the highest confidence.${where}`
    : "No decision cost anything: every sample got the best action for its true class.";
  const rows = listed.map((one) => [
    el(
      "span",
      { class: "sample" },
      pictures ? picture(run.thumbnails[one.row]) : null,
      looked ? picture(run.attention[one.row]) : null,
      nameOf(one.id),
    ),
    nameOf(problem.names[one.true]),
    nameOf(problem.actions[one.action]),
    decimal(one.cost, 2),
    percent(one.true_probability),
    percent(one.decided_probability),
  ]);
  replace(
    byId("mistake-list"),
    listed.length
      ? table(["Sample", "True", "Decided", "Cost", "p(true class)", "p(decision)"], rows, {
          class: "numbers mistakes",
          label: "Costliest mistakes",
        })
      : null,
  );
}

// -- contact sheets -------------------------------------------------------------------------------------------------

const SHEETS = {
  hardest: ["The hardest", "Their true class has the lowest probability: mislabelled samples are often among them."],
  uncertain: ["The most uncertain", "Their probabilities have the highest entropy: a label or a second look pays here."],
};

function drawSheets(run, problem) {
  const shown = Object.entries(SHEETS).filter(([name]) => run.sheets?.[name]?.length);
  byId("sheets").hidden = !shown.length;
  const card = (one) =>
    el(
      "figure",
      { class: "card", title: one.id },
      picture(run.thumbnails[one.row]),
      el("figcaption", {}, nameOf(problem.names[one.true]), `: ${percent(one.true_probability, 0)}`),
    );
  const sheet = ([name, [title, text]]) => [
    el("h3", {}, title),
    el("p", {}, `${text} Below each: its true class and the probability of it.`),
    el("div", { class: "sheet" }, ...run.sheets[name].map(card)),
  ];
  replace(byId("sheet-list"), ...shown.map(sheet));
}

const picture = (source) => (source ? el("img", { src: source, alt: "" }) : el("span", { class: "no-picture" }));

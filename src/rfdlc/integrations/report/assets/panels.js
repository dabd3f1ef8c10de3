// What follows the editor: consequences, changes, confusion, mistakes. And the charts.

// -- consequences ---------------------------------------------------------------------------------------------------

// key, label, percent, better, from the figures of the workbench
function consequenceRows(problem) {
  const regions = problem.rank ? REGIONS.filter((name) => problem.regions[name]?.length) : [];
  const shares = problem.rank ? problem.headFractions : [];
  return [
    ["accuracy", "Accuracy", true, 1, (f) => f.accuracy],
    ...regions.map((name) => [`accuracy.${name}`, `› of the ${name}`, true, 1, (f) => f.regions[name]]),
    ...(problem.rank ? [["false_head_rate", "False head rate", true, -1, (f) => f.falseHeadRate]] : []),
    ...shares.map((share, i) => [
      `false_head_rate.${share}`,
      `› head = first ${100 * share} %`,
      true,
      -1,
      (f) => f.falseHeadRates[i],
    ]),
    ["mean_utility", "Mean utility by this matrix", false, 1, (f) => f.meanUtility],
    ["mean_regret", "Mean regret by this matrix", false, -1, (f) => f.meanRegret],
    ["abstention", "Handed over", true, 0, (f) => f.abstention],
    ["kept_accuracy", "Accuracy where decided", true, 1, (f) => f.keptAccuracy],
    ["ece", "Calibration error (ECE)", true, -1, (f) => f.ece],
  ];
}

const ROUNDING = 1e-12; // of two sums of the same things in another order

function changeMark(before, now, percents, better) {
  const same = Math.abs(now - before) <= ROUNDING * Math.abs(before);
  const text = difference(same ? 0 : now - before, percents);
  const way = text === "±0" || text === "" || better === 0 ? "same" : (now - before) * better > 0 ? "better" : "worse";
  return el("span", { class: `change ${way}` }, text);
}

function drawConsequences(state) {
  const { workbench, before, now } = state;
  const rows = consequenceRows(workbench.problem);
  const single = workbench.runs.length === 1;
  const heads = single
    ? ["As given", "Now", "Change"]
    : workbench.runs.map((run, i) =>
        el("span", {}, el("span", { class: `key line run-${i}`, "aria-hidden": "true" }), nameOf(run.name)),
      );
  const body = rows.map(([key, label, percents, better, get]) => [
    figureName(label),
    ...workbench.runs.flatMap((_, i) => {
      const [was, is] = [get(before[i]), get(now[i])];
      const value = el("span", { "data-figure": key, "data-run": i, "data-value": is }, shown(is, percents));
      const mark = changeMark(was, is, percents, better);
      return single ? [shown(was, percents), value, mark] : [el("span", {}, value, " ", mark)];
    }),
  ]);
  replace(byId("consequences"), table(["", ...heads], body, { class: "figures", label: "Figures as given and now" }));
}

function drawStrip(state) {
  const { workbench, before, now, index } = state;
  const wanted = ["accuracy", "accuracy.tail", "false_head_rate", "mean_utility", "abstention"];
  const names = { "accuracy.tail": "Tail accuracy", mean_utility: "Mean utility" };
  const chips = consequenceRows(workbench.problem)
    .filter(([key]) => wanted.includes(key))
    .map(([key, label, percents, better, get]) =>
      el(
        "div",
        {},
        el("span", { class: "name" }, names[key] ?? label),
        el("strong", {}, shown(get(now[index]), percents)),
        changeMark(get(before[index]), get(now[index]), percents, better),
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
        "None yet: the decisions are those of the given utility. Edit the matrix, or move a slider.",
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
    table(["From → to", "Samples", "Now right", "No longer right", "Utility gained"], rows, {
      class: "figures",
      label: "Changes by kind",
    }),
    more,
    el(
      "details",
      { open: wasOpen },
      el("summary", {}, `The ${plural(samples.length, "sample")} with the largest effect`),
      table(["Sample", "True", "Was", "Is", "Gain"], lines, { class: "figures", label: "Samples that change" }),
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
      const verb = cell.column.handsOver ? "handed over as" : "decided as";
      const opening = cell.classList.contains("opens") ? " Open for its classes." : "";
      cell.setAttribute(
        "aria-label",
        `${cell.row.name} ${verb} ${cell.column.name}: ${plural(count, "sample")}, ${percent(share)} of the row, costing ${short(cost)} in all${count ? ` (${short(cost / count)} each)` : ""}.${opening}`,
      );
    }),
  );
}

// The cells that cost most, whatever is shown of the matrix.
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
      ? table(["True → decided", "Samples", "Cost each", "Of the cost"], rows, {
          class: "figures",
          label: "Costliest cells",
        })
      : el("p", { class: "hint" }, "Nothing: every sample got the best action."),
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

// The library's list covers every sample; once something is edited, the page ranks the samples that it has.
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
  byId("mistakes-text").textContent = listed.length
    ? "What the best action would have been worth more, the costliest first; among equals, those the model was surest of."
    : "No decision cost anything: every sample got the best action for what was true.";
  const rows = listed.map((one) => [
    el("span", { class: "sample" }, pictures ? picture(run.thumbnails[one.row]) : null, nameOf(one.id)),
    nameOf(problem.names[one.true]),
    nameOf(problem.actions[one.action]),
    decimal(one.cost, 2),
    percent(one.true_probability),
    percent(one.decided_probability),
  ]);
  replace(
    byId("mistake-list"),
    listed.length
      ? table(["Sample", "True", "Decided", "Cost", "Belief in the truth", "Belief in the decision"], rows, {
          class: "figures mistakes",
          label: "Costliest mistakes",
        })
      : null,
  );
}

const picture = (source) => (source ? el("img", { src: source, alt: "" }) : el("span", { class: "no-picture" }));

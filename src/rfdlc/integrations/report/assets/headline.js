// What was decided, the headline, runs side by side, and how it was made: figures of the library, as they came.

// name in Evaluation.flat(), label, percent, and which way is better (0: neither)
const REGIONS = ["head", "med", "tail"];
const HEADLINE = [
  ["accuracy", "Accuracy", true, 1],
  ...REGIONS.map((region) => [`accuracy_by_region.${region}`, `› of the ${region}`, true, 1]),
  ["balanced_accuracy", "Balanced accuracy", true, 1],
  ["macro_f1", "Macro F1", true, 1],
  ["false_head_rate", "False head rate", true, -1],
  ...["0.25", "0.5", "0.75"].map((share) => [`false_head_rates.${share}`, `› head = first ${100 * share} %`, true, -1]),
  ["mean_utility", "Mean utility", false, 1],
  ["mean_regret", "Mean regret", false, -1],
  ["abstention_rate", "Handed over", true, 0],
  ["kept_accuracy", "Accuracy where decided", true, 1],
  ["ece", "Calibration error (ECE)", true, -1],
  ...REGIONS.map((region) => [`ece_by_region.${region}`, `› of the ${region} (ECE)`, true, -1]),
  ["error_auc", "Finding errors (AUC)", true, 1],
  ["risk_coverage_area", "Risk-coverage area", false, -1],
  ["brier", "Brier score", false, -1],
  ["nll", "Negative log-likelihood", false, -1],
];

// A label that starts with › belongs to the figure above it.
const figureName = (label) => (label.startsWith("› ") ? el("span", { class: "sub" }, label.slice(2)) : label);

const shown = (value, percents) => (percents ? percent(value) : decimal(value));

function intervalText(run, name, percents) {
  const bounds = run.figures.intervals[name];
  return bounds && bounds[0] !== bounds[1]
    ? `${shown(bounds[0], percents).replace(" %", "")} to ${shown(bounds[1], percents)}`
    : "";
}

function lead(data, run) {
  const { names, counts } = data.classes;
  const spread = counts
    ? `, ${whole(Math.max(...counts))} to ${whole(Math.min(...counts))} training samples a class`
    : "";
  const how =
    run.decider.rule === "argmax"
      ? "the most probable class"
      : run.decider.rule === "expected-utility"
        ? "the highest expected utility"
        : `the rule ${run.decider.rule}`;
  const mean = run.decider.combine === "mean-logits" ? "mean logits" : "mean probabilities";
  const source = run.particles > 1 ? `the ${mean} of ${run.particles} particles` : "the probabilities of the model";
  const calibrated =
    run.calibration === null ? "not calibrated" : `calibrated: ${run.calibration.words}`;
  const corrected = run.target_prior ? ", corrected for the class prior where decisions are made" : "";
  return `${plural(run.samples, "sample")} of ${plural(names.length, "class", "classes")}${spread}. Decided by ${how}, from ${source}, ${calibrated}${corrected}.`;
}

function drawHeadline(data, run) {
  byId("lead").textContent = lead(data, run);
  const flat = run.figures.flat;
  const level = `${100 * data.level} % interval`;
  const card = (name, label, percents, extra = []) => {
    if (!isNumber(flat[name])) return null;
    const interval = intervalText(run, name, percents);
    return el(
      "div",
      { class: "card" },
      el("h3", {}, label),
      el("p", { class: "value" }, shown(flat[name], percents)),
      interval ? el("p", { class: "interval", title: level }, interval) : null,
      extra,
    );
  };
  const regionBars = REGIONS.filter((region) => isNumber(flat[`accuracy_by_region.${region}`])).map((region) =>
    meter(region, flat[`accuracy_by_region.${region}`]),
  );
  replace(byId("cards"), [
    card("accuracy", "Accuracy", true, regionBars),
    card("false_head_rate", "False head rate", true, [
      el("p", { class: "hint" }, "rare classes taken for frequent ones"),
    ]),
    card("mean_utility", "Mean utility", false, [el("p", { class: "hint" }, "by the utility of this report")]),
    card("ece", "Calibration error", true, [el("p", { class: "hint" }, "confidence against hits (ECE)")]),
    card("abstention_rate", "Handed over", true, [
      el(
        "p",
        { class: "hint" },
        flat.abstention_rate > 0 ? `accuracy of the rest ${percent(flat.kept_accuracy)}` : "every sample was decided",
      ),
    ]),
  ]);
  const rows = HEADLINE.filter(([name]) => isNumber(flat[name])).map(([name, label, percents]) => [
    figureName(label),
    shown(flat[name], percents),
    intervalText(run, name, percents),
  ]);
  replace(byId("all-figures"), table(["Figure", "Value", level], rows, { class: "figures", label: "All figures" }));
}

function meter(region, value) {
  const bar = el("span", { class: `fill ${region}` });
  bar.style.width = percent(value, 2).replace(" ", "");
  return el(
    "div",
    { class: "meter" },
    el("span", { class: "name" }, region),
    el("span", { class: "track", "aria-hidden": "true" }, bar),
    el("span", { class: "number" }, percent(value, 0)),
  );
}

function drawRuns(data, runs) {
  byId("runs").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const rows = HEADLINE.filter(([name]) => runs.some((run) => isNumber(run.figures.flat[name]))).map(
    ([name, label, percents, better]) => {
      const values = runs.map((run) => run.figures.flat[name]);
      const best = better === 0 ? null : (better > 0 ? Math.max : Math.min)(...values.filter(isNumber));
      return [
        figureName(label),
        ...runs.map((run, i) =>
          el(
            "span",
            { class: values[i] === best ? "best" : "" },
            shown(values[i], percents),
            el("small", {}, intervalText(run, name, percents)),
          ),
        ),
      ];
    },
  );
  const heads = runs.map((run, i) =>
    el("span", {}, el("span", { class: `key line run-${i}`, "aria-hidden": "true" }), nameOf(run.name)),
  );
  replace(byId("run-table"), table(["Figure", ...heads], rows, { class: "figures side", label: "Runs side by side" }));
}

// -- how it was made ------------------------------------------------------------------------------------------------

function flattened(settings, prefix = "") {
  return Object.entries(settings).flatMap(([name, value]) => {
    const path = prefix ? `${prefix}.${name}` : name;
    const inner = value !== null && typeof value === "object" && !Array.isArray(value);
    return inner ? flattened(value, path) : [[path, Array.isArray(value) ? value.join(", ") : String(value)]];
  });
}

function drawMade(data, run) {
  const { made } = data;
  const report = {
    "made with": `rfdlc ${made.rfdlc}, Python ${made.python}, numpy ${made.numpy}`,
    date: made.date,
    intervals: made.bootstrap ? `${100 * data.level} %, from ${made.bootstrap} resamplings, seed ${made.seed}` : "none",
    "in the editor":
      run.size === run.samples
        ? `all ${whole(run.samples)} samples`
        : `${whole(run.size)} of ${whole(run.samples)} samples, drawn by class with seed ${made.seed}`,
    probabilities: "16 bits each, within 0.02 % of their value",
  };
  const decider = {
    ...run.decider,
    utility: undefined,
    weights: run.decider.weights ?? "equal",
    fitted: run.calibration?.words ?? "not calibrated",
    train_prior: run.decider.train_prior ? "given" : "not given",
    target_prior: run.decider.target_prior ? "given" : "left alone",
  };
  const parts = {
    Report: report,
    Decider: decider,
    Data: run.made.source ? { source: run.made.source } : null,
    Settings: run.made.config,
    Environment: run.made.environment,
  };
  replace(
    byId("made-body"),
    Object.entries(parts)
      .filter(([, part]) => part && Object.keys(part).length)
      .map(([name, part]) =>
        el(
          "details",
          { open: name === "Report" || name === "Data" },
          el("summary", {}, name),
          table(
            ["Setting", "Value"],
            flattened(part).filter(([, value]) => value !== "undefined"),
            { class: "settings", label: name },
          ),
        ),
      ),
  );
}

// The headline, runs side by side, and how the report was made: numbers as the library computed them.

const REGIONS = ["head", "med", "tail"];

// A metric is an entry of `data.metrics`: { name, label, direction, unit, nested }. A `cost` is shown with its sign
// changed; values and the direction are those of the utility.
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const metricName = ({ label, nested }) => (nested ? el("span", { class: "sub" }, label) : capital(label));
const shown = (value, { unit, cost }) => (unit === "%" ? percent(value) : decimal(cost ? 0 - value : value));

function intervalText(run, metric) {
  const bounds = run.intervals[metric.name];
  return bounds && bounds[0] !== bounds[1]
    ? `${shown(bounds[metric.cost ? 1 : 0], metric).replace(" %", "")} to ${shown(bounds[metric.cost ? 0 : 1], metric)}`
    : "";
}

function lead(data, run) {
  const { names, counts } = data.classes;
  const spread = counts
    ? `, ${whole(Math.max(...counts))} to ${whole(Math.min(...counts))} training samples per class`
    : "";
  const how =
    run.decider.rule === "argmax"
      ? "the most probable class"
      : "the highest expected utility";
  const mean = run.decider.model.combine === "mean-logits" ? "mean logits" : "mean probabilities";
  const source = run.particles > 1 ? `the ${mean} of ${run.particles} particles` : "the probabilities of the model";
  const calibrated =
    run.calibration === null ? "not calibrated" : `calibrated (${run.calibration.words})`;
  const corrected = `, ${run.decided_for}`;
  const grouped = run.groups === null ? "" : ` in ${plural(run.groups, "group")}`;
  return `${plural(run.samples, "sample")}${grouped} of ${plural(names.length, "class", "classes")}${spread}. Decided by ${how}, from ${source}, ${calibrated}${corrected}.`;
}

function drawHeadline(data, run) {
  byId("lead").textContent = lead(data, run);
  const values = run.metrics;
  const level = `${100 * data.level} % interval`;
  const card = (name, hint, extra = []) => {
    const metric = data.metrics.find((one) => one.name === name);
    if (!metric || !isNumber(values[name])) return null;
    const interval = intervalText(run, metric);
    return el(
      "div",
      { class: "card" },
      el("h3", {}, capital(metric.label)),
      el("p", { class: "value" }, shown(values[name], metric)),
      interval ? el("p", { class: "interval", title: level }, interval) : null,
      hint ? el("p", { class: "hint" }, hint) : null,
      extra,
    );
  };
  const known = REGIONS.filter((region) => isNumber(values[`accuracy_by_region.${region}`]));
  const regionBars = known.map((region) => meter(region, values[`accuracy_by_region.${region}`]));
  const some = values.abstention_rate > 0;
  const kept = some ? `accuracy of the rest ${percent(values.kept_accuracy)}` : "every sample was decided";
  const answered = `${percent(values.kept_accuracy)} of the ${percent(1 - values.abstention_rate)} answered`;
  replace(byId("cards"), [
    card("accuracy", some ? `${answered}; abstained counts as wrong` : "", regionBars),
    card("false_head_rate", "rare classes decided as frequent ones"),
    card("mean_utility", data.costs ? "by the costs of this report; lower is better" : "by the utility of this report"),
    card("ece", "confidence against accuracy"),
    card("abstention_rate", kept),
  ]);
  const rows = data.metrics
    .filter(({ name }) => isNumber(values[name]))
    .map((metric) => [metricName(metric), shown(values[metric.name], metric), intervalText(run, metric)]);
  replace(byId("all-metrics"), table(["Metric", "Value", level], rows, { class: "numbers", label: "All metrics" }));
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

// The paired difference from the first run, with its interval; * where it is significant among all metrics.
function pairedText([value, low, high, p], metric) {
  const given = metric.cost ? [value, high, low].map((one) => 0 - one) : [value, low, high];
  const [by, from, to] = given.map((one) => difference(one, metric.unit === "%"));
  return `${by} (${from} to ${to})${p < 0.05 ? " *" : ""}`;
}

function drawRuns(data, runs) {
  byId("runs").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const metrics = data.metrics.filter(({ name }) => runs.some((run) => isNumber(run.metrics[name])));
  const side = (listed, label) => {
    const rows = listed.map((metric) => {
      const values = runs.map((run) => run.metrics[metric.name]);
      const pick = { higher: Math.max, lower: Math.min }[metric.direction];
      const best = pick ? pick(...values.filter(isNumber)) : null;
      return [
        metricName(metric),
        ...runs.map((run, i) =>
          el(
            "span",
            { class: values[i] === best ? "best" : "" },
            shown(values[i], metric),
            el("small", {}, intervalText(run, metric)),
            run.compared?.[metric.name] ? el("small", { class: "paired" }, pairedText(run.compared[metric.name], metric)) : null,
          ),
        ),
      ];
    });
    return table(["Metric", ...runs.map(runHead)], rows, { class: "numbers side", label });
  };
  replace(byId("run-table"), [
    side(metrics.filter(({ headline }) => headline), "Runs side by side"),
    el("details", {}, el("summary", {}, "All metrics"), side(metrics, "All metrics of the runs")),
  ]);
}

const runHead = (run, i) =>
  el("span", {}, el("span", { class: `key line run-${i}`, "aria-hidden": "true" }), nameOf(run.name));

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
    intervals: `${100 * data.level} %, about other test ${run.groups === null ? "" : "groups of "}samples: the model and its calibration are held fixed`,
    "in the editor":
      run.size === run.samples
        ? `all ${whole(run.samples)} samples`
        : `${whole(run.size)} of ${whole(run.samples)} samples, drawn by class with seed ${made.seed}`,
    probabilities: "16 bits each, within 0.02 % of their value",
  };
  const model = run.decider.model;
  const decider = {
    ...run.decider,
    ...model,
    utility: undefined,
    model: undefined,
    weights: model.weights ?? "equal",
    calibrator: run.calibration?.words ?? "not calibrated",
    train_prior: model.train_prior ? "given" : "not given",
    target_prior: model.target_prior ? "given" : "none: the prior is not corrected",
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

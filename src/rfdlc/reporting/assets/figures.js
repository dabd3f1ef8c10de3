// The charts: what the library computed, and the result of the editor beside it.

const chartHost = (name) => document.querySelector(`[data-chart="${name}"]`);
const emptyChart = (name, text) => replace(chartHost(name), el("p", { class: "hint empty" }, text));
const NEEDS_COUNTS =
  "Needs the training counts of the classes: rfdlc report … --classes counts.csv, with columns class,count.";
const ALL_ABSTAINED = "Every sample was abstained on.";
const several = (state) => state.workbench.runs.length > 1;

// From 0 to a little above the highest point.
function rateAxis(label, series) {
  const most = Math.max(0.05, ...series.flatMap((one) => one.points.map((point) => point.y)));
  return percentAxis(label, [0, Math.min(1, most * 1.1)]);
}

// The penalty of a point of the frontier, or nothing where the label would cover that of an earlier point.
function labelled(frontier, point) {
  const spread = (name) => Math.max(...frontier.map((one) => one[name])) - Math.min(...frontier.map((one) => one[name]));
  const far = (one, name) => Math.abs(one[name] - point[name]) / Math.max(spread(name), 1e-9);
  const earlier = frontier.slice(0, frontier.indexOf(point));
  const near = earlier.some((one) => far(one, "false_head_rate") < 0.08 && far(one, "accuracy") < 0.08);
  return near ? null : short(point.penalty);
}

const CHARTS = {
  distribution(state) {
    const { problem } = state.workbench;
    if (!problem.counts) return emptyChart("distribution", NEEDS_COUNTS);
    const bars = problem.classOrder.map((y, place) => ({
      x: place,
      end: place + 1,
      y: Math.max(problem.counts[y], 0.8),
      name: problem.names[y],
      class: problem.regionOf[y],
      region: problem.regionOf[y],
      title: `${problem.names[y]}: ${whole(problem.counts[y])} training samples`,
    }));
    const series = REGIONS.map((region) => ({
      kind: "bars",
      name: region,
      class: region,
      gap: bars.length > 60 ? 0 : 1.5,
      points: bars.filter((bar) => bar.region === region),
    }));
    const domain = [0.8, Math.max(...problem.counts) * 1.3];
    chart(chartHost("distribution"), {
      label: "Training samples of each class, by falling number",
      series: series.filter((one) => one.points.length),
      x: {
        label: "classes by falling frequency",
        domain: [0, bars.length],
        format: whole,
        ticks: niceTicks(0, bars.length, 5).filter(Number.isInteger),
      },
      y: { label: "training samples", domain, bend: Math.log, log: true, format: whole },
    });
  },

  "by-class"(state) {
    const { problem, runs } = state.workbench;
    if (!problem.counts) return emptyChart("by-class", NEEDS_COUNTS);
    const run = runs[state.index];
    const edited = state.workbench.isEdited();
    const now = edited ? classAccuracies(state.now[state.index].counts, problem) : run.by_class.accuracy;
    const dots = (values, region) =>
      problem.classOrder
        .filter((y) => problem.regionOf[y] === region && isNumber(values[y]))
        .map((y) => ({
          x: Math.max(1, problem.counts[y]),
          y: values[y],
          r: problem.names.length > 60 ? 3.2 : 4.5,
          name: problem.names[y],
          title: `${problem.names[y]}: ${percent(values[y])} of ${plural(run.by_class.samples[y], "sample")}, ${whole(problem.counts[y])} in training`,
        }));
    const label = problem.names.length <= 12;
    const series = REGIONS.map((region) => ({
      kind: "points",
      name: region,
      class: region,
      points: dots(now, region).map((dot) => ({ ...dot, text: label ? dot.name : null })),
    }));
    if (edited)
      series.unshift({
        kind: "points",
        name: "as given",
        class: "ghost",
        points: REGIONS.flatMap((region) => dots(run.by_class.accuracy, region)),
      });
    chart(chartHost("by-class"), {
      label: "Accuracy of each class against its training samples",
      series: series.filter((one) => one.points.length),
      x: logAxis("training samples", problem.counts),
      y: percentAxis("accuracy", [0, 1.05]),
    });
  },

  "false-head"(state) {
    const { problem, runs } = state.workbench;
    if (!problem.counts) return emptyChart("false-head", NEEDS_COUNTS);
    const series = runs.map((run, i) => ({
      kind: "line",
      class: `run-${i}`,
      name: several(state) ? run.name : state.workbench.isEdited() ? "as given" : null,
      points: run.false_head_curve.map((point) => ({ x: point.share, y: point.rate })),
    }));
    if (state.workbench.isEdited()) {
      const rates = state.now[state.index].falseHeadBySize;
      series.push({
        kind: "line",
        class: "edited",
        name: "with the edited utility",
        points: runs[state.index].false_head_curve.map(({ share }) => ({
          x: share,
          y: rates[headSize(problem.classCount, share)],
        })),
      });
    }
    chart(chartHost("false-head"), {
      label: "False head rate against the share of head classes",
      series,
      x: percentAxis("share of the classes that count as head"),
      y: rateAxis("tail decided as head", series),
    });
  },

  frontier(state) {
    const { workbench, now, index } = state;
    const { problem, runs } = workbench;
    if (!problem.counts) return emptyChart("frontier", NEEDS_COUNTS);
    const series = runs.map((run, i) => ({
      kind: "path",
      class: `run-${i}`,
      name: several(state) ? run.name : null,
      points: run.frontier.map((point) => ({
        x: point.false_head_rate,
        y: point.accuracy,
        text: !several(state) || i === index ? labelled(run.frontier, point) : null,
        name: `penalty ${short(point.penalty)}: ${short(point.false_head_rate)}`,
        title: `penalty ${short(point.penalty)}: accuracy ${percent(point.accuracy)}, false heads ${percent(point.false_head_rate)}`,
      })),
    }));
    const here = now[index].metrics;
    series.push({
      kind: "points",
      class: "here",
      name: workbench.isEdited() ? "the edited utility" : "this report",
      points: [{ x: here.false_head_rate, y: here.accuracy, r: 6, title: "now" }],
    });
    const all = series.flatMap((one) => one.points).filter((point) => isNumber(point.x));
    if (!all.length) return emptyChart("frontier", "Needs samples of rare classes; there are none here.");
    const pad = (axis, part) => {
      const values = all.map((point) => point[axis]);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const room = Math.max(0.01, (high - low) * part);
      return [Math.max(0, low - room), Math.min(1, high + room)];
    };
    chart(chartHost("frontier"), {
      label: "Accuracy against false head rate as the penalty grows",
      series,
      x: percentAxis("false head rate", pad("x", 0.12)),
      y: percentAxis("accuracy", pad("y", 0.15)),
    });
    const run = runs[index];
    const part = run.frontier_samples < run.samples ? ` From ${whole(run.frontier_samples)} samples.` : "";
    byId("frontier-caption").textContent =
      `The same probabilities, decided with a tail-sensitive utility: each dot is labelled with its penalty for false heads. Better is up and to the left.${part}`;
  },

  reliability(state) {
    const run = state.workbench.runs[state.index];
    const most = Math.max(...run.reliability.all.map((bin) => bin.samples));
    const series = Object.entries(run.reliability)
      .filter(([name, bins]) => bins.length && (name !== "all" || Object.keys(run.reliability).length === 1))
      .map(([name, bins]) => ({
        kind: "path",
        class: name === "all" ? "run-0" : name,
        name: `${name}${isNumber(run.metrics[`ece_by_region.${name}`]) ? ` (ECE ${percent(run.metrics[`ece_by_region.${name}`])})` : ""}`,
        points: bins.map((bin) => ({
          x: bin.confidence,
          y: bin.accuracy,
          r: 2 + 5 * Math.sqrt(bin.samples / most),
          title: `${name}: confidence ${percent(bin.confidence)}, right ${percent(bin.accuracy)}, ${plural(bin.samples, "sample")}`,
        })),
      }));
    series.unshift({
      kind: "line",
      class: "diagonal",
      silent: true,
      points: [
        { x: 0, y: 0 },
        { x: 1, y: 1 },
      ],
    });
    chart(chartHost("reliability"), {
      label: "Share of right answers against confidence, by region",
      series,
      x: percentAxis("confidence (largest probability)"),
      y: percentAxis("right"),
    });
  },

  "risk-coverage"(state) {
    const { runs } = state.workbench;
    if (!runs.some((run) => run.risk_coverage.length)) return emptyChart("risk-coverage", ALL_ABSTAINED);
    const series = runs.map((run, i) => ({
      kind: "line",
      class: `run-${i}`,
      name: several(state) ? run.name : null,
      points: run.risk_coverage.map((point) => ({ x: point.coverage, y: point.risk })),
    }));
    chart(chartHost("risk-coverage"), {
      label: "Error rate against the share of samples that are decided",
      series,
      x: percentAxis("share of the samples that are decided"),
      y: rateAxis("error rate", series),
    });
  },

  promised(state) {
    const run = state.workbench.runs[state.index];
    const most = Math.max(...run.promised.map((one) => one.samples));
    const { worth, sign } = state.workbench.problem;
    const ends = run.promised.flatMap((one) => [sign * one.promised, sign * one.realised]);
    const room = Math.max(1e-6, 0.08 * (Math.max(...ends) - Math.min(...ends)));
    const domain = [Math.min(...ends) - room, Math.max(...ends) + room];
    const diagonal = domain.map((value) => ({ x: value, y: value }));
    const within = (name) => {
      const bounds = run.intervals[name];
      const [low, high] = bounds ? bounds.map((one) => sign * one).sort((a, b) => a - b) : [];
      return bounds ? ` (95 % interval ${decimal(low)} to ${decimal(high)})` : "";
    };
    const points = run.promised.map((one) => ({
      x: sign * one.promised,
      y: sign * one.realised,
      r: 2.5 + 5 * Math.sqrt(one.samples / most),
      name: one.action,
      title: `${one.action}: promised ${decimal(sign * one.promised)}, realised ${decimal(sign * one.realised)}, difference ${decimal(sign * (one.promised - one.realised))}${within(`utility_gap_by_action.${one.action}`)}, ${plural(one.samples, "sample")}`,
    }));
    const span = domain[1] - domain[0];
    const named = [];  // a name that would lie on another one is in the title of its dot alone
    for (const point of run.promised.length > 12 ? [] : [...points].sort((a, b) => b.r - a.r)) {
      const place = (point.x - domain[0]) / span;
      const width = 0.04 + 0.018 * point.name.length;  // about, as a share of the axis
      const [from, to] = place > 0.6 ? [place - width, place] : [place, place + width];
      const hides = (other) => from < other.to && other.from < to && Math.abs(other.y - point.y) < 0.08 * span;
      if (from < 0 || to > 1.05 || named.some(hides)) continue;
      named.push({ from, to, y: point.y });
      Object.assign(point, { text: point.name, dx: place > 0.6 ? -8 : 8 });
    }
    chart(chartHost("promised"), {
      label: `Realised against promised ${worth} of each action`,
      series: [
        { kind: "line", class: "diagonal", silent: true, points: diagonal },
        { kind: "points", class: "run-0", name: "actions", points },
      ],
      x: { label: `expected ${worth}`, domain, format: short },
      y: { label: `realised ${worth}`, domain, format: short },
    });
    const unnamed = ([, name]) => {  // the sentence names the others
      const [low, high] = run.intervals[name] ?? [0, 0];
      return isNumber(run.metrics[name]) && low <= 0 && high >= 0;
    };
    const regions = ["head", "med", "tail"]
      .map((region) => [region, `utility_gap_by_region.${region}`])
      .filter(unnamed)
      .map(([region, name]) => `${region} ${decimal(sign * run.metrics[name])}${within(name)}`);
    byId("promised-caption").textContent =
      `Each dot is a decided action. ${sign < 0 ? "Above" : "Below"} the diagonal it was worth less than expected. ${run.promise}${regions.length ? ` Met in predicted regions: ${regions.join(", ")}.` : ""}`;
  },

  uncertainty(state) {
    const run = state.workbench.runs[state.index];
    const kinds = Object.keys(run.uncertainties);
    if (!kinds.length) return emptyChart("uncertainty", ALL_ABSTAINED);
    const kind = chosenOption(byId("uncertainty"), kinds);
    const { edges, right, wrong, auc } = run.uncertainties[kind];
    const bars = (shares, name) => ({
      kind: "bars",
      class: name,
      name: `${name} decisions`,
      points: shares.map((share, i) => ({
        x: edges[i],
        end: edges[i + 1],
        y: share,
        title: `${percent(share)} of the ${name} decisions`,
      })),
    });
    chart(chartHost("uncertainty"), {
      label: "Uncertainty of right and of wrong decisions",
      series: [bars(right, "right"), bars(wrong, "wrong")],
      x: { label: kind, domain: [0, edges.at(-1)], format: short },
      y: percentAxis("share of the decisions", [0, Math.max(...right, ...wrong) * 1.08]),
    });
    byId("uncertainty-caption").textContent =
      `The farther apart the two are, the better uncertainty detects errors.${isNumber(auc) ? ` A wrong decision has a higher uncertainty than a right one with probability ${percent(auc)} (AUC).` : ""}`;
  },

  sets(state) {
    const run = state.workbench.runs[state.index];
    if (!run.sets) return;
    const { points, now, words, samples } = run.sets;
    const slider = byId("sets");
    if (slider.run !== run) Object.assign(slider, { run, max: String(points.length - 1), value: String(now) });
    const chosen = points[Number(slider.value)];
    const kinds = { marginal: "all samples", macro: "mean over classes", worst: "worst class" };
    const series = Object.keys(kinds).map((kind, i) => ({
      kind: "line",
      class: `run-${i}`,
      name: kinds[kind],
      points: points.map((point) => ({ x: point.size, y: point[kind] })),
    }));
    series.push({
      kind: "points",
      class: "here",
      name: "chosen",
      points: Object.keys(kinds).map((kind) => ({ x: chosen.size, y: chosen[kind], r: 5, title: kinds[kind] })),
    });
    chart(chartHost("sets"), {
      label: "Coverage of prediction sets against their mean size",
      series,
      x: logAxis("classes per set", points.map((point) => point.size)),
      y: percentAxis("coverage", [0, 1.05]),
    });
    byId("sets-value").textContent = `${percent(chosen.marginal)} covered, ${decimal(chosen.size)} classes per set`;
    byId("sets-caption").textContent =
      `Share of sets that contain the true class: ${percent(chosen.marginal)} of all samples, ${percent(chosen.macro)} in the mean over classes, ${percent(chosen.worst)} of the worst class, with ${decimal(chosen.size)} classes per set. Fitted: ${words}. The slider multiplies all thresholds by one factor; measured on ${samples < run.samples ? `${whole(samples)} of these` : "these"} samples, which promises nothing about others.`;
  },

  budget(state) {
    const points = state.workbench.runs[state.index].budget;
    if (!points) return;
    const place = Number(byId("budget").value);
    const [before, chosen, next] = [points[0], points[place], points[Math.min(place + 1, points.length - 1)]];
    const { worth, sign } = state.workbench.problem;
    const values = points.map((point) => sign * point.utility);
    const margin = Math.max(1e-6, 0.08 * (Math.max(...values) - Math.min(...values)));
    chart(chartHost("budget"), {
      label: `Mean ${worth} against the share that is handed over`,
      series: [
        { kind: "line", class: "run-0", name: `mean ${worth}`, points: points.map((p) => ({ x: p.share, y: sign * p.utility })) },
        { kind: "points", class: "here", name: "chosen", points: [{ x: chosen.share, y: sign * chosen.utility, r: 5, title: percent(chosen.share) }] },
      ],
      x: percentAxis("at most handed over", [0, 1]),
      y: { label: `mean ${worth}`, domain: [Math.min(...values) - margin, Math.max(...values) + margin], format: short },
    });
    byId("budget-value").textContent = `at most ${percent(chosen.share)} handed over, ${worth} ${decimal(sign * chosen.utility)}`;
    byId("budget-caption").textContent =
      `With at most ${percent(chosen.share)} handed over, those for which it is worth most, the mean ${worth} of these samples is ${decimal(sign * chosen.utility)}, ${decimal(chosen.utility - before.utility)} better than without. The next percent brings ${decimal(next.utility - chosen.utility)}. For the ${worth} that the report was written with.`;
  },

  history(state) {
    const run = state.workbench.runs[state.index];
    const history = run.made.history ?? {};
    const columns = Object.keys(history).filter((name) => name !== "epoch");
    if (!columns.length) return;
    const column = chosenOption(byId("history"), columns);
    const series = state.workbench.runs
      .filter((one) => one.made.history?.[column])
      .map((one, i) => ({
        kind: "line",
        class: `run-${i}`,
        name: several(state) ? one.name : null,
        points: one.made.history[column]
          .map((value, row) => ({ x: one.made.history.epoch?.[row] ?? row + 1, y: value }))
          .filter((point) => isNumber(point.y)),
      }));
    const points = series.flatMap((one) => one.points);
    const [low, high] = [Math.min(...points.map((p) => p.y)), Math.max(...points.map((p) => p.y))];
    chart(chartHost("history"), {
      label: `${column} during training`,
      series,
      x: {
        label: "epoch",
        domain: [Math.min(...points.map((p) => p.x)), Math.max(...points.map((p) => p.x))],
        format: short,
      },
      y: { label: column, domain: [low, high + (high - low) * 0.05 + 1e-9], format: short },
    });
  },
};

// These change when the utility is edited; the others are about the probabilities.
const FOLLOWING = ["by-class", "false-head", "frontier"];

function chosenOption(select, names) {
  const before = names.includes(select.value) ? select.value : names[0];
  if ([...select.options].map((option) => option.value).join("\n") !== names.join("\n"))
    replace(
      select,
      names.map((name) => el("option", { value: name }, name)),
    );
  select.value = before;
  return before;
}

// The state of the editor and its results: utility, temperature and prior in, decisions and metrics out.

const ABSTAIN = "abstain";

// What all runs share. Actions are only ever added at the end, so the index of an action never changes; `allowed`
// says which of them can be chosen.
function makeProblem(data) {
  const { names, counts, rank, regions, groups } = data.classes;
  const problem = {
    names,
    counts,
    rank,
    regions,
    groups,
    classCount: names.length,
    classOrder: [...names.keys()].sort((a, b) => (rank ? rank[a] - rank[b] : a - b)),
    regionOf: rank ? regionOfEach(regions, names.length) : null,
    headFractions: data.head_fractions,
    metrics: data.metrics,
    worth: data.costs ? "cost" : "utility",
    sign: data.costs ? -1 : 1, // costs are utilities with their sign changed
    actions: [],
    decidedClass: [],
    actionOf: names.map(() => -1),
    allowed: [],
    actionCount: 0,
  };
  data.actions.forEach((name) => addAction(problem, name));
  return problem;
}

function regionOfEach(regions, classCount) {
  const regionOf = new Array(classCount);
  for (const [name, members] of Object.entries(regions)) for (const y of members) regionOf[y] = name;
  return regionOf;
}

function addAction(problem, name) {
  const decided = problem.names.indexOf(name);
  problem.actions.push(name);
  problem.decidedClass.push(decided);
  problem.allowed.push(true);
  if (decided >= 0) problem.actionOf[decided] = problem.actionCount;
  problem.actionCount++;
}

// A matrix with more actions: old columns keep their places, new ones are 0.
function widen(U, classCount, before, after) {
  const wide = new Float64Array(classCount * after);
  for (let y = 0; y < classCount; y++) wide.set(U.subarray(y * before, (y + 1) * before), y * after);
  return wide;
}

class Workbench {
  constructor(problem, utility, runs, step) {
    Object.assign(this, { problem, runs, step, listeners: [] });
    this.given = { utility, allowed: [...problem.allowed] };
    this.U = utility.slice();
    this.temperature = 1;
    this.prior = { target: "given", carried: "given", own: null };
    this.base = runs.map((_, i) => this.decideRun(i));
    this.addAbstain();
    this.results = runs.map((_, i) => this.decideRun(i));
  }

  // The action to abstain always exists, allowed or not. It has another name if a class is called like it.
  addAbstain() {
    const { problem } = this;
    const name = problem.names.includes(ABSTAIN) ? "abstain (action)" : ABSTAIN;
    this.abstainAction = problem.actions.indexOf(name);
    if (this.abstainAction >= 0) return;
    this.addColumns([name]);
    this.abstainAction = problem.actionCount - 1;
    problem.allowed[this.abstainAction] = false;
    this.given.allowed.push(false);
  }

  addColumns(names) {
    const before = this.problem.actionCount;
    names.forEach((name) => addAction(this.problem, name));
    const grow = (matrix) => widen(matrix, this.problem.classCount, before, this.problem.actionCount);
    this.U = grow(this.U);
    this.given.utility = grow(this.given.utility);
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  // Several input events may arrive within one frame: only the last one counts.
  changed() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.recompute();
    });
  }

  recompute() {
    this.results = this.runs.map((_, i) => this.decideRun(i));
    this.listeners.forEach((listener) => listener());
  }

  decideRun(index) {
    const { problem, U } = this;
    const run = this.runs[index];
    const choices = [...problem.classOrder.map((y) => problem.actionOf[y]), ...problem.actions.keys()].filter(
      (a, i, all) => a >= 0 && problem.allowed[a] && all.indexOf(a) === i,
    );
    const columns = encodeColumns(U, problem.classCount, problem.actionCount, choices);
    const levels = this.levels();
    const ratio = this.ratio(run);
    return { ...decide(run, U, columns, levels, ratio), levels, ratio };
  }

  // Metrics of decisions by the current matrix: earlier decisions have another utility when costs change.
  measure(index, result) {
    const run = this.runs[index];
    const counts = confusionCounts(run, result.actions, this.problem.actionCount);
    const found = decisionMetrics(run, result.actions, counts, this.U, this.problem);
    found.metrics.ece = calibrationError(result.confidence, result.likeliest, run.targets, this.step);
    return { ...found, counts };
  }

  levels() {
    if (this.levelsAt !== this.temperature) {
      this.levelsAt = this.temperature;
      this.levelsNow = levelTable(this.step, this.temperature);
    }
    return this.levelsNow;
  }

  // -- priors -----------------------------------------------------------------------------------------------------

  ratio(run) {
    const target = this.targetPrior(run);
    const carried = this.carriedPrior(run);
    if (!target || !carried || target.some((share, y) => share > 0 && carried[y] === 0)) {
      return new Float64Array(this.problem.classCount).fill(1);
    }
    return Float64Array.from(target, (share, y) => (carried[y] > 0 ? share / carried[y] : 0));
  }

  carriedPrior(run) {
    return run.carried_prior ?? this.namedPrior(this.prior.carried);
  }

  targetPrior(run) {
    if (this.prior.target === "given") return run.target_prior;
    if (this.prior.target === "samples") return sharesOf(run.targets, this.problem.classCount);
    return this.prior.target === "own" ? this.prior.own : this.namedPrior(this.prior.target);
  }

  namedPrior(name) {
    const { classCount, counts } = this.problem;
    if (name === "uniform") return new Array(classCount).fill(1 / classCount);
    if (name !== "train" || !counts) return null;
    const total = counts.reduce((a, b) => a + b, 0);
    return counts.map((count) => count / total);
  }

  // -- edits of the matrix ----------------------------------------------------------------------------------------

  reset() {
    this.U = this.given.utility.slice();
    this.problem.allowed.splice(0, Infinity, ...this.problem.actions.map((_, a) => this.given.allowed[a] ?? false));
    this.temperature = 1;
    this.prior = { target: "given", carried: this.prior.carried, own: null };
  }

  // One value for many cells. Right decisions keep theirs, unless it is the only cell.
  assign(classes, actions, value) {
    const { decidedClass, actionCount } = this.problem;
    const alone = classes.length === 1 && actions.length === 1;
    for (const y of classes) {
      for (const a of actions) if (alone || decidedClass[a] !== y) this.U[y * actionCount + a] = value;
    }
  }

  oneHot() {
    const { classOrder, actionOf } = this.problem;
    const deciding = actionOf.filter((a) => a >= 0);
    this.assign(classOrder, deciding, 0);
    for (const y of classOrder) if (actionOf[y] >= 0) this.assign([y], [actionOf[y]], 1);
  }

  // Cells that decide for a class with more training samples than the true one.
  falseHeadCells() {
    const { counts, classCount, actionOf, actionCount } = this.problem;
    if (this.falseHeads?.actionCount === actionCount) return this.falseHeads.cells;
    const cells = [];
    this.falseHeads = { actionCount, cells };
    if (!counts) return cells;
    for (let y = 0; y < classCount; y++) {
      for (let d = 0; d < classCount; d++)
        if (counts[d] > counts[y] && actionOf[d] >= 0) cells.push(y * actionCount + actionOf[d]);
    }
    return cells;
  }

  setPenalty(value) {
    for (const cell of this.falseHeadCells()) this.U[cell] = value;
  }

  // The penalty that all those cells share, or null.
  penalty() {
    const cells = this.falseHeadCells();
    const value = this.U[cells[0]];
    return cells.length && cells.every((cell) => this.U[cell] === value) ? value : null;
  }

  setAbstain(on, value) {
    this.problem.allowed[this.abstainAction] = on;
    if (on) this.assign(this.problem.classOrder, [this.abstainAction], value);
  }

  abstainValue() {
    const { classCount, actionCount } = this.problem;
    const value = this.U[this.abstainAction];
    for (let y = 1; y < classCount; y++) if (this.U[y * actionCount + this.abstainAction] !== value) return null;
    return value;
  }

  isEdited() {
    const same =
      this.problem.allowed.every((on, a) => on === (this.given.allowed[a] ?? false)) &&
      this.U.every(
        (value, i) => value === this.given.utility[i] || !this.problem.allowed[i % this.problem.actionCount],
      );
    return !same || this.temperature !== 1 || this.prior.target !== "given";
  }
}

function sharesOf(targets, classCount) {
  const shares = new Array(classCount).fill(0);
  for (const y of targets) shares[y] += 1 / targets.length;
  return shares;
}

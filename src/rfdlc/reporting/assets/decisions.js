// From probabilities to actions and metrics: the library's Decider and metrics, for the page.
//
//   p' = softmax(log p / T) * ratio,   action = first arg max of p' U
//
// Pure functions of arrays. U is row-major: U[y * A + a] is the utility of action a when y is true.

// Expected utilities closer than this share of the largest utility are compared again without any shortcut: a column
// that follows from another one carries the rounding of the largest numbers that both had on the way.
const NEAR_TIE = 1e-9;

// A penalty slider touches half of U, but neighbouring columns still differ in two cells only. So each column is kept
// as its predecessor, or as a constant, plus the few cells that differ: deciding 10,000 samples among 100 classes
// takes 2 million products instead of 100 million. A matrix without structure takes all of them.
// `order` lists the actions that may be chosen, similar ones next to each other.
function encodeColumns(U, classCount, actionCount, order) {
  const starts = new Int32Array(order.length + 1);
  const follows = new Uint8Array(order.length);
  const constants = new Float64Array(order.length);
  const rows = [];
  const values = [];
  let previous = -1;
  order.forEach((column, place) => {
    const base = cheapestBase(U, classCount, actionCount, column, previous);
    follows[place] = base.follows ? 1 : 0;
    constants[place] = base.constant;
    for (let y = 0; y < classCount; y++) {
      const from = base.follows ? U[y * actionCount + previous] : base.constant;
      const change = U[y * actionCount + column] - from;
      if (change !== 0) {
        rows.push(y);
        values.push(change);
      }
    }
    starts[place + 1] = rows.length;
    previous = column;
  });
  return {
    near: NEAR_TIE * U.reduce((most, value) => Math.max(most, Math.abs(value)), 0),
    order: Int32Array.from(order),
    starts,
    follows,
    constants,
    rows: Int32Array.from(rows),
    values: Float64Array.from(values),
  };
}

function cheapestBase(U, classCount, actionCount, column, previous) {
  const candidates = [0, U[column], U[(classCount - 1) * actionCount + column]];
  let best = { follows: false, constant: 0, changes: Infinity };
  for (const constant of new Set(candidates)) {
    let changes = 0;
    for (let y = 0; y < classCount; y++) if (U[y * actionCount + column] !== constant) changes++;
    if (changes < best.changes) best = { follows: false, constant, changes };
  }
  if (previous >= 0) {
    let changes = 0;
    for (let y = 0; y < classCount; y++) {
      if (U[y * actionCount + column] !== U[y * actionCount + previous]) changes++;
    }
    if (changes < best.changes) best = { follows: true, constant: 0, changes };
  }
  return best;
}

// What each of the 65,536 levels stands for at a temperature; a row is divided by its sum where that matters.
function levelTable(step, temperature) {
  const values = new Float64Array(65536);
  for (let level = 0; level < values.length; level++) values[level] = Math.exp((-step * level) / temperature);
  return values;
}

// The action of each sample, its largest probability and the class that has it.
function decide(run, U, columns, levels, ratio) {
  const { size, width } = run;
  const row = new Float64Array(width);
  const gains = new Float64Array(U.length / width).fill(-Infinity); // an action that is not allowed stays there
  const result = { actions: new Int32Array(size), confidence: new Float64Array(size), likeliest: new Int32Array(size) };
  for (let i = 0, at = 0; i < size; i++, at += width) {
    let sum = 0;
    let peak = -1;
    let likeliest = 0;
    for (let y = 0; y < width; y++) {
      const value = levels[run.levels[at + y]] * ratio[y];
      row[y] = value;
      sum += value;
      if (value > peak) {
        peak = value;
        likeliest = y;
      }
    }
    fillGains(gains, row, sum, columns);
    result.actions[i] = firstMaximum(gains, row, columns.near * sum, U);
    result.confidence[i] = peak / sum;
    result.likeliest[i] = likeliest;
  }
  return result;
}

function fillGains(gains, row, sum, { order, starts, follows, constants, rows, values }) {
  let gain = 0;
  for (let place = 0; place < order.length; place++) {
    if (!follows[place]) gain = constants[place] * sum;
    for (let j = starts[place]; j < starts[place + 1]; j++) gain += values[j] * row[rows[j]];
    gains[order[place]] = gain;
  }
}

function firstMaximum(gains, row, near, U) {
  let best = 0;
  for (let a = 1; a < gains.length; a++) if (gains[a] > gains[best]) best = a;
  const edge = gains[best] - near;
  const tie = 4 * Number.EPSILON * (near / NEAR_TIE); // as the rules of the library
  let exact = NaN;
  let chosen = best;
  for (let a = 0; a < gains.length; a++) {
    if (a === best || gains[a] < edge) continue;
    if (Number.isNaN(exact)) exact = product(row, U, best, gains.length);
    const other = product(row, U, a, gains.length);
    if (other > exact + tie || (other >= exact - tie && a < chosen)) {
      exact = other;
      chosen = a;
    }
  }
  return chosen;
}

function product(row, U, action, actionCount) {
  let total = 0;
  for (let y = 0; y < row.length; y++) total += row[y] * U[y * actionCount + action];
  return total;
}

// The calibrated, corrected probability of one class for one sample: for lists, not for loops over everything.
function probability(run, sample, wanted, levels, ratio) {
  let sum = 0;
  const at = sample * run.width;
  for (let y = 0; y < run.width; y++) sum += levels[run.levels[at + y]] * ratio[y];
  return (levels[run.levels[at + wanted]] * ratio[wanted]) / sum;
}

// -- metrics, as rfdlc.evaluation.metrics defines them -----------------------------------------------------------------

const meanOf = (total, count) => (count ? total / count : NaN);

function confusionCounts(run, actions, actionCount) {
  const counts = new Int32Array(run.width * actionCount);
  for (let i = 0; i < run.size; i++) counts[run.targets[i] * actionCount + actions[i]]++;
  return counts;
}

// Regret: how much more the best allowed action is worth, for every cell.
function regretMatrix(U, { classCount, actionCount, allowed }) {
  const costs = new Float64Array(U.length);
  for (let y = 0; y < classCount; y++) {
    let best = -Infinity;
    for (let a = 0; a < actionCount; a++) if (allowed[a]) best = Math.max(best, U[y * actionCount + a]);
    for (let a = 0; a < actionCount; a++) costs[y * actionCount + a] = best - U[y * actionCount + a];
  }
  return costs;
}

// Metrics that follow from the counts of (true class, action) and, for false heads, from the ranks of the samples; by
// their names in the registry.
function decisionMetrics(run, actions, counts, U, problem) {
  const { classCount, actionCount, decidedClass, regions, headFractions } = problem;
  const costs = regretMatrix(U, problem);
  const totals = () => ({ all: 0, right: 0, kept: 0, utility: 0, regret: 0 });
  const add = (seen, y) => {
    for (let a = 0; a < actionCount; a++) {
      const cell = y * actionCount + a;
      const count = counts[cell];
      if (!count) continue;
      seen.all += count;
      seen.right += decidedClass[a] === y ? count : 0;
      seen.kept += decidedClass[a] >= 0 ? count : 0;
      seen.utility += count * U[cell];
      seen.regret += count * costs[cell];
    }
    return seen;
  };
  const seen = totals();
  for (let y = 0; y < classCount; y++) add(seen, y);
  const metrics = {
    accuracy: meanOf(seen.right, seen.all),
    mean_utility: meanOf(seen.utility, seen.all),
    mean_regret: meanOf(seen.regret, seen.all),
    abstention_rate: 1 - meanOf(seen.kept, seen.all),
    kept_accuracy: meanOf(seen.right, seen.kept),
  };
  for (const [name, members] of Object.entries(regions)) {
    const region = members.reduce(add, totals());
    metrics[`accuracy_by_region.${name}`] = meanOf(region.right, region.all);
  }
  const bySize = falseHeadRates(run, actions, problem);
  if (bySize) {
    const rates = headFractions.map((share) => bySize[headSize(classCount, share)]);
    headFractions.forEach((share, i) => (metrics[`false_head_rates.${share}`] = rates[i]));
    const defined = rates.filter((rate) => !Number.isNaN(rate)); // of two classes, the first 75% leave no tail
    const sum = defined.reduce((total, rate) => total + rate, 0);
    metrics.false_head_rate = meanOf(sum, defined.length);
  }
  return { metrics, falseHeadBySize: bySize };
}

const headSize = (classCount, share) => Math.floor(classCount * share + 0.5);

// Share of tail samples decided as head, for every number of head classes at once. A sample of rank r decided as a
// class of rank d < r is a false head for the sizes d + 1 to r: marked at both ends, added up at the end.
function falseHeadRates(run, actions, { classCount, decidedClass, rank }) {
  if (!rank) return null;
  const wrong = new Float64Array(classCount + 2);
  const tail = new Float64Array(classCount + 2);
  for (let i = 0; i < run.size; i++) {
    const trueRank = rank[run.targets[i]];
    tail[trueRank]++;
    const decided = decidedClass[actions[i]];
    if (decided < 0 || rank[decided] >= trueRank) continue;
    wrong[rank[decided] + 1]++;
    wrong[trueRank + 1]--;
  }
  for (let h = classCount - 1; h >= 0; h--) tail[h] += tail[h + 1];
  for (let h = 1; h <= classCount; h++) wrong[h] += wrong[h - 1];
  return Array.from({ length: classCount + 1 }, (_, h) => meanOf(wrong[h], tail[h]));
}

function classAccuracies(counts, { classCount, actionCount, decidedClass }) {
  const right = new Float64Array(classCount);
  const all = new Float64Array(classCount);
  for (let y = 0; y < classCount; y++) {
    for (let a = 0; a < actionCount; a++) {
      all[y] += counts[y * actionCount + a];
      if (decidedClass[a] === y) right[y] += counts[y * actionCount + a];
    }
  }
  return Array.from(right, (value, y) => meanOf(value, all[y]));
}

// Expected calibration error of the largest probability: bins (lower, upper]. Probabilities of the page are exact to a
// share of `precision`: what is above an edge by less is on it, as the number was before it was rounded to a level.
function calibrationError(confidence, likeliest, targets, precision, bins = 15) {
  const gaps = new Float64Array(bins);
  for (let i = 0; i < confidence.length; i++) {
    const place = Math.max(Math.ceil(confidence[i] * (bins * (1 - precision))), 1) - 1;
    gaps[place] += (likeliest[i] === targets[i] ? 1 : 0) - confidence[i];
  }
  return meanOf(
    gaps.reduce((total, gap) => total + Math.abs(gap), 0),
    confidence.length,
  );
}

// Samples whose action differs, grouped by the former and the new action.
function changes(run, before, after, U, decidedClass, actionCount) {
  const moves = new Map();
  const samples = [];
  for (let i = 0; i < run.size; i++) {
    if (before[i] === after[i]) continue;
    const y = run.targets[i];
    const key = before[i] * actionCount + after[i];
    const move = moves.get(key) ?? { from: before[i], to: after[i], count: 0, righted: 0, wronged: 0, gain: 0 };
    const gain = U[y * actionCount + after[i]] - U[y * actionCount + before[i]];
    move.count++;
    move.righted += decidedClass[after[i]] === y ? 1 : 0;
    move.wronged += decidedClass[before[i]] === y ? 1 : 0;
    move.gain += gain;
    moves.set(key, move);
    samples.push({ sample: i, gain });
  }
  return { samples, moves: [...moves.values()].sort((a, b) => b.count - a.count) };
}

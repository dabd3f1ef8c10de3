// Start: unpack, decide once, draw what is visible, and the rest when it becomes visible.

async function start() {
  if (typeof DecompressionStream === "undefined") {
    say(
      "This browser is too old to read the probabilities in this file (it lacks DecompressionStream). Use a current browser.",
    );
    return;
  }
  const data = JSON.parse(byId("data").textContent);
  const problem = makeProblem(data);
  const runs = await Promise.all(data.runs.map((run) => unpackRun(run, problem.classCount)));
  const workbench = new Workbench(problem, await unpack(data.utility, Float64Array), runs, data.step);
  const page = new Page(data, workbench);
  // For tests and for the console.
  window.rfdlcReport = { workbench, page, ready: true, openTime: performance.now() };
}

function say(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

class Page {
  constructor(data, workbench) {
    Object.assign(this, { data, workbench, index: 0, waiting: new Set(), visible: new Set() });
    this.measure();
    this.watch();
    makeEditor(workbench);
    this.confusion = makeConfusion(() => this);
    wireTheme();
    this.wireRuns();
    this.navigation();
    this.actionsShown = this.actionKey();
    workbench.onChange(() => this.afterEdit());
    for (const name of ["sets", "budget"]) byId(name).addEventListener("input", () => CHARTS[name](this));
    for (const name of ["uncertainty", "history"]) byId(name).addEventListener("change", () => CHARTS[name](this));
    this.drawAll();
    this.redrawOnResize();
  }

  // Metrics of the original and of the current decisions, both by the current matrix.
  measure() {
    const { workbench } = this;
    this.now = workbench.results.map((result, i) => workbench.measure(i, result));
    this.before = workbench.base.map((result, i) => workbench.measure(i, result));
    const run = workbench.runs[this.index];
    this.moved = changes(
      run,
      workbench.base[this.index].actions,
      workbench.results[this.index].actions,
      workbench.U,
      workbench.problem.decidedClass,
      workbench.problem.actionCount,
    );
  }

  actionKey() {
    return this.workbench.problem.allowed.join();
  }

  afterEdit() {
    this.measure();
    if (this.actionsShown !== this.actionKey()) {
      this.actionsShown = this.actionKey();
      this.confusion.relayout();
    }
    drawStrip(this);
    drawConsequences(this);
    this.later("changes", () => drawChanges(this));
    this.later("confusion", () => {
      this.confusion.paint();
      drawCostly(this);
    });
    this.later("mistakes", () => drawMistakes(this));
    for (const name of FOLLOWING) this.later(name, () => CHARTS[name](this));
  }

  drawAll() {
    const run = this.workbench.runs[this.index];
    drawHeadline(this.data, run);
    drawRuns(this.data, this.workbench.runs);
    drawSheets(run, this.workbench.problem);
    drawMade(this.data, run);
    this.notes(run);
    byId("sets-figure").hidden = !run.sets; // what is hidden is never drawn later
    byId("budget-figure").hidden = !run.budget;
    byId("history-figure").hidden = !Object.keys(run.made.history ?? {}).some((name) => name !== "epoch");
    this.afterEdit();
    for (const name of Object.keys(CHARTS)) this.later(name, () => CHARTS[name](this));
  }

  notes(run) {
    const part =
      run.size < run.samples
        ? ` The editor and the confusion matrix use ${whole(run.size)} of the ${whole(run.samples)} samples, drawn by class, to keep this file small; the headline and the charts use all samples.`
        : "";
    const rule =
      run.decider.rule === "expected-utility"
        ? ""
        : ` This run was decided by the rule ${run.decider.rule}; the editor decides by expected utility.`;
    say((part + rule).trim());
    byId("confusion-text").textContent =
      "Rows are true classes, columns are decisions; the cost of a cell is its regret: how much more the best action would have been worth. The matrix follows the editor.";
  }

  // -- what is not visible is drawn later -------------------------------------------------------------------------

  later(name, draw) {
    const host =
      { changes: byId("changes"), confusion: byId("confusion-matrix"), mistakes: byId("mistake-list") }[name] ??
      chartHost(name);
    host.draw = draw;
    if (this.visible.has(host)) draw();
    else this.waiting.add(host);
    this.observer.observe(host);
  }

  watch() {
    this.observer = new IntersectionObserver(
      (entries) =>
        entries.forEach(({ target, isIntersecting }) => {
          if (isIntersecting) this.visible.add(target);
          else this.visible.delete(target);
          if (isIntersecting && this.waiting.delete(target)) target.draw();
        }),
      { rootMargin: "200px" },
    );
    addEventListener("beforeprint", () => this.drawWaiting());
  }

  drawWaiting() {
    this.waiting.forEach((host) => host.draw());
    this.waiting.clear();
  }

  redrawOnResize() {
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(this.resizing);
      this.resizing = setTimeout(
        () => Object.keys(CHARTS).forEach((name) => this.later(name, () => CHARTS[name](this))),
        150,
      );
    });
  }

  // -- the bar on top ---------------------------------------------------------------------------------------------

  wireRuns() {
    const { runs } = this.workbench;
    replace(
      byId("run"),
      runs.map((run, i) => el("option", { value: String(i) }, run.name)),
    );
    byId("run-choice").hidden = runs.length < 2;
    byId("run").addEventListener("change", (event) => {
      this.index = Number(event.target.value);
      this.measure();
      this.drawAll();
    });
  }

  navigation() {
    const sections = [...document.querySelectorAll("main section")].filter(
      (section) =>
        (section.id !== "runs" || this.workbench.runs.length > 1) &&
        (section.id !== "sheets" || this.workbench.runs.some((run) => Object.keys(run.sheets ?? {}).length)),
    );
    replace(
      byId("sections"),
      sections.map((section) => el("a", { href: `#${section.id}` }, section.dataset.title)),
    );
  }
}

function wireTheme() {
  const order = ["system", "light", "dark"];
  const words = { system: "as the system", light: "light", dark: "dark" };
  let now = 0;
  byId("theme").addEventListener("click", () => {
    now = (now + 1) % order.length;
    if (order[now] === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = order[now];
    byId("theme").setAttribute("aria-label", `Colours: ${words[order[now]]}`);
    byId("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[order[now]];
  });
}

start().catch((error) => {
  say(`This report could not be opened: ${error.message}`);
  console.error(error);
});

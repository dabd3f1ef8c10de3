"""How decisions were chosen for labels: stated designs, strata that follow from them,
and what can be checked.

Labels that somebody happened to send say nothing about the other decisions: mistakes
are reported more often than what went well. Only a rule that did not look at the
outcome makes the labelled decisions stand for all. No check can prove such a rule,
since outcomes of the others are unknown. But whatever the service knew of every
decision must have, among labelled ones, the distribution that the rule implies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, choose, counted, listing
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats

RANDOM = "random"
BY_ACTION = "by-action"
BY_CONFIDENCE = "by-confidence"
PROPENSITY = "propensity"
KINDS = (RANDOM, BY_ACTION, BY_CONFIDENCE, PROPENSITY)
OTHERS = "others"  # in the place of an action: all that are not named
REFUSED = 0.01  # probability that labels of a true design are refused
STATE = (
    "say how decisions were chosen for labels, without a look at the outcome: random,"
    " random:10%, by-action:review=100%,others=5%, by-confidence:0.9=20%,1=2%, or"
    " propensity (a probability with each label)"
)


@dataclass(frozen=True)
class Design:
    """A rule that chose decisions for labels and did not depend on their outcome.

    Parameters
    ----------
    kind : {"random", "by-action", "by-confidence", "propensity"}
        What the chance of a label depended on: nothing, the action, the largest
        probability, or what the sender knows, who then sends the chance of each label.
    shares : tuple of (str, float)
        The share of decisions that were to be labelled, by action or by the upper end
        of the largest probability; one nameless share of `random`, or none.

    Examples
    --------
    >>> Design.parse("by-action:review=100%,others=5%").shares
    (('review', 1.0), ('others', 0.05))
    """

    kind: str
    shares: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Design":
        """Read a design as the command line and POST /feedback state it.

        Raises
        ------
        InputError
            If the text is none of these.
        """
        kind, colon, stated = text.partition(":")
        choose("labelled", kind, KINDS)
        if kind == RANDOM:
            return cls(kind, (("", _share(stated, text)),) if colon else ())
        if kind == PROPENSITY:
            if colon:
                raise InputError(
                    f"labelled {text!r}: propensity has no shares: send a probability"
                    " with each label"
                )
            return cls(kind)
        shares = []
        for part in stated.split(","):
            name, _, share = part.rpartition("=")
            shares.append((name.strip(), _share(share, text)))
        names = [name for name, _ in shares]
        if len(set(names)) < len(names):
            raise InputError(f"labelled {text!r}: every name may be there once")
        if kind == BY_CONFIDENCE:
            _check_ends(names, text)
        return cls(kind, tuple(shares))

    def check_names(self, actions: Sequence[str]) -> None:
        """Refuse names that are none of these actions."""
        if self.kind == BY_ACTION:
            self._of_action(actions)

    def strata(self, utility: Utility, actions: Indices, confidence: Any) -> Indices:
        """The stratum (N,) of each decision, inside of which all had the same chance of
        a label: its place in `shares`.
        """
        if self.kind == BY_ACTION:
            return self._of_action(utility.actions)[actions]
        if self.kind == BY_CONFIDENCE:
            ends = [float(name) for name, _ in self.shares]
            # The same region whatever the scores are stored as.
            known = np.asarray(confidence, dtype=np.float64)
            return np.minimum(np.searchsorted(ends, known), len(ends) - 1)
        return np.zeros(len(actions), dtype=np.int64)

    def check(
        self,
        utility: Utility,
        actions: Indices,
        confidence: Any,
        expected: Floats,
        rows: Indices,
        propensity: Floats | None = None,
        probabilities: Floats | None = None,
    ) -> None:
        """Refuse labels that this design does not choose.

        What is known of all N decisions (`actions`, the largest probability
        `confidence`, `expected` utility, and `probabilities` (N, C) where they are
        there) is compared between them and those with labels (`rows`). Stated shares
        are compared with the labelled ones. True designs are refused with a probability
        of 1% at most.

        Raises
        ------
        InputError
            If labelled decisions differ from what the design implies.
        """
        scores = {
            "the expected utility": np.asarray(expected, dtype=np.float64),
            "the largest probability": np.asarray(confidence, dtype=np.float64),
        }
        if probabilities is not None:
            columns = zip(utility.classes.names, probabilities.T, strict=True)
            scores |= {f"the probability of {name!r}": p for name, p in columns}
        if self.kind == PROPENSITY:
            if propensity is None or np.isnan(propensity).any():
                raise InputError(
                    "labelled 'propensity': expected a propensity with each label"
                )
            tests = _propensity_tests(scores, rows, propensity)
        else:
            group = self.strata(utility, actions, confidence)
            tests = self._share_tests(group, rows)
            tests += _rank_tests(scores, group, rows)
            if self.kind != BY_ACTION:
                tests += _action_tests(utility, actions, group, rows)
        chance, difference = min(tests)
        if chance * len(tests) < REFUSED:
            raise InputError(
                f"these labels are not a sample '{self}': {difference}, which chance"
                f" does not explain; {STATE}"
            )

    def __str__(self) -> str:
        stated = ",".join(
            f"{name}={share:.10g}" if name else f"{share:.10g}"
            for name, share in self.shares
        )
        return f"{self.kind}:{stated}" if stated else self.kind

    def _of_action(self, actions: Sequence[str]) -> Indices:
        """The stratum of each action (A,)."""
        names = [name for name, _ in self.shares]
        unknown = [n for n in names if n not in actions and n != OTHERS]
        if unknown:
            raise InputError(
                f"labelled '{self}': no action is called {listing(unknown)}: expected"
                f" {listing(actions)}, or {OTHERS}"
            )
        absent = [name for name in actions if name not in names]
        if absent and OTHERS not in names:
            raise InputError(
                f"labelled '{self}': {listing(absent)} has no share: name every action,"
                f" or add {OTHERS}=SHARE"
            )
        return np.array(
            [names.index(n if n in names else OTHERS) for n in actions],
            dtype=np.int64,
        )

    def _share_tests(self, group: Indices, rows: Indices) -> list[tuple[float, str]]:
        """Labelled beside stated shares, and strata that have no label at all."""
        samples = np.bincount(group, minlength=max(1, len(self.shares)))
        labels = np.bincount(group[rows], minlength=len(samples))
        tests = []
        for place, (name, share) in enumerate(self.shares):
            if not samples[place]:
                continue
            where = f" of {name}" if name else ""
            tests.append(
                (
                    0.0
                    if not labels[place]
                    else _binomial(labels[place], samples[place], share),
                    f"{labels[place]:,} of {samples[place]:,} decisions{where} have a"
                    f" label, and the stated share is {share:.3g}",
                )
            )
        return tests


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of some of N decisions, and how each was sent.

    Parameters
    ----------
    rows : ndarray of shape (n_labels,)
        The places of their decisions, in the order of time.
    targets : ndarray of shape (n_labels,)
        The classes.
    sent : sequence of str or None
        The design that each label was sent with.
    propensity : ndarray of shape (n_labels,), optional
        The probability of each label, NaN where none was sent.
    """

    rows: Indices
    targets: Indices
    sent: Sequence[str | None]
    propensity: Floats | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """Labels that stand for decisions by a design, which has been checked.

    Decisions after the newest one with a label wait for theirs, and are left out.
    """

    design: Design
    decisions: int  # the first ones, for which the labels stand
    group: Indices  # (decisions,) strata
    rows: Indices
    targets: Indices
    propensity: Floats | None  # of `propensity` alone
    left_out: int  # labels of no design, or of another one


def sampled(
    labels: Labels,
    utility: Utility,
    actions: Indices,
    confidence: Any,
    expected: Floats,
    requested: str | None = None,
    probabilities: Floats | None = None,
) -> Sample:
    """The labels to use, by the design that they were sent with or the requested one.

    Parameters
    ----------
    labels : Labels
        All that came.
    utility : Utility
        That of the decider.
    actions, confidence, expected : ndarray of shape (n_decisions,)
        What is known of every decision: its action, the largest probability, and the
        expected utility, in the order of time.
    requested : str, optional
        The design to use: of the labels that were sent with it, or, where none was, of
        those that were sent without one. No design is needed where every decision has a
        label.
    probabilities : ndarray of shape (n_decisions, n_classes), optional
        They make the check of a design stronger.

    Raises
    ------
    InputError
        If no design is stated, several are, or labels do not fit the design.
    """
    design, used = _design(labels, requested)
    rows = labels.rows[used]
    size = int(rows.max()) + 1
    known = actions[:size], confidence[:size]
    propensity = None
    if design.kind == PROPENSITY and labels.propensity is not None:
        propensity = labels.propensity[used]
    design.check(
        utility,
        *known,
        expected[:size],
        rows,
        propensity,
        None if probabilities is None else probabilities[:size],
    )
    return Sample(
        design,
        size,
        design.strata(utility, *known),
        rows,
        labels.targets[used],
        propensity,
        int((~used).sum()),
    )


def _design(labels: Labels, requested: str | None) -> tuple[Design, NDArray[np.bool_]]:
    """The design to use, and which labels (n,) it chose."""
    texts = {text for text in labels.sent if text is not None}
    names = {text: str(Design.parse(text)) for text in texts}
    sent = [None if text is None else names[text] for text in labels.sent]
    designs = sorted(set(names.values()))
    if requested is not None:
        design = Design.parse(requested)
        name = str(design) if str(design) in designs else None
        used = np.array([text == name for text in sent])
        if not used.any():
            raise InputError(
                f"no label was sent as {design}, and none without a design: expected"
                f" {listing(designs)}"
            )
        return design, used
    if len(labels.rows) == labels.rows.max() + 1:
        return Design(RANDOM, (("", 1.0),)), np.ones(len(sent), dtype=bool)
    if not designs:
        raise InputError(
            f"{counted(len(sent), 'label')} of {labels.rows.max() + 1:,} decisions may"
            f" have been sent because of the outcome: {STATE}"
        )
    if len(designs) > 1:
        raise InputError(
            f"labels were sent as {listing(designs)}: name the design to use"
        )
    return Design.parse(designs[0]), np.array([text is not None for text in sent])


def _share(text: str, whole: str) -> float:
    """A share between 0 and 1, as 5% or 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = np.nan
    if not 0 < share <= 1:
        raise InputError(
            f"labelled {whole!r}: share {text!r}: expected a share above 0% and at most"
            " 100%, such as 5% or 0.05"
        )
    return share


def _check_ends(names: list[str], text: str) -> None:
    try:
        ends = [float(name) for name in names]
    except ValueError:
        ends = []
    rising = all(low < high for low, high in pairwise(ends))
    if not ends or not rising or ends[0] <= 0 or ends[-1] != 1:
        raise InputError(
            f"labelled {text!r}: expected rising ends of the largest probability, the"
            " last one 1, such as by-confidence:0.9=20%,1=2%"
        )


def _binomial(hits: int, trials: int, share: float) -> float:
    """The two-sided p-value of so many hits; samples without replacement vary less."""
    most = special.bdtr(hits, trials, share)
    least = 1.0 if hits == 0 else special.bdtrc(hits - 1, trials, share)
    return float(min(1.0, 2 * min(most, least)))


def _ranks(values: Floats) -> Floats:
    """Ranks between -0.5 and 0.5, the same for equal values."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2
    return np.asarray(middle[place] / len(values) - 0.5)


def _two_sided(total: float, variance: float) -> float:
    if variance <= 0:
        return float(abs(total) < 1e-6)  # a sum of ranks, rounded
    return float(2 * special.ndtr(-abs(total) / np.sqrt(variance)))


def _rank_tests(
    scores: Mapping[str, Floats], group: Indices, rows: Indices
) -> list[tuple[float, str]]:
    """Whether labels depend on scores inside of any stratum, or of all together
    (Wilcoxon; van Elteren).
    """
    size = int(group.max()) + 1
    samples = np.bincount(group, minlength=size)
    labels = np.bincount(group[rows], minlength=size)
    tests = []
    for what, values in scores.items():
        ranks = np.empty(len(values))
        for stratum in range(size):
            members = group == stratum
            ranks[members] = _ranks(values[members])
        spread = np.bincount(group, ranks**2, size) / np.maximum(samples - 1, 1)
        variance = spread * labels * (1 - labels / np.maximum(samples, 1))
        total = np.bincount(group[rows], ranks[rows], size)
        sums = [(float(total.sum()), float(variance.sum()))]
        if size > 1:
            sums += zip(total.tolist(), variance.tolist(), strict=True)
        for high, varies in sums:
            side = "low" if high < 0 else "high"
            difference = f"{what} of decisions that have a label is too {side}"
            tests.append((_two_sided(high, varies), difference))
    return tests


def _action_tests(
    utility: Utility, actions: Indices, group: Indices, rows: Indices
) -> list[tuple[float, str]]:
    """Whether an action has labels more or less often than its strata do."""
    samples = np.bincount(group)
    labels = np.bincount(group[rows], minlength=len(samples))
    chance = (labels / np.maximum(samples, 1))[group]
    tests = []
    for action in np.unique(actions):
        members = actions == action
        hits = int((actions[rows] == action).sum())
        tests.append(
            (
                _binomial(hits, int(members.sum()), float(chance[members].mean())),
                f"{hits:,} of {members.sum():,} decisions for"
                f" {utility.actions[action]} have a label, where a random choice has"
                f" {chance[members].sum():,.0f}",
            )
        )
    return tests


def _propensity_tests(
    scores: Mapping[str, Floats], rows: Indices, propensity: Floats
) -> list[tuple[float, str]]:
    """Whether labels, weighted by their inverse propensity, sum to what all decisions
    do.
    """
    size = len(next(iter(scores.values())))
    weights = 1 / propensity
    spread = weights**2 * (1 - propensity)
    tests = [
        (
            _two_sided(weights.sum() - size, float(spread.sum())),
            f"by their propensities, these labels stand for {weights.sum():,.0f}"
            f" decisions of {size:,}",
        )
    ]
    for what, values in scores.items():
        ranks = _ranks(values)
        total = float(weights @ ranks[rows])  # all ranks sum to 0
        side = "low" if total < 0 else "high"
        tests.append(
            (
                _two_sided(total, float(spread @ ranks[rows] ** 2)),
                f"{what} of decisions that have a label is too {side} for their"
                " propensities",
            )
        )
    return tests

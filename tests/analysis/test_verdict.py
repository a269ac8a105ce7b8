"""The verdict on made-up results, its interval, and notes on fairness."""

import json
from typing import Any

import numpy as np
import pytest

from fake_results import EIGHT, LOCAL, Fake, results
from fedattune import Settings
from fedattune.analysis.rows import build_rows, rows_to_json
from fedattune.analysis.verdict import Verdict, reach_verdict
from fedattune.analysis.verdict.notes import find_equal_methods, merge_notes, select_notes, write_fairness_notes


def decide(*fakes: Fake, **options: Any) -> Verdict:
    """The verdict on tuned runs."""
    return reach_verdict(results(*fakes), **{"is_tuned": True, **options})


def test_verdict_helps() -> None:
    verdict = decide(Fake("local", EIGHT), Fake("a", [0.6, 0.7, 0.8, 0.79] * 2, 0.6), Fake("b", [0.5] * 8, 0.55))
    assert verdict.text == (
        "Collaborating helps: use a, a model for each client. a has accuracy 72.25% against 65.00% with local, the "
        "best alone: +7.25 points (95% interval +2.99 to +11.51). 2 of 8 clients would lose (most of all client c3)."
    )
    assert verdict.details == ("a: 2 of 8 clients would lose; most of all client c3 with -1.00 points.",)


def test_verdict_no_clear_gain() -> None:
    said = decide(Fake("local", EIGHT), Fake("a", [0.9, 0.3, 0.8, 0.75] * 2, 0.6)).text
    assert said.startswith("No clear gain from collaborating is shown here. a, the best method by validation")
    assert "4 of 8 clients would lose (most of all client c1)" in said


def test_the_sentence_the_table_and_the_json_have_the_same_numbers() -> None:
    """One client of two test rows counts a fifth."""
    few = {
        "clients": [{"id": f"c{i}", "n_train": 9, "n_validation": 9, "n_test": 2 if i == 3 else 20} for i in range(8)]
    }
    fakes = [Fake("local", EIGHT, facts=few), Fake("a", [0.6, 0.7, 0.8, 0.1, 0.6, 0.7, 0.8, 0.9], 0.6, facts=few)]
    verdict, rows = decide(*fakes), build_rows(results(*fakes))
    assert verdict.weights is not None
    assert verdict.weights.tolist() == [1, 1, 1, 0.2, 1, 1, 1, 1]
    assert verdict.gain == pytest.approx((7 * 10 - 0.2 * 70) / 7.2)
    assert rows[1].mean is not None
    assert rows[1].mean.mean == pytest.approx((0.6 + 0.7 + 0.8 + 0.02 + 0.6 + 0.7 + 0.8 + 0.9) / 7.2)
    assert verdict.options[1].value == pytest.approx(rows[1].mean.mean)
    assert (rows[1].gain, rows[1].interval) == (verdict.gain, verdict.interval)
    content = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert (content["gain"], tuple(content["interval"])) == (verdict.gain, verdict.interval)
    assert f"{100 * rows[1].mean.mean:.2f}% against" in verdict.text
    assert f"{verdict.gain:+.2f} points" in verdict.text


def test_one_split_without_tuning_decides_nothing() -> None:
    better, worse = Fake("a", [0.9] * 8, 0.9), Fake("a", [0.4] * 8, 0.4)
    for fake in (better, worse):
        verdict = decide(Fake("local", EIGHT), fake, is_tuned=False)
        assert verdict.answer == "undecided"
        assert verdict.text.startswith("Undecided: one split without tuning cannot decide; --budget 5m, or --splits 5")
    assert decide(Fake("local", EIGHT), better).answer == "yes"
    assert decide(Fake("local", EIGHT), worse).answer == "no"
    runs = [*splits("local", [EIGHT] * 3, 0.5), *splits("a", [[0.9] * 8] * 3, 0.9)]
    assert decide(*runs, is_tuned=False).answer == "yes"
    assert decide(*(run for run in runs if run.split < 2), is_tuned=False).answer == "undecided"


def test_verdict_where_validation_and_test_do_not_agree() -> None:
    """Validation rows choose between methods; test rows alone say yes, and both say no."""
    better, worse = Fake("a", [0.7, 0.8, 0.9, 0.95] * 2, 0.6), Fake("a", [0.2, 0.3, 0.4, 0.45] * 2, 0.6)
    for validation in (0.7, 0.6):
        verdict = decide(Fake("local", EIGHT, validation), better)
        assert (verdict.answer, verdict.method) == ("yes", "a")
    assert decide(Fake("local", EIGHT, 0.6), worse).answer == "no"
    verdict = decide(Fake("local", EIGHT, 0.5), worse)
    assert verdict.answer == "undecided"
    assert verdict.text.startswith("Undecided: a is better than local on validation rows, but worse on test rows. a,")


def test_the_cheapest_option_that_no_dearer_one_surely_beats_is_recommended() -> None:
    def shared(accuracy: float, validation: float) -> Fake:
        fake = Fake("avg", [accuracy + 0.01 * i for i in range(8)], validation, evaluation_point="received")
        fake.shares = True
        return fake

    local, personal = Fake("local", [0.5] * 8, 0.5), Fake("own", [0.7 + 0.01 * i for i in range(8)], 0.75)
    verdict = decide(local, shared(0.6, 0.7), personal)
    assert (verdict.method, [one.kind for one in verdict.options]) == ("own", ["alone", "shared", "personal"])
    assert [one.name for one in verdict.options if one.is_recommended] == ["own"]
    assert " Another option: share one model with avg, 63.50% (+13.50, 95% interval +11.45 to +15.55)." in verdict.text
    noisy = Fake("own", [0.9, 0.62] * 4, 0.75)  # 2.5 points better than one model, but not surely
    verdict = decide(local, shared(0.7, 0.7), noisy)
    assert (verdict.answer, verdict.method) == ("yes", "avg")
    assert verdict.text.startswith("Collaborating helps: use avg, one model for all.")
    weak = Fake("avg", [0.3, 0.9] * 4, 0.6, evaluation_point="received")
    weak.shares = True
    assert decide(local, weak, personal).method == "own"


def test_verdict_on_one_client_draws_no_conclusion() -> None:
    said = decide(Fake("local", [0.5], 0.4), Fake("a", [0.6], 0.6)).text
    assert said.startswith("1 client is too few to say whether collaborating helps. a, the best method")
    assert "interval" not in said


def test_verdict_leaves_out_what_cannot_show_a_gain() -> None:
    """More training and sharing nothing are no collaboration, however good the accuracy."""
    longer = Fake("longer", [0.95] * 8, 0.9, local_steps=22_000)
    alone = Fake("alone", [0.9] * 8, 0.8, bytes_up=0)
    fair = Fake("fair", [0.6, 0.7, 0.8, 0.9] * 2, 0.6)
    said = decide(Fake("local", EIGHT), longer, alone, fair).text
    assert said.startswith("Collaborating helps: use fair")
    notes = write_fairness_notes(results(Fake("local", EIGHT), longer, alone, fair))
    assert notes[0] == (
        "left out of the conclusion on collaborating: longer did 22,000 local steps per client where local did 2,000; "
        "alone shared nothing"
    )
    said = decide(Fake("local", EIGHT), longer, alone).text
    assert said.startswith("Nothing can be compared fairly: longer did 22,000 local steps")


def test_what_is_worse_than_a_constant_is_never_recommended() -> None:
    """All models fail on one client's rows, so that `a` beats `local` surely, but not the mean."""
    local, a = Fake("local", [9.0] * 8, 9.0, is_regression=True), Fake("a", [8.0] * 8, 8.0, is_regression=True)
    mean = baseline("mean", [1.5] * 8, 10.0, is_regression=True)  # worse by chance on few validation rows
    verdict = decide(local, a, baselines=[mean])
    assert (verdict.answer, verdict.reference) == ("nothing_learned", "mean")
    assert verdict.untrained == ("local", "a")
    assert verdict.text.startswith(
        "Nothing was learned: no model is surely better than the mean of each client (mean);"
    )
    assert verdict.text.endswith("Worse than a constant: local, a.")
    assert not any(one.is_recommended for one in verdict.options)
    # A baseline that learns shows that the rows are worth something.
    ridge = baseline("ridge alone", [1.0] * 8, 1.0, is_regression=True)
    verdict = decide(local, a, baselines=[mean, ridge])
    assert (verdict.answer, verdict.reference) == ("undecided", "ridge alone")
    assert verdict.text.startswith("Undecided: every federated method diverged or is worse than a constant")


def test_a_method_must_beat_everything_alone() -> None:
    """Boosting alone is better on test rows than both, but not chosen on validation rows."""
    boosting = baseline("boosting alone", [0.9] * 8, 0.4)
    verdict = decide(Fake("local", EIGHT), Fake("a", [0.6, 0.7, 0.8, 0.85] * 2, 0.6), baselines=[boosting])
    assert verdict.reference == "local"
    assert verdict.answer == "undecided"
    assert verdict.text.startswith(
        "Undecided: boosting alone is at least as good on test rows, though not on validation rows. a"
    )


def test_diverged_clients_are_named_and_their_method_is_not_ranked() -> None:
    local, a = Fake("local", EIGHT, is_regression=True), Fake("a", [np.inf, *[0.1] * 7], 0.1, is_regression=True)
    a.diverged = ("c0",)
    verdict = decide(local, a, Fake("b", [0.4, 0.5, 0.6, 0.7] * 2, 0.4, is_regression=True))
    assert (verdict.answer, verdict.method) == ("yes", "b")
    assert verdict.diverged == {"a": ("c0",)}
    assert verdict.text.endswith("a diverged at c0: a smaller --lr or --tune may prevent it.")
    said = decide(local, a).text
    assert said == (
        "Undecided: every federated method diverged or is worse than a constant. a diverged at c0: a smaller --lr or "
        "--tune may prevent it."
    )
    assert decide(local, a, baselines=[baseline("mean", EIGHT, 0.5)]).answer == "nothing_learned"
    rows = rows_to_json(build_rows(results(local, a), metric="rmse"))
    json.dumps([rows, verdict.to_json()], allow_nan=False)


def test_a_method_that_failed_in_some_runs_is_not_ranked() -> None:
    """`a` finished one split of three: neither its gain there nor its score stand for all three."""
    local, b = splits("local", [EIGHT] * 3, 0.5), splits("b", [[x + 0.05 for x in EIGHT]] * 3, 0.6)
    a = Fake("a", [0.9] * 8, 0.9)
    verdict = decide(*local, a, *b, failed=["a", "a"], is_tuned=False)
    assert (verdict.answer, verdict.method) == ("yes", "b")
    assert verdict.text.endswith("a failed in 2 of 3 runs, so it is not ranked.")
    alone = decide(*local, a, failed=["a", "a"], is_tuned=False)
    assert alone.answer == "undecided"
    assert not alone.is_clear
    # Even if nobody says that runs failed, splits that the method does not have do not count.
    assert decide(*local, a, is_tuned=False).text.startswith("Undecided: one split without tuning cannot decide")


def test_a_failed_run_of_local_makes_no_yes_easier() -> None:
    """`a` is worse than `local`, and better than a constant: without `local`, it would win."""
    local, a = splits("local", [EIGHT] * 5, 0.5), splits("a", [[x - 0.05 for x in EIGHT]] * 5, 0.45)
    constant = [baseline("majority", [0.4] * 8, 0.4, split=k) for k in range(5)]
    whole = decide(*local, *a, baselines=constant)
    failed = decide(*local[1:], *a, baselines=constant, failed=["local"])
    assert (whole.answer, whole.reference) == (failed.answer, failed.reference) == ("no", "local")


def test_equal_gains_of_few_clients_are_not_sure() -> None:
    """Each of two clients has one right row of 25 more."""
    local, a = Fake("local", [0.5, 0.6], 0.5), Fake("a", [0.54, 0.64], 0.6)
    verdict = decide(local, a)
    assert (verdict.answer, verdict.interval, verdict.is_clear) == ("undecided", None, False)
    assert decide(Fake("local", EIGHT), Fake("a", [x + 0.04 for x in EIGHT], 0.9)).answer == "yes"


def test_what_the_methods_were_not_given_alike_is_said() -> None:
    assert write_fairness_notes(results(Fake("local", LOCAL), Fake("a", LOCAL))) == []
    fewer = Fake("a", LOCAL, local_steps=1000)
    (note,) = write_fairness_notes(results(Fake("local", LOCAL, settings=Settings(cohort=2)), fewer))
    assert "local: 2,000; a: 1,000" in note
    assert "--train" in note
    (note,) = write_fairness_notes(results(Fake("local", LOCAL, settings=Settings(epochs=1)), fewer))
    assert "--train" not in note
    assert "--epochs" in note
    (note,) = write_fairness_notes(results(Fake("local", LOCAL), Fake("a", LOCAL, facts={"weight_decay": 0.001})))
    assert "(local: 0; a: 0.001)" in note


def test_a_note_that_several_runs_have_is_said_once() -> None:
    """Of its own method a note begins with the name; one without a name is of all."""
    every = "clients that were asked dropped out"
    fakes = results(
        Fake("a", LOCAL, notes=["a: made for all clients", every]),
        Fake("a", LOCAL, notes=["a: made for all clients", "a: only with this seed", every]),
        Fake("b", LOCAL, notes=["b: made for all clients", every]),
    )
    assert merge_notes(fakes) == ["a, b: made for all clients", every, "a: only with this seed"]


def test_methods_with_equal_losses_are_called_one_method() -> None:
    fakes = results(
        Fake("local", LOCAL, losses=[0.5, 0.4]),
        Fake("a", LOCAL, losses=[0.3, 0.2]),
        Fake("b", LOCAL, losses=[0.3, 0.2 * (1 + 1e-6)]),
        Fake("c", LOCAL, losses=[0.3, 0.2 * (1 + 1e-4)]),
        Fake("d", LOCAL, losses=[0.3]),
    )
    notes = [note for note in write_fairness_notes(fakes) if "one method" in note]
    assert notes == ["a, b: the same loss at every evaluation, so they are one method under these settings"]


def test_methods_without_an_evaluation_are_not_called_one_method() -> None:
    """A deployment knows the received model's score a round later, and a long run evaluates few rounds."""
    begun, waiting = Fake("a", LOCAL), Fake("b", LOCAL)
    for fake in (begun, waiting):
        fake.__class__ = type("Begun", (Fake,), {"history": [{"round": 1, "trained": None}]})
    assert find_equal_methods({"a": results(begun), "b": results(waiting)}) == []


def test_equal_methods_are_seldom_called_a_gain_and_real_gains_are_found() -> None:
    """Eight clients of 40 test and 15 validation rows, the best of four methods: yes in 1 of 50 without a gain."""
    random = np.random.default_rng(0)

    def count(gain: float) -> int:
        answers = []
        for _ in range(100):
            right = random.uniform(0.6, 0.85, 8)
            made = [
                Fake(
                    name,
                    (random.binomial(40, right + extra) / 40).tolist(),
                    validations=(random.binomial(15, right + extra) / 15).tolist(),
                )
                for name, extra in (("local", 0.0), ("a", gain), ("b", gain), ("c", gain), ("d", gain))
            ]
            answers.append(decide(*made).answer)
        return answers.count("yes")

    assert count(0.0) < 8
    assert count(0.12) > 60


def splits(name: str, by_split: list[list[float]], validation: float | None) -> list[Fake]:
    return [Fake(name, accuracy, validation, split=k) for k, accuracy in enumerate(by_split)]


def test_few_clients_are_judged_over_splits() -> None:
    """Four clients always differ by the same; over three splits the mean jumps, so the answer is open."""
    alone = splits("local", [[0.5] * 4] * 3, 0.5)
    jumping = splits("a", [[0.51] * 4, [0.7] * 4, [0.52] * 4], 0.6)
    assert decide(*alone, *jumping).answer == "undecided"
    steady = splits("a", [[0.4] * 4, [0.41] * 4, [0.4] * 4], 0.4)
    verdict = decide(*alone, *steady)
    assert (verdict.answer, verdict.is_clear) == ("no", True)
    assert verdict.by_run == pytest.approx((-10, -9, -10))


def test_an_answer_is_clear_at_a_stricter_level() -> None:
    local = Fake("local", [0.5] * 8, 0.5)
    near = decide(local, Fake("a", [0.5 + 0.01 * (i - 1.2) for i in range(8)], 0.6))
    assert (near.answer, near.is_clear) == ("yes", False)
    far = decide(local, Fake("a", [0.7 + 0.01 * i for i in range(8)], 0.6))
    assert (far.answer, far.is_clear) == ("yes", True)


def test_a_lower_error_is_a_gain() -> None:
    errors = [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0]
    alone = Fake("local", errors, 6.0, is_regression=True)
    better = Fake("a", [0.8 * error for error in errors], 5.0, is_regression=True)
    worse = Fake("b", [1.2 * error for error in errors], 7.0, is_regression=True)
    verdict = decide(alone, better, worse)
    assert (verdict.answer, verdict.method, verdict.metric) == ("yes", "a", "rmse")
    assert "a has RMSE 6.1 against 7.625 with local, the best alone: +1.53 RMSE" in verdict.text
    verdict = decide(alone, worse)
    assert verdict.answer == "no"
    assert "8 of 8 clients would lose; most of all client c7 with RMSE higher by 2.4" in verdict.details[0]


def test_a_better_model_of_everybodys_rows_makes_a_no_undecided() -> None:
    """Of 1,802 schools, five methods trained too little: the pooled regression shows that others' rows help."""
    local, method = Fake("local", EIGHT, 0.7), Fake("a", [0.4, 0.5, 0.6, 0.7] * 2, 0.6)
    pooled = baseline("logistic pooled", [0.6, 0.7, 0.8, 0.85] * 2, 0.75)
    verdict = decide(local, method, baselines=[pooled])
    assert verdict.answer == "undecided"
    assert verdict.text.startswith(
        "Undecided: logistic pooled, on everybody's rows, is 8.75 points better than local, so the rows of others "
        "help; more training or another --model may let a method use them."
    )
    perhaps_better = baseline("logistic pooled", [0.6, 0.55, 0.72, 0.85] * 2, 0.75)
    verdict = decide(local, method, baselines=[perhaps_better])
    assert verdict.answer == "undecided"
    assert "is 3.00 points better than local, though not surely (95% interval -" in verdict.text
    assert "; the rows of others may help, but a gains nothing from them." in verdict.text
    hardly_better = baseline("logistic pooled", [0.6, 0.5, 0.7, 0.85] * 2, 0.75)  # by less than a standard error
    assert decide(local, method, baselines=[hardly_better]).answer == "no"


def test_a_sure_gain_of_a_method_that_validation_rows_did_not_choose_is_named() -> None:
    """Of 12 regions, the shared model gained surely; validation rows chose another, and advice to train more misled."""
    local = Fake("local", EIGHT, 0.7)
    chosen = Fake("a", [0.8, 0.5, 0.75, 0.7] * 2, 0.76)
    sure = Fake("b", [one + 0.05 + 0.001 * i for i, one in enumerate(EIGHT)], 0.75)
    pooled = baseline("logistic pooled", [one + 0.06 + 0.001 * i for i, one in enumerate(EIGHT)], 0.75)
    named = "test rows show a sure gain for b, but validation rows chose a; among several methods, one may look sure"
    verdict = decide(local, chosen, sure, baselines=[pooled])
    assert (verdict.answer, verdict.method) == ("undecided", "a")
    assert "so the rows of others help; " + named in verdict.text
    assert "more training" not in verdict.text
    assert decide(local, chosen, sure).text.startswith("Undecided: " + named)
    assert "look sure" not in decide(local, sure).text
    # Without validation rows, test rows choose.
    jumping, steady = Fake("a", [0.9, 0.4, 0.8, 0.75] * 2, None), Fake("b", [one + 0.05 for one in EIGHT], None)
    verdict = decide(Fake("local", EIGHT, None), jumping, steady)
    assert (verdict.answer, verdict.method) == ("undecided", "a")
    assert "validation rows" not in verdict.text


def baseline(name: str, accuracy: list[float], validation: float, **settings: Any) -> Any:
    """A baseline with these accuracies: of everybody's rows if it is pooled."""
    one = Fake(name, accuracy, validation, **settings)
    one.name, one.kind, one.notes = name, "pooled" if "pooled" in name else "alone", ()  # type: ignore[attr-defined]
    return one


def test_the_most_urgent_notes_are_shown() -> None:
    notes = [
        "Column 'x' names 5 clients.",
        "b",
        "Column 'y' alone predicts the target nearly perfectly (98%): ...",
        "c",
    ]
    notes += ["fedavg diverged at c", "d"]
    shown, hidden = select_notes(notes)
    assert shown == [notes[4], notes[2], "b"]
    assert hidden == ["c", "d", notes[0]]
    assert select_notes(notes[:1]) == ([], notes[:1])

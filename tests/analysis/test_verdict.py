"""The verdict on made-up results, its interval, and notes on fairness."""

from typing import Any

import numpy as np
import pytest

from fake_results import EIGHT, LOCAL, Fake, results
from fedattune import Settings
from fedattune.analysis.verdict import reach_verdict
from fedattune.analysis.verdict.notes import merge_notes, write_fairness_notes


def test_verdict_helps() -> None:
    said = reach_verdict(
        results(Fake("local", EIGHT), Fake("a", [0.6, 0.7, 0.8, 0.79] * 2, 0.6), Fake("b", [0.5] * 8, 0.55))
    ).text
    assert said.startswith(
        "Collaborating helps here: use a (chosen by validation accuracy), which is 7.25 points above"
    )
    assert "72.25% against 65.00%; 95% interval" in said
    assert said.endswith("2 of 8 clients would lose; most of all client c3 with -1.00 points.")
    assert said.count(". ") == 0


def test_verdict_no_clear_gain() -> None:
    said = reach_verdict(results(Fake("local", EIGHT), Fake("a", [0.9, 0.3, 0.8, 0.75] * 2, 0.6))).text
    assert said.startswith("No clear gain from collaborating is shown here: a, the best method by validation")
    assert "4 of 8 clients would lose; most of all client c1 with -30.00 points" in said


def test_verdict_where_validation_and_test_do_not_agree() -> None:
    """Local is best by validation, or as good; test data alone does not make a recommendation."""
    better = Fake("a", [0.7, 0.8, 0.9, 0.95] * 2, 0.6)
    verdict = reach_verdict(results(Fake("local", EIGHT, 0.7), better))
    assert verdict.answer == "undecided"
    assert verdict.text.startswith("Undecided: local is as good on validation data, but not on test data; local is")
    said = reach_verdict(results(Fake("local", EIGHT, 0.6), better)).text
    assert "local and a are equally good by validation accuracy; a is 18.75 points above" in said


def test_verdict_where_another_method_is_better_on_test_data() -> None:
    """The chosen method is not recommended alone where a rival is surely better; undecided if one does not gain."""
    local, rival = Fake("local", EIGHT, 0.5), Fake("b", [0.9] * 8, 0.55)
    both = reach_verdict(results(local, Fake("a", [0.6, 0.7, 0.8, 0.79] * 2, 0.6), rival))
    assert both.answer == "yes"
    assert "use a or b: validation data choose a, but on test data b is 17.75 points better; a is 7.25" in both.text
    verdict = reach_verdict(results(local, Fake("a", [0.5, 0.6, 0.7, 0.79] * 2, 0.6), rival))
    assert verdict.answer == "undecided"
    assert verdict.text.startswith("Undecided: validation data choose a, but on test data b is")


def test_verdict_on_a_handful_of_clients_draws_no_conclusion() -> None:
    said = reach_verdict(results(Fake("local", [0.5, 0.6], 0.4), Fake("a", [0.6, 0.7], 0.6))).text
    assert said.startswith("2 clients are too few to say whether collaborating helps: a, the best method")
    assert "interval" not in said


def test_verdict_leaves_out_what_cannot_show_a_gain() -> None:
    """More training and sharing nothing are no collaboration, however good the accuracy."""
    longer = Fake("longer", [0.95] * 8, 0.9, local_steps=22_000)
    alone = Fake("alone", [0.9] * 8, 0.8, bytes_up=0)
    fair = Fake("fair", [0.6, 0.7, 0.8, 0.9] * 2, 0.6)
    said = reach_verdict(results(Fake("local", EIGHT), longer, alone, fair)).text
    assert said.startswith("Collaborating helps here: use fair (chosen by validation accuracy)")
    notes = write_fairness_notes(results(Fake("local", EIGHT), longer, alone, fair))
    assert notes[0] == (
        "left out of the conclusion on collaborating: longer did 22,000 local steps per client where local did 2,000; "
        "alone shared nothing"
    )
    said = reach_verdict(results(Fake("local", EIGHT), longer, alone)).text
    assert said.startswith("Nothing can be compared fairly: longer did 22,000 local steps")


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
            answers.append(reach_verdict(results(*made)).answer)
        return answers.count("yes")

    assert count(0.0) < 8
    assert count(0.12) > 60


def splits(name: str, by_split: list[list[float]], validation: float | None) -> list[Fake]:
    return [Fake(name, accuracy, validation, split=k) for k, accuracy in enumerate(by_split)]


def test_a_gain_and_a_loss_must_hold_over_splits() -> None:
    """Eight clients always differ by the same; over two splits the mean jumps, so the answer waits for more splits."""
    alone = splits("local", [[0.5] * 8] * 2, 0.5)
    gains = splits("a", [[0.51] * 8, [0.7] * 8], 0.6)
    verdict = reach_verdict(results(*alone, *gains))
    assert verdict.interval == pytest.approx((10.5, 10.5))
    assert verdict.split_interval is not None
    assert verdict.split_interval[0] < 0
    assert verdict.answer == "undecided"
    losses = splits("a", [[0.49] * 8, [0.3] * 8], 0.4)
    verdict = reach_verdict(results(*alone, *losses))
    assert verdict.split_interval is not None
    assert verdict.split_interval[1] > 0
    assert verdict.answer == "undecided"
    steady = splits("a", [[0.4] * 8, [0.41] * 8, [0.4] * 8], 0.4)
    verdict = reach_verdict(results(*splits("local", [[0.5] * 8] * 3, 0.5), *steady))
    assert verdict.answer == "no"


def test_a_lower_error_is_a_gain() -> None:
    errors = [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0]
    alone = Fake("local", errors, 6.0, is_regression=True)
    better = Fake("a", [0.8 * error for error in errors], 5.0, is_regression=True)
    worse = Fake("b", [1.2 * error for error in errors], 7.0, is_regression=True)
    verdict = reach_verdict(results(alone, better, worse))
    assert (verdict.answer, verdict.method, verdict.metric) == ("yes", "a", "rmse")
    assert "a (chosen by validation RMSE), which is 1.52 RMSE better than training alone" in verdict.text
    verdict = reach_verdict(results(alone, worse))
    assert verdict.answer == "no"
    assert "8 of 8 clients would lose; most of all client c7 with RMSE higher by 2.4" in verdict.text


def test_a_better_model_of_everybodys_rows_makes_a_no_undecided() -> None:
    """Of 1,802 schools, five methods trained too little: the pooled regression shows that others' rows help."""
    local, method = Fake("local", EIGHT, 0.7), Fake("a", [0.4, 0.5, 0.6, 0.7] * 2, 0.6)
    pooled = baseline("logistic pooled", [0.6, 0.7, 0.8, 0.85] * 2, 0.75)
    verdict = reach_verdict(results(local, method), baselines=[pooled])
    assert verdict.answer == "undecided"
    assert verdict.text.startswith(
        "Undecided: logistic pooled, on everybody's rows, is 8.75 points above training alone on test data, so the "
        "rows of others help, and more rounds, another --lr or --tune may let a method use them; local is the best"
    )
    no_better = baseline("logistic pooled", [0.6, 0.5, 0.7, 0.85] * 2, 0.75)
    assert reach_verdict(results(local, method), baselines=[no_better]).answer == "no"


def baseline(name: str, accuracy: list[float], validation: float) -> Any:
    """A baseline of everybody's rows with these accuracies."""
    one = Fake(name, accuracy, validation)
    one.name, one.kind = name, "pooled"  # type: ignore[attr-defined]
    return one

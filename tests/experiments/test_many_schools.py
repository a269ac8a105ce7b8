"""A federation like that of schools: few clients have validation rows, many have one or two test rows."""

import numpy as np
import pytest

import fedattune
from fedattune.analysis.verdict import weigh_clients

N_SCHOOLS = 600


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, _one_thread: None) -> fedattune.Comparison:
    """Compare on a table where most schools have 4 to 8 pupils, some have 40, and all follow one rule."""
    folder = tmp_path_factory.mktemp("schools")
    random = np.random.default_rng(0)
    lines = ["school,size,mark,age,passed"]
    for school in range(N_SCHOOLS):
        n = 40 if school % 12 == 0 else int(random.integers(4, 9))
        for mark, age in random.normal(size=(n, 2)):
            passed = "yes" if mark + 0.01 * n + 0.5 * random.normal() > 0 else "no"
            lines.append(f"s{school:04d},{n},{mark:.3f},{age:.3f},{passed}")
    (folder / "schools.csv").write_text("\n".join(lines))
    columns = {"client_column": "school", "target": "passed"}
    settings = {"rounds": 5, "steps": 5, "lr": 0.4, "processes": 1}
    return fedattune.compare(folder / "schools.csv", ["local", "fedavg"], out=folder / "run", **columns, **settings)


def test_the_choice_stands_for_all_schools(found: fedattune.Comparison) -> None:
    """Schools with validation rows are larger than the others; their weights make up for it."""
    run = found.results[0]
    clients = run.facts["clients"]
    n = np.array([one["n_train"] + one["n_validation"] + one["n_test"] for one in clients])
    has_rows = np.array([one["n_validation"] > 0 for one in clients])
    assert len(n) == N_SCHOOLS
    assert has_rows.mean() < 0.5
    assert n[has_rows].mean() > 1.3 * n.mean()
    assert np.average(n, weights=weigh_clients(run)) == pytest.approx(n.mean(), rel=0.1)


def test_a_loss_of_one_row_is_told_in_rows(found: fedattune.Comparison) -> None:
    verdict = found.verdict.text
    assert "one split without tuning cannot decide" in verdict
    assert "test rows more wrong (by chance" in " ".join(found.verdict.details)
    assert "-100.00 points" not in verdict
    assert "-50.00 points" not in verdict


def test_the_folder_of_a_run_is_small(found: fedattune.Comparison) -> None:
    """The issue had 52 to 102 MB for such a run; models, scores of 5 rounds and predictions are a few MB."""
    for name in ("local", "fedavg"):
        assert found.folder is not None
        size = sum(path.stat().st_size for path in (found.folder / name).rglob("*") if path.is_file())
        assert size < 3e6, f"{name}: {size / 1e6:.1f} MB"

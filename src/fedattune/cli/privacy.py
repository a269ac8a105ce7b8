"""The command `privacy`: the noise multiplier of a plan, or the epsilon of a noise, without training."""

import json
from argparse import Namespace
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from ..core.errors import ConfigError
from ..privacy.accounting import format_epsilon
from .options import PrivacyOptions, parse_options


class PlannedNoise(NamedTuple):
    """A way to protect what the options describe.

    `sampling` says who is drawn, as the accountant counts on it. `noise_multiplier` is the deviation of the noise over
    the clipping norm, `noise_ratio` the norm of the noise on an average or upload over that of a clipped update.
    """

    mechanism: str
    sampling: str
    noise_multiplier: float
    epsilon: float
    noise_ratio: float | None = None


def plan_privacy(space: Namespace, problems: Sequence[str]) -> int:
    """Print the noise and the epsilon of a plan."""
    options = parse_options(PrivacyOptions, space, problems)
    if (options.target_epsilon is None) == (options.noise_multiplier is None):
        raise ConfigError(
            "privacy: give --target-epsilon, to learn the noise multiplier, or --noise-multiplier, to learn epsilon"
        )
    plans = _plan_clients(options) if options.level == "client" else [_plan_rows(options)]
    if options.json_:
        from ..core.io import replace_nonfinite

        values = replace_nonfinite([plan._asdict() for plan in plans])
        print(json.dumps({"level": options.level, "delta": options.delta, "plans": values}, indent=2))
        return 0
    from ..analysis.output.tables import fill_table, make_console, print_whole

    columns = {
        "noise": lambda plan: plan.mechanism,
        "drawn": lambda plan: plan.sampling,
        "multiplier": lambda plan: f"{plan.noise_multiplier:.4g}",
        "epsilon": lambda plan: format_epsilon(plan.epsilon, 4),
    }
    if options.parameters and options.level == "client":
        columns["noise/update"] = lambda plan: f"{plan.noise_ratio:.3g}"
    console = make_console()
    print_whole(fill_table(plans, columns, ("noise", "drawn")), console)
    what = "one client replaced" if options.level == "client" else "one training row more or less"
    console.print(
        f"neighbours: {what}; delta {options.delta:g}; multiplier: deviation of the noise over the clipping norm"
        + ("; noise/update: their norms in one round" if "noise/update" in columns else ""),
        style="dim",
    )
    return 0


def _plan_clients(options: PrivacyOptions) -> list[PlannedNoise]:
    from ..core.settings import Settings
    from ..training.uploads.client_privacy import UploadAccounting

    privacy = {"dp_client": options.target_epsilon, "dp_client_noise": options.noise_multiplier}
    settings = Settings.from_keywords(
        rounds=options.rounds, cohort=options.cohort, seed=options.seed, dp_delta=options.delta, **privacy
    )
    n, plans = options.clients, []
    size = settings.participation.cohort_size(n)
    kinds = {
        "central, on sums (fedavg, ditto)": UploadAccounting(settings, n, is_sum=True),
        "local, or on each upload (fedmcsa)": UploadAccounting(settings, n, is_sum=False),
    }
    if size < n:  # nodes have the seed that draws cohorts, and clients may join
        for is_sum, of in ((True, "sums"), (False, "uploads")):
            kinds[f"at real nodes, on {of}"] = UploadAccounting(settings, n, is_sum, is_secret=True)
    for mechanism, accounting in kinds.items():
        sampling = f"at most {accounting.count_uploads(settings.rounds)} uploads of a client"
        if accounting.has_hidden_cohort:
            sampling = f"{size} of {n}, hidden"
        noise = accounting.multiplier
        ratio = noise * sqrt(options.parameters) / (size if accounting.is_sum else 1) if options.parameters else None
        plans.append(PlannedNoise(mechanism, sampling, noise, accounting.epsilon(settings.rounds), ratio))
    return plans


def _plan_rows(options: PrivacyOptions) -> PlannedNoise:
    from ..privacy.accounting import epsilon_of, noise_for

    if options.samples is None:
        raise ConfigError("privacy: --level record needs --samples, the number of training rows of the client")
    rate, steps = min(1.0, options.batch_size / options.samples), options.rounds * options.steps
    noise = options.noise_multiplier
    if noise is None:
        assert options.target_epsilon is not None
        noise = noise_for(options.target_epsilon, options.delta, rate, steps)
    epsilon = epsilon_of(noise, rate, steps, options.delta)
    return PlannedNoise("DP-SGD", f"Poisson, {100 * rate:.3g}% of the rows in {steps:,} steps", noise, epsilon)

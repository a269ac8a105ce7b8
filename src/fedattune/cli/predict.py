"""The command `predict`."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from ..errors import ConfigError
from .view_options import Predict, asked


def predict(space: Namespace, problems: Sequence[str]) -> int:
    """Print or write what a model says of a table; notes and accuracy go to standard error."""
    from ..output import check_files

    options = asked(Predict, space, problems)
    if options.data is None:
        raise ConfigError("--data is missing: give a table to predict for, such as --data new.csv")
    from .. import prediction

    if options.out:
        prediction.check_output(options.out)
        check_files({"--out": options.out}, {"the data": options.data, "the model": space.model})
    found = prediction.predict(space.model, options.data, factory=options.factory)
    for note in found.notes:
        print(f"fedattune: {note}", file=sys.stderr)
    if found.target is not None:
        said = "no row has a known class"
        if found.accuracy is not None:
            said = f"{100 * found.accuracy:.2f}% ({found.correct:,} of {found.known:,} rows)"
        print(f"fedattune: accuracy: {said}", file=sys.stderr, flush=True)
    if options.out:
        found.save(options.out)
    else:
        print(found.to_csv(), end="")
    return 0

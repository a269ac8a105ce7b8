"""The papers behind methods, data, partitions and models, as BibTeX."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .._version import __version__
from ..core.errors import RunError

Keys = tuple[str, ...]


FEDATTUNE = "fedattune"
"""The key of the entry of FedAttune itself."""


FEDMCSA, PFEDLA, IGFL = "guo2023fedmcsa", "ma2022layer", "huang2021behavior"


FEDAVG, PFEDME, FEDAMP = "mcmahan2017communication", "dinh2020personalized", "huang2021personalized"


FEDOPT, FEDAVGM = "reddi2021adaptive", "hsu2019measuring"


FEDPROX, SCAFFOLD, DITTO = "li2020federated", "karimireddy2020scaffold", "li2021ditto"


FEDPER, FEDBN = "arivazhagan2019federated", "li2021fedbn"


PARTS: dict[str, Keys] = {
    "mcsa": (FEDMCSA,),
    "fedamp": (FEDAMP,),
    "heurfedamp": (FEDAMP,),
    "update_attention": (IGFL,),
    "learned": (PFEDLA,),
    "average": (FEDAVG,),
    "sgd": (FEDAVG,),
    "prox": (FEDPROX,),
    "pfedme": (PFEDME,),
    "ditto": (DITTO,),
    "scaffold": (SCAFFOLD,),
    "head": (FEDPER,),
    "norms": (FEDBN,),
}
"""What `combined` is made of: its own name is cited by the papers of all parts, a run by those it had."""


ALGORITHMS: dict[str, Keys] = {
    "combined": tuple(dict.fromkeys(key for keys in PARTS.values() for key in keys)),
    "local": (),
    "fedavg": (FEDAVG,),
    "fedavg_ft": (FEDAVG,),
    "fedprox": (FEDPROX,),
    "perfedavg": ("fallah2020personalized",),
    "pfedme": (PFEDME,),
    "fedamp": (FEDAMP,),
    "heurfedamp": (FEDAMP,),
    "fedmcsa": (FEDMCSA,),
    "fedmcsa_no_mcsa": (FEDMCSA,),
    "fedavg_mcsa": (FEDMCSA, FEDAVG),
    "pfedme_mcsa": (FEDMCSA, PFEDME),
    "pfedla": (PFEDLA,),
    "heurpfedla": (PFEDLA,),
    "pfedhn": ("shamsian2021personalized",),
    "fedbn": (FEDBN,),
    "fedrep": ("collins2021exploiting",),
    "fedper": (FEDPER,),
    "fedfomo": ("zhang2021personalized",),
    "fedam": ("zhang2025attention",),
    "fedcp": ("zhang2023fedcp",),
    "fedrod": ("chen2022bridging",),
    "igfl": (IGFL,),
    "igfl_c": (IGFL,),
    "igfl_s": (IGFL,),
    "fedavgm": (FEDAVGM,),
    "scaffold": (SCAFFOLD,),
    "fedadam": (FEDOPT,),
    "fedyogi": (FEDOPT,),
    "fedadagrad": (FEDOPT,),
    "vrl_sgd": ("liang2019variance",),
    "apfl": ("deng2020adaptive",),
    "ditto": (DITTO,),
    "l2gd": ("hanzely2020federated",),
    "mocha": ("smith2017federated",),
    "fedala": ("zhang2023fedala",),
}


SOURCES: dict[str, Keys] = {
    "synthetic": (FEDPROX,),
    "digits": ("alpaydin1998optical",),
    "mnist": ("lecun1998gradient",),
    "fashion_mnist": ("xiao2017fashion",),
    "cifar10": ("krizhevsky2009learning",),
    "cifar100": ("krizhevsky2009learning",),
    "emnist": ("cohen2017emnist",),
    "femnist": ("caldas2018leaf", "cohen2017emnist"),
    "tiny_imagenet": ("le2015tiny",),
}


PARTITIONS: dict[str, Keys] = {
    "iid": (),
    "by_column": (),
    "dirichlet": ("li2022federated",),
    "two_class": (PFEDME, FEDMCSA),
    "shards": (FEDAVG, IGFL),
    "dirichlet_clients": (FEDAVGM,),
    "pfedla": (PFEDLA,),
    "pfedla_similarity": (PFEDLA,),
}


MODELS: dict[str, Keys] = {
    "mlr": (),
    "dnn": (),
    "cnn": ("zhang2023fedcp",),
    "lenet": ("shamsian2021personalized",),
    "tf_cnn": ("zhang2021personalized",),
    "mcmahan_cnn": (FEDAVG,),
    "reddi_cnn": (FEDOPT,),
    "digit_model": (FEDBN,),
    "resnet18": ("he2016deep",),
}
"""name -> keys of its entries; none where there is nothing to cite."""


TABLES: dict[str, dict[str, Keys]] = {
    "method": ALGORITHMS,
    "part": PARTS,
    "data": SOURCES,
    "partition": PARTITIONS,
    "model": MODELS,
}


class UsedItem(NamedTuple):
    """Something that a run used: its kind (method, part, data, partition or model) and its name."""

    kind: str
    name: str


@cache
def load_entries() -> dict[str, str]:
    """All BibTeX entries by their keys."""
    text = Path(__file__).with_suffix(".bib").read_text(encoding="utf-8")
    return {
        found[1]: found[0] for found in re.finditer(r"^@\w+\{(\w+),\n.*?^\}$", text, re.DOTALL | re.MULTILINE)
    }


def collect_used_items(runs: Iterable[Path]) -> tuple[list[UsedItem], str]:
    """What the runs in these folders used, each thing once, and with which version of FedAttune.

    A folder is that of a run, or holds those of a comparison: METHOD/seed-N. Of several versions, the last one
    counts.

    Raises:
        RunError: a folder holds no run.
    """
    from ..core.io import read_json
    from ..training.storage.folder import RunFolder

    used: dict[UsedItem, None] = {}
    version = __version__
    for path in runs:
        configs = [RunFolder(path).config] if RunFolder(path).config.is_file() else []
        configs = configs or sorted(path.glob("*/seed-*/config.json"))
        if not configs:
            raise RunError(
                f"{path} holds no run; give a folder that fedattune run or compare wrote, or --algorithms"
            )
        for file in configs:
            used |= dict.fromkeys(_items_of_config(read_json(file), _table(file)))
            environment = RunFolder(file.parent).environment
            if environment.is_file():
                version = read_json(environment).get("fedattune", version)
    return list(used), version


def _table(config: Path) -> str | None:
    """The user's own table that a run of a comparison was trained on: it may be called like a known data set."""
    from ..core.io import read_yaml
    from ..data import is_table

    comparison = config.resolve().parent.parent.parent
    experiment = comparison / "experiment.yaml"
    if not experiment.is_file():
        return None
    data = str(read_yaml(experiment).get("data"))
    return Path(data).name if is_table(data) else None


def _items_of_config(config: Mapping[str, Any], table: str | None) -> list[UsedItem]:
    named = {
        "data": table or config["data"],
        "partition": config["partition"].get("name"),
        "model": config["model"],
    }
    # Clients that were given one by one have no partition, for nothing was divided.
    given = ("partition", "given")
    rest = [UsedItem(kind, name) for kind, name in named.items() if name and (kind, name) != given]
    return [*_items_of_method(config["algorithm"], config.get("options", {})), *rest]


def _items_of_method(name: str, given: Mapping[str, Any]) -> list[UsedItem]:
    """The method, or the parts that were combined."""
    if name != "combined":
        return [UsedItem("method", name)]
    from ..algorithms import combined
    from ..core.options import list_options

    values = {option.name: given.get(option.name, option.default) for option in list_options(combined)}
    parts = [values[key] for key in ("server", "client", "personal")]
    return [UsedItem("part", part) for part in parts if part != "none"]


def format_bibtex(used: Iterable[UsedItem], version: str = __version__) -> str:
    """The entries of FedAttune and of all that was used, each once, headed by what it is cited for.

    Lines that begin with % say what has no entry.
    """
    wanted: dict[str, list[str]] = {FEDATTUNE: []}
    without: list[str] = []
    unknown: list[str] = []
    for kind, name in used:
        keys = TABLES[kind].get(name)
        if keys is None:
            unknown.append(f"{kind} {name}")
        elif not keys:
            without.append(f"{kind} {name}")
        for key in keys or ():
            wanted.setdefault(key, []).append(f"{kind} {name}")
    blocks = [
        "\n".join([*([f"% {', '.join(reasons)}"] if reasons else []), load_entries()[key]])
        for key, reasons in wanted.items()
    ]
    blocks[0] = blocks[0].replace("VERSION", version)
    if without:
        blocks.append(f"% Nothing to cite for {', '.join(without)}.")
    if unknown:
        blocks.append(f"% Not part of FedAttune, to be cited by who knows the source: {', '.join(unknown)}.")
    return "\n\n".join(blocks) + "\n"

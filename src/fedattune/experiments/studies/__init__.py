"""The papers' tables and figures: a study is a YAML file of settings, and what is made of its runs."""

from .study import STUDIES, Study, load_study

__all__ = ["STUDIES", "Study", "load_study"]

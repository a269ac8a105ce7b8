"""The papers' tables and figures: a study is a YAML file of settings; its runs give a table and a figure."""

from .study import STUDIES, Study, load_study

__all__ = ["STUDIES", "Study", "load_study"]

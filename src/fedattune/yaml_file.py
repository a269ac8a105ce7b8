"""Reading YAML: no key twice, and an error that names the line."""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from .errors import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, keys as written.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506 (a safe loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # impossible dates and numbers, deep nesting
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else f": {error}"
        raise ConfigError(f"{path} is not valid YAML{where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold keys with values such as 'rounds: 50', got a {type(content).__name__}"
        )
    return {str(key): value for key, value in content.items()}


def read_scalar(text: str) -> Any:
    """The value that YAML reads in `text`, or the text itself where that is no YAML."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text

"""The documentation is true: its examples run, and the commands, targets, files and figures it names exist."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import clearhead
from clearhead.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "src/clearhead/kernels/README.md"]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(clearhead.__path__, "clearhead.")
    if not module.name.endswith("__main__")
)
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_docstrings_have_examples() -> None:
    """The finder finds: a module that is known to have examples has some."""
    module = importlib.import_module("clearhead.attend")
    assert doctest.testmod(module).attempted >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_pages_run(page: Path) -> None:
    found = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_the_readme_has_examples() -> None:
    assert README.count(">>> ") > 20


def test_commands_named_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = set(re.findall(r"(?:^ {4}|`|/)clearhead ([a-z]+)", README, flags=re.MULTILINE))
    assert {"example", "trace", "report", "plot", "demo"} <= named
    assert named <= known


def test_targets_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", " ".join(page.read_text(encoding="utf-8") for page in PAGES[:2])))
    named -= {"it", "sure", "a", "the", "and"}
    assert {"demo", "test", "lint", "bench"} <= named
    assert named <= targets


def test_the_tree_in_the_readme_is_the_tree() -> None:
    """Every source file stands in the README's tree, so that a stranger finds it."""
    tree = README[README.index("## Where things are") :]
    for source in (ROOT / "src/clearhead").rglob("*.py"):
        if source.name != "__init__.py":
            assert re.search(rf"\b{re.escape(source.name)}\b", tree), source.relative_to(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target

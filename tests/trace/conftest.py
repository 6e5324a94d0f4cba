"""One tiny model and one trace of it, shared by all tests that only read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from clearhead.trace import Model, Trace, load, record, tokenize


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(str(tiny_models.save(tmp_path_factory.mktemp("models") / "tiny")))


@pytest.fixture(scope="session")
def tokens(tiny: Model) -> Any:
    return tokenize(tiny.tokenizer, tiny_models.TEXT)


@pytest.fixture(scope="session")
def recorded(tiny: Model, tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tiny, tokens, tmp_path_factory.mktemp("traces") / "tiny")


@pytest.fixture
def copied(recorded: Trace, tmp_path: Path) -> Path:
    """A trace that a test may damage."""
    import shutil

    return Path(shutil.copytree(recorded.path, tmp_path / "copy"))

"""What every test may use: the same seed, and the real data if it is here."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    """Start each test from one seed, so that its place in the run is free."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data():
    """Return the folder of real data that ANNOTATED_TRANSFORMER_DATA names."""
    folder = os.environ.get("ANNOTATED_TRANSFORMER_DATA")
    if not folder:
        pytest.skip("real data: set ANNOTATED_TRANSFORMER_DATA to its folder")
    path = Path(folder)
    assert path.is_dir(), f"ANNOTATED_TRANSFORMER_DATA: no folder {path}"
    return path


def pytest_collection_modifyitems(items):
    """Skip the tests marked gpu where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))

"""One thread and one seed for every test, so that a failure repeats; and the command line in this process."""

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # before anything imports triton: its kernels then run as NumPy
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws without a generator of its own still draws the same numbers each time."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys) -> Callable[..., tuple[int, str, str]]:
    """command(*argv) -> (exit status, stdout, stderr): in an empty directory, with a fake experiment `drift`."""
    import fake_experiment

    from harness import cli, experiments

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(experiments.EXPERIMENTS, "drift", "fake_experiment:run")
    fake_experiment.seen.clear()

    def call(*argv: str) -> tuple[int, str, str]:
        status = cli.main(list(argv))
        out, err = capsys.readouterr()
        return status, out, err

    return call

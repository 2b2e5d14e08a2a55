"""One file per question. The name of an experiment, as in configs/experiment, and the function that runs it."""

EXPERIMENTS = {
    "drift": "harness.experiments.drift:run",
    "bench": "harness.experiments.bench:run",
}

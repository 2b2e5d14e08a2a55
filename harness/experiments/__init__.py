"""One file per question: the names of configs/experiment, and the functions that run them."""

EXPERIMENTS = {
    "drift": "harness.experiments.drift:run",
    "bench": "harness.experiments.bench:run",
    "probe": "harness.experiments.probe:run",
    "conditioning": "harness.experiments.conditioning:run",
    "oracle": "harness.experiments.oracle:run",
}

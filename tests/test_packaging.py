"""What reaches a user: dependencies, the wheel, the order of installation."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import harness

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for group in (PROJECT["dependencies"], *extras) for line in group]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r for r in found}


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement):
    pin = pins()[canonicalize_name(requirement.name)]
    (specifier,) = pin.specifier
    assert specifier.operator == "==" and "*" not in specifier.version
    assert requirement.specifier.contains(specifier.version)
    assert str(pin.marker).replace("'", '"') == str(requirement.marker).replace("'", '"')


def test_nothing_else_is_pinned_and_no_package_source_is_named():
    assert set(pins()) == {canonicalize_name(r.name) for r in requirements()}
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run", ".pre-commit-config.yaml"):
        assert not re.search(r"https?:|index|find-links", (ROOT / name).read_text()), name


@pytest.mark.parametrize("module", ["harness.ring", "harness.reference", "harness.kernels"])
def test_the_library_imports_without_hydra(module):
    code = f"import sys, {module}; sys.exit(bool({{'hydra', 'omegaconf'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"{module} imports Hydra"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The unpacked wheel."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_package_and_every_config_file(wheel):
    def files(root: Path, pattern: str) -> set[str]:
        return {str(p.relative_to(root)) for p in root.rglob(pattern)}

    assert files(wheel / "harness/configs", "*.yaml") == files(ROOT / "configs", "*.yaml")
    assert files(wheel / "harness", "*.py") == files(ROOT / "harness", "*.py")
    assert {p.name for p in wheel.iterdir()} == {
        "harness",
        f"replayssm_harness-{harness.__version__}.dist-info",
    }


def test_an_installed_package_finds_its_configuration(wheel, tmp_path):
    def composed(where: Path) -> str:
        command = [sys.executable, "-m", "harness", "--cfg", "job", "precision=bf16"]
        env = {"PYTHONPATH": str(where), "PATH": ""}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    assert composed(wheel) == composed(ROOT)


def test_make_installs_torch_first_and_lints_before_it_tests(tmp_path):
    command = ["make", "--no-print-directory", "-n", "test", f"VENV={tmp_path}/venv"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    order = [r"-m venv ", r"install .*-c constraints.txt torch$", r"install .*-c constraints.txt -e '\.\[dev"]
    order += [r"ruff check \.", r"ruff format --check", r"-m mypy", r"-m pytest (?!.*slow)"]
    found = [re.search(pattern, recipe, re.M) for pattern in order]
    assert all(found), [p for p, f in zip(order, found, strict=True) if not f]
    assert [f.start() for f in found] == sorted(f.start() for f in found)


def test_continuous_integration_runs_tests_and_gate_and_stops_at_the_first_failure():
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    body = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert "set -euo pipefail" in body and body[-2:] == ["make test", "make gate"]


def test_the_citation_and_the_licence_are_those_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (harness.__version__, PROJECT["license"])
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence


def test_compiled_code_is_kept_by_everything_it_was_made_from(tmp_path):
    """Fault: a constant changed in one file, and the kernels of another that hold it loaded as they were."""
    code = "import harness.compiled, numba; print(numba.config.CACHE_DIR)"

    def folder() -> str:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    package = tmp_path / "harness" / "compiled"
    package.mkdir(parents=True)
    (tmp_path / "harness" / "__init__.py").write_text("")
    for path in (ROOT / "harness" / "compiled").glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    table = package.parent / "exponential.py"
    table.write_bytes((ROOT / "harness" / table.name).read_bytes())
    found = [folder()]
    assert folder() == found[0] and found[0].strip()
    for path in (package / "common.py", table):
        path.write_text(path.read_text() + "# changed\n")
        found.append(folder())
    assert len(set(found)) == 3

"""The command line: refusals, manual page, composition of the configuration."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from fake_experiment import BUG, DONE_BEFORE, INTERRUPT, seen
from omegaconf import OmegaConf

from harness import cli, experiments, manual
from harness.config import Config, PrecisionConfig, leaves
from harness.groups import GROUPS, config_dir, known_keys, nearest, options

BAD = {
    "decode.tokenz=5": "decode.tokenz: unknown key; did you mean decode.tokens?",
    "tokens=5": "tokens: unknown key; did you mean decode.tokens?",
    "modle=default": "modle: unknown key; did you mean model?",
    "+decode.extra=3": "decode.extra: unknown key",
    "~decode.tokens": "decode.tokens: cannot be removed",
    "hydra.foo=1": "hydra.foo: unknown key",
    "precision=fp23": "precision: no option 'fp23'; did you mean fp32? have bf16, exact",
    "experiment=bnch": "experiment: no option 'bnch'; did you mean bench?",
    "decode=null": "decode=null: ",
    "decode.tokens=abc": "decode.tokens: 'abc' is not an integer",
    "decode.tokens=1e4": "decode.tokens: '10000.0' is not an integer",
    "decode.tokens=true": "decode.tokens: 'True' is not an integer",
    "decode.tokens=null": "decode.tokens: cannot be null",
    "decode.ragged=perhaps": "decode.ragged: 'perhaps' is not true or false",
    "decode.beta=much": "decode.beta: 'much' is not a number",
    "decode.beta=nan": "decode.beta: nan is not finite",
    "decode.g=0.1": "decode.g: 0.1 is a positive log decay",
    "decode.g=${missing}": "decode.g: interpolation key 'missing' not found",
    "decode.window=5": "decode.window: 5 is above ring.max_window=4",
    "acceptance.sequence=[1,a]": "acceptance.sequence[1]: 'a' is not an integer",
    "variants=exact_fold": "variants: needs a list",
    "variants=[exact_flod]": "variants: no option 'exact_flod'; did you mean exact_fold?",
    "variants=[]": "variants: empty",
    "workers=0": "workers: 0 is below 1",
    "foo==": "foo==: not key=value",
    "decode.tokens": "decode.tokens: not key=value",
    "": "'': not key=value",
    "precision=fp32,bf16": "precision: several values need -m",
    "decode.seed=range(3)": "decode.seed: a sweep needs -m",
    "model@foo=default": "model@foo: unknown key",
    "hydra.searchpath=[file:///no/such]": "hydra.searchpath=[file:///no/such]: ",
    "--precision": "command line: unrecognized arguments: --precision",
    "--resolve": "command line: --package and --resolve go with --cfg",
}


@pytest.mark.parametrize("argument", BAD, ids=lambda a: a or "empty")
def test_bad_input_is_one_line_naming_the_key_and_leaves_nothing(command, tmp_path, argument):
    status, out, err = command(argument)
    assert (status, out) == (2, "")
    assert err.startswith(f"harness: error: {BAD[argument]}")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert not seen and not list(tmp_path.iterdir())


def test_a_key_forced_in_on_top_of_a_good_one_is_refused_too(command):
    status, _, err = command("decode.tokens=7", "++ring.depth=3")
    assert status == 2 and "ring.depth: unknown key" in err and not seen


def test_nearest_looks_at_the_last_name_of_a_key():
    assert nearest("length", known_keys()) == "ring.length"
    assert nearest("decode.windw", known_keys()) == "decode.window"
    assert nearest("zzzz", known_keys()) is None


def test_the_files_of_the_default_options_say_what_the_dataclasses_say(command):
    assert command()[0] == 0
    assert seen == [Config()]


@pytest.mark.parametrize(
    ("group", "option"), [(g, o) for g in GROUPS if g != "experiment" for o in options(g)], ids="=".join
)
def test_every_option_composes(command, group, option):
    status, out, err = command("--cfg", "job", f"{group}={option}")
    assert (status, err) == (0, "")
    assert set(OmegaConf.create(out)) == {f.name for f in fields(Config)}


@pytest.mark.parametrize("name", options("precision"))
def test_a_precision_preset_carries_its_name_and_states_its_products(command, name):
    command(f"precision={name}")
    (config,) = seen
    assert config.precision.name == name
    # a base without dot precision would leave the products of each variant as they are
    assert (config.precision.dots is None) == (config.precision.base == "own")


def test_groups_and_keys_reach_the_experiment_typed(command):
    status, _, err = command("precision=bf16", "decode.g=-1e-5", "model.rows=null", "precision.sites.gate=fp32")
    assert (status, err) == (0, "")
    (config,) = seen
    assert config.decode.g == -1e-5 and isinstance(config.decode.g, float)
    assert config.model.rows is None
    assert config.precision == PrecisionConfig("bf16", "bf16", "bf16", sites={"gate": "fp32"})


def test_experiments_are_exactly_the_files_of_their_group(command):
    assert sorted(experiments.EXPERIMENTS) == options("experiment")
    for name in experiments.EXPERIMENTS:
        assert OmegaConf.create(command("--cfg", "job", f"experiment={name}")[1]).experiment == name


def test_a_run_leaves_no_folder_of_hydra(command, tmp_path):
    assert command("decode.tokens=7")[0] == 0
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_announced_as_such(command):
    status, out, _ = command(f"decode.tokens={DONE_BEFORE}")
    assert status == 0 and out.splitlines()[-1] == "already done: results/runs/drift/0123456789abcdef"


def test_a_bug_keeps_its_traceback(command):
    with pytest.raises(ZeroDivisionError, match="planted bug") as caught:
        command(f"decode.tokens={BUG}")
    assert caught.traceback[-1].name == "run"


def test_ctrl_c_is_one_line_and_130(command):
    status, _, err = command(f"decode.tokens={INTERRUPT}")
    assert (status, err) == (130, "harness: interrupted\n")


def test_arguments_of_the_process_are_restored(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["something", "else"])
    command("decode.tokens=7")
    assert sys.argv == ["something", "else"]


def test_help_fits_80_columns_and_covers_every_group_and_key(command):
    status, page, err = command("--help")
    assert (status, err) == (0, "")
    assert max(map(len, page.splitlines())) < 80
    sections = re.findall(r"^([A-Z]+(?: [A-Z]+)*)$", page, re.M)
    order = "NAME SYNOPSIS DESCRIPTION OPTIONS GROUPS VARIANTS KEYS EXAMPLES FILES EXIT STATUS".split()
    assert " ".join(sections).split() == order
    for group in GROUPS:
        assert f"    {group}: " in page
        assert all(re.search(rf"\b{o}\b", page) for o in options(group))
    for key, _ in leaves(Config()):
        assert f"\n    {key}=" in page
    assert not [key for key, meaning in manual.meanings().items() if not meaning]


@pytest.mark.parametrize(("argument", "absent"), [("--help", "torch hydra"), ("ring.length=abc", "torch")])
def test_help_and_refusals_do_not_wait_for_heavy_imports(argument, absent):
    code = f"import sys; from harness.cli import main; main([{argument!r}]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=config_dir().parent)
    assert done.returncode == 0 and not set(absent.split()) & set(done.stderr.split())


def test_the_module_is_a_command_and_a_closed_pipe_is_no_error(tmp_path):
    path = [str(Path(cli.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    code = f"{sys.executable} -m harness --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.splitlines()[1:] == ["0"] and done.stderr == ""
    done = subprocess.run([sys.executable, "-m", "harness", "nokey=1"], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stderr.count("\n") == 1

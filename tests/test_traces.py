"""Captured gates: the mapping to tokens and heads, and every file that must be refused."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness import traces
from harness.config import DecodeConfig
from harness.decode import Stream
from harness.errors import ConfigError, InputError
from harness.tokens import Shape

REAL = Path(__file__).parents[2] / "shared" / "traces"
SHAPE = Shape(2, 6, 3, 4)


def gates() -> dict[str, torch.Tensor]:
    """7 tokens, 4 heads: neither divides a block of 1,024 tokens or six heads."""
    n = torch.arange(28, dtype=torch.float32).view(7, 4)
    return {"log_decay": -0.013 * n, "beta": 0.031 * n}


def save(path: Path, **tensors: torch.Tensor) -> str:
    save_file({k: v.contiguous() for k, v in (gates() | tensors).items()}, path)
    return str(path)


def test_token_and_head_wrap_round_the_file(tmp_path: Path) -> None:
    """Fault: rows restarted at every block, columns counted within a process's heads, beta left as it was."""
    path = save(tmp_path / "t.safetensors")
    expected = gates()
    whole = Stream(DecodeConfig(gates=path), SHAPE).block(1)
    t = torch.arange(1024, 2048)
    for h in range(6):
        assert torch.equal(whole.g[0, :, h], expected["log_decay"][t % 7, h % 4].double())
        assert torch.equal(whole.beta[0, :, h], expected["beta"][t % 7, h % 4].double())
    part = Stream(DecodeConfig(gates=path), SHAPE, heads=slice(1, 2)).block(1)
    assert torch.equal(part.g, whole.g[..., 3:])
    assert torch.equal(part.beta, whole.beta[..., 3:])


def test_keys_and_values_still_come_from_the_family(tmp_path: Path) -> None:
    """Fault: captured gates shifting the draws of everything else."""
    plain = Stream(DecodeConfig(), SHAPE).block(0)
    traced = Stream(DecodeConfig(gates=save(tmp_path / "t.safetensors")), SHAPE).block(0)
    assert torch.equal(plain.k, traced.k)
    assert torch.equal(plain.v, traced.v)
    assert not torch.equal(plain.g, traced.g)


def test_a_fixed_gate_outranks_the_file(tmp_path: Path) -> None:
    """Fault: decode.g ignored when a file is given."""
    path = save(tmp_path / "t.safetensors")
    block = Stream(DecodeConfig(gates=path, g=-0.02), SHAPE).block(0)
    assert (block.g == -0.02).all()
    assert block.beta.unique().numel() > 2


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """Fault: a traceback, or a message that does not name decode.gates and the file."""
    good = Path(save(tmp_path / "good.safetensors"))
    bad = {
        "missing": "no such file",
        "text": "not a readable safetensors",
        "truncated": "not a readable safetensors",
        "empty": "not a readable safetensors",
        "keyless": "holds no tensor 'beta'",
        "rank": r"log_decay is float32 \[28\]",
        "integer": r"beta is int64 \[7, 4\]",
        "shapes": "differ in shape",
        "rowless": r"\[0, 4\]",
    }
    (tmp_path / "text").write_text("log_decay, beta\n-0.1, 0.5\n")
    (tmp_path / "truncated").write_bytes(good.read_bytes()[:-9])
    (tmp_path / "empty").write_bytes(b"")
    save_file({"log_decay": gates()["log_decay"]}, tmp_path / "keyless")
    save(tmp_path / "rank", log_decay=gates()["log_decay"].flatten())
    save(tmp_path / "integer", beta=torch.ones(7, 4, dtype=torch.int64))
    save(tmp_path / "shapes", beta=torch.ones(7, 3))
    save(tmp_path / "rowless", log_decay=torch.zeros(0, 4), beta=torch.zeros(0, 4))
    for name, message in bad.items():
        with pytest.raises(ConfigError, match=message) as error:
            Stream(DecodeConfig(gates=str(tmp_path / name)), SHAPE)
        text = str(error.value)
        assert text.startswith(f"decode.gates: {tmp_path / name}")
        assert "\n" not in text
    with pytest.raises(ConfigError, match="no such file"):
        traces.load(str(tmp_path))  # a folder


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log_decay", 0.5, r"log_decay: 0\.5 at token 5, head 2 is outside the log gate space"),
        ("log_decay", math.nan, r"log_decay: nan at token 5, head 2"),
        ("beta", -0.1, r"beta: -0\.1 at token 5, head 2"),
        ("beta", 2.1, r"beta: 2\.1 at token 5, head 2"),
        ("beta", math.nan, r"beta: nan at token 5, head 2"),
    ],
)
def test_values_no_gate_may_have(tmp_path: Path, name: str, value: float, message: str) -> None:
    """Fault: one impossible gate among good ones accepted, or refused without its place."""
    tensor = gates()[name]
    tensor[5, 2] = value
    path = save(tmp_path / "t.safetensors", **{name: tensor})
    with pytest.raises(InputError, match=message) as error:
        traces.load(path)
    assert str(error.value).startswith(f"decode.gates: {path}: ")


def test_a_reset_and_beta_two_are_legal(tmp_path: Path) -> None:
    """Fault: -inf refused as not finite, or beta held to 1."""
    tensors = gates()
    tensors["log_decay"][0, 0] = -math.inf
    tensors["beta"][0, 0] = 2.0
    trace = traces.load(save(tmp_path / "t.safetensors", **tensors))
    assert trace.g[0, 0] == -math.inf
    assert trace.beta[0, 0] == 2.0


@pytest.mark.parametrize(("name", "heads"), [("qwen3-next", 8), ("qwen3.5-0.8b", 16)])
def test_real_captures(name: str, heads: int) -> None:
    """Fault: a loader fit only for the small files of these tests."""
    path = REAL / f"{name}-gates.safetensors"
    if not path.is_file():
        pytest.skip(f"no captured gates at {path}")
    trace = traces.load(str(path))
    assert trace.g.shape == (8192, heads)
    block = Stream(DecodeConfig(gates=str(path)), SHAPE).block(8)  # token 8192 is row 0 again
    assert torch.equal(block.g[0], trace.g[:1024, torch.arange(6) % heads])

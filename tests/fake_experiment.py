"""An experiment that does nothing, or fails in the way its token count asks for."""

from typing import Any

from harness.config import Config

BUG, INTERRUPT, DONE_BEFORE, EXIT = 13, 14, 15, 17
seen: list[Config] = []


def run(config: Config) -> dict[str, Any]:
    """What harness.experiments lists: takes the configuration, returns state and directory."""
    seen.append(config)
    tokens = config.decode.tokens
    print(f"decoding {tokens} tokens")
    if tokens == BUG:
        raise ZeroDivisionError("planted bug\n\nand its long story")
    if tokens == INTERRUPT:
        raise KeyboardInterrupt
    if tokens == EXIT:
        raise SystemExit(3)
    state = "skipped" if tokens == DONE_BEFORE else "finished"
    return {"state": state, "directory": f"{config.results_dir}/drift/0123456789abcdef"}

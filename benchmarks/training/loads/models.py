"""Start-up of a model: safetensors, and ``torch.load`` with a memory map; all weights are used."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

from _protocol import Scale, main

SAFE, TORCH, SUMS = "model.safetensors", "model.pt", "sums.json"


def make(directory: Path, scale: Scale) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(4)
    each = scale["model_bytes"] // scale["tensors"] // 4
    weights = {f"layer.{number:03d}.weight": torch.randn(each) for number in range(scale["tensors"])}
    save_file(weights, str(directory / SAFE))
    torch.save(weights, directory / TORCH)
    (directory / SUMS).write_text(
        json.dumps({name: float(each.double().sum()) for name, each in weights.items()})
    )


def check(weights: dict[str, Any], directory: Path) -> None:
    """Reads every weight. Raises ValueError if one is wrong."""
    sums = json.loads((directory / SUMS).read_text())
    if weights.keys() != sums.keys():
        raise ValueError("the tensors are not those that were saved")
    for name, tensor in weights.items():
        if abs(float(tensor.double().sum()) - sums[name]) > 1e-6:
            raise ValueError(f"{name} is not what was saved")


def run(directory: Path, scale: Scale) -> dict[str, float]:
    warnings.simplefilter("ignore")
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    found = {}
    began = time.perf_counter()
    with safe_open(str(directory / SAFE), framework="pt") as file:
        name = sorted(file.keys())[-1]
        file.get_tensor(name).sum()
    found["first_tensor_s"] = time.perf_counter() - began
    for what in ("cold", "warm"):
        began = time.perf_counter()
        check(load_file(str(directory / SAFE)), directory)
        found[f"safetensors_{what}_s"] = time.perf_counter() - began
        began = time.perf_counter()
        check(torch.load(directory / TORCH, mmap=True, weights_only=True), directory)
        found[f"torch_{what}_s"] = time.perf_counter() - began
    return found


if __name__ == "__main__":
    main(make, run)

"""A DataLoader with persistent workers over single files, shuffled in every epoch."""

import random
import warnings
from pathlib import Path
from typing import Any

from _protocol import Scale, main, opened, sealed, timed_epochs


def name_of(number: int) -> str:
    return f"{number // 500:03d}/{number:07d}.bin"


def make(directory: Path, scale: Scale) -> None:
    sizes = random.Random(2)
    filler = sizes.randbytes(scale["largest_bytes"])
    for number in range(scale["files"]):
        path = directory / name_of(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            sealed(number, filler[: sizes.randint(scale["smallest_bytes"], scale["largest_bytes"])])
        )


class Files:
    """A map-style dataset; an item is the number that the file holds."""

    def __init__(self, directory: Path, count: int) -> None:
        self.paths = [str(directory / name_of(number)) for number in range(count)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        with open(self.paths[index], "rb") as file:
            return opened(file.read())


def run(directory: Path, scale: Scale) -> dict[str, float]:
    warnings.simplefilter("ignore")
    import torch
    from torch.utils.data import DataLoader

    data: Any = Files(directory, scale["files"])
    loader = DataLoader(
        data, batch_size=32, shuffle=True, num_workers=scale["workers"], persistent_workers=True,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    return timed_epochs(
        lambda: [int(number) for batch in loader for number in batch], scale["files"], scale["epochs"]
    )


if __name__ == "__main__":
    main(make, run)

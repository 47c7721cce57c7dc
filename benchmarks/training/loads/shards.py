"""A DataLoader with persistent workers over webdataset shards."""

import io
import random
import tarfile
import warnings
from pathlib import Path
from typing import Any

from _protocol import Scale, main, opened, sealed, timed_epochs


def make(directory: Path, scale: Scale) -> None:
    filler = random.Random(1).randbytes(scale["sample_bytes"] * 2)
    number = 0
    for shard in range(scale["shards"]):
        with tarfile.open(directory / f"shard-{shard:04d}.tar", "w") as archive:
            for _ in range(scale["samples_per_shard"]):
                start = number * 997 % scale["sample_bytes"]
                data = sealed(number, filler[start : start + scale["sample_bytes"]])
                entry = tarfile.TarInfo(f"{number:08d}.bin")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                number += 1


def checked(sample: dict[str, Any]) -> int:
    return opened(sample["bin"])


def run(directory: Path, scale: Scale) -> dict[str, float]:
    warnings.simplefilter("ignore")
    import webdataset
    from torch.utils.data import DataLoader

    shards = sorted(str(path) for path in directory.glob("*.tar"))
    data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(100).map(checked)
    loader = DataLoader(data, batch_size=None, num_workers=scale["workers"], persistent_workers=True)
    return timed_epochs(
        lambda: [int(number) for number in loader],
        scale["shards"] * scale["samples_per_shard"],
        scale["epochs"],
    )


if __name__ == "__main__":
    main(make, run)

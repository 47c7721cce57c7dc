"""Hugging Face datasets over Arrow files: every row in order, and single rows at random."""

import random
import time
from pathlib import Path

from _protocol import Scale, expect, main, opened, sealed


def make(directory: Path, scale: Scale) -> None:
    import datasets

    filler = random.Random(5).randbytes(scale["row_bytes"])
    rows = {
        "number": list(range(scale["rows"])),
        "content": [sealed(number, filler) for number in range(scale["rows"])],
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(str(directory / "data"), num_shards=scale["arrow_files"])


def run(directory: Path, scale: Scale) -> dict[str, float]:
    import datasets

    datasets.disable_progress_bars()
    began = time.perf_counter()
    data = datasets.load_from_disk(str(directory / "data"))
    found = {"open_s": time.perf_counter() - began}
    for what in ("cold", "warm"):
        began = time.perf_counter()
        numbers = [opened(content) for batch in data.iter(batch_size=64) for content in batch["content"]]
        found[f"in_order_{what}"] = scale["rows"] / (time.perf_counter() - began)
        expect(numbers, scale["rows"])
    chosen = random.Random(6)
    began = time.perf_counter()
    for _ in range(scale["random_rows"]):
        number = chosen.randrange(scale["rows"])
        row = data[number]
        if row["number"] != number or opened(row["content"]) != number:
            raise ValueError(f"row {number} is not what was saved")
    found["random"] = scale["random_rows"] / (time.perf_counter() - began)
    return found


if __name__ == "__main__":
    main(make, run)

"""What is measured with which library, with how much data, and what its numbers mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a load prints under ``key``."""

    key: str
    title: str
    unit: str
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """``script``: in ``loads/``. ``needs``: packages whose versions the report names."""

    name: str
    title: str
    script: str
    figures: tuple[Figure, ...]
    scale: Mapping[str, int]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


def _epochs(unit: str) -> tuple[Figure, ...]:
    return (Figure("cold", "first epoch", unit), Figure("warm", "later epoch", unit))


def _dlio(name: str, about: str, scale: Mapping[str, int]) -> Load:
    figures = (
        Figure("au_cold", "accelerator utilisation, first epoch", "%"),
        Figure("au_warm", "accelerator utilisation, later epochs", "%"),
        Figure("samples_cold", "first epoch", "samples/s"),
        Figure("samples_warm", "later epoch", "samples/s"),
    )
    environment = {"DLIO_SHAPE": name}
    needs = ("dlio-benchmark",)
    return Load(f"dlio-{name}", f"DLIO, {name} shape", "dlio", figures, scale, needs, environment, about)


def loads(size: float = 1.0) -> tuple[Load, ...]:
    """All of them; ``size`` multiplies the amount of data."""

    def scaled(count: int, least: int = 2) -> int:
        return max(least, round(count * size))

    return (
        Load(
            "shards", "DataLoader over webdataset shards", "shards", _epochs("samples/s"),
            {
                "shards": scaled(8, 2), "samples_per_shard": scaled(160, 10), "sample_bytes": 110_000,
                "workers": 2, "epochs": 3,
            },
            ("torch", "webdataset"),
        ),
        Load(
            "files", "DataLoader over single files", "files", _epochs("samples/s"),
            {
                "files": scaled(2000, 20), "smallest_bytes": 4096, "largest_bytes": 100 * 1024, "workers": 2,
                "epochs": 3,
            },
            ("torch",),
        ),
        Load(
            "models", "start-up of a model", "models",
            (
                Figure("first_tensor_s", "safetensors: open, one tensor, cold", "s", False),
                Figure("safetensors_cold_s", "safetensors: load and use all, first time", "s", False),
                Figure("safetensors_warm_s", "safetensors: again", "s", False),
                Figure("torch_cold_s", "torch.load(mmap): load and use all, first time", "s", False),
                Figure("torch_warm_s", "torch.load(mmap): again", "s", False),
            ),
            {"model_bytes": scaled(128 * MIB, MIB), "tensors": 64},
            ("torch", "safetensors"),
        ),
        Load(
            "arrow", "Hugging Face datasets over Arrow files", "arrow",
            (
                Figure("open_s", "load_from_disk, cold", "s", False),
                Figure("in_order_cold", "all rows in order, first time", "rows/s"),
                Figure("in_order_warm", "all rows in order, again", "rows/s"),
                Figure("random", "single rows at random", "rows/s"),
            ),
            {
                "rows": scaled(16_000, 100), "row_bytes": 6000, "arrow_files": 4,
                "random_rows": scaled(4000, 50),
            },
            ("datasets", "pyarrow"),
        ),
        Load(
            "vectors", "a vector index read at random", "vectors",
            (
                Figure("rows_cold", "rows of a memory map, first time", "rows/s"),
                Figure("row_cold_p99_us", "p99 of these", "us", False),
                Figure("rows_warm", "the same rows again", "rows/s"),
                Figure("index_open_s", "faiss: open the index", "s", False),
                Figure("searches_cold", "faiss: searches, first time", "searches/s"),
                Figure("searches_warm", "faiss: the same again", "searches/s"),
            ),
            {
                "vectors": scaled(60_000, 2000), "dimensions": 257, "random_vectors": scaled(5000, 100),
                "searches": scaled(400, 20),
            },
            ("numpy", "faiss-cpu"),
        ),
        _dlio(
            "unet3d",
            "Files of 4 MiB instead of 140, batches of 2 instead of 7, a step of 40 ms: 200 MiB/s for one "
            "accelerator.",
            {
                "files": scaled(40, 4), "samples_per_file": 1, "record_bytes": 4 * MIB, "batch": 2,
                "workers": 2, "epochs": 3, "step_us": 40_000,
            },
        ),
        _dlio(
            "resnet50",
            "Batches of 32 instead of 400, a step in proportion: 195 MiB/s for one accelerator, as unscaled.",
            {
                "files": scaled(8, 2), "samples_per_file": scaled(192, 64), "record_bytes": 114_660,
                "batch": 32, "workers": 2, "epochs": 3, "step_us": 17_920,
            },
        ),
    )  # fmt: skip

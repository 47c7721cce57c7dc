"""A vector index read at random: rows of a memory map, and searches in a faiss index on disk."""

import time
from pathlib import Path

from _protocol import Scale, main, quantile

ROWS, INDEX = "vectors.f32", "index.faiss"
PROBES = 4


def make(directory: Path, scale: Scale) -> None:
    import faiss
    import numpy

    generator = numpy.random.default_rng(7)
    vectors = generator.standard_normal((scale["vectors"], scale["dimensions"]), dtype=numpy.float32)
    vectors[:, 0] = numpy.arange(scale["vectors"])
    vectors.tofile(directory / ROWS)
    lists = max(8, scale["vectors"] // 400)
    unit = vectors[:, 1:].copy()
    index = faiss.index_factory(scale["dimensions"] - 1, f"IVF{lists},Flat")
    index.train(unit[: lists * 40])
    index.add(unit)
    faiss.write_index(index, str(directory / INDEX))


def run(directory: Path, scale: Scale) -> dict[str, float]:
    import faiss
    import numpy

    shape = (scale["vectors"], scale["dimensions"])
    vectors = numpy.memmap(directory / ROWS, dtype=numpy.float32, mode="r", shape=shape)
    chosen = numpy.random.default_rng(8).integers(0, scale["vectors"], scale["random_vectors"])
    found = {}
    for what in ("cold", "warm"):
        latencies = []
        began = time.perf_counter()
        for number in chosen:
            start = time.perf_counter()
            row = numpy.array(vectors[number])
            latencies.append(time.perf_counter() - start)
            if row[0] != number:
                raise ValueError(f"row {number} is not what was saved")
        found[f"rows_{what}"] = len(chosen) / (time.perf_counter() - began)
        found[f"row_{what}_p99_us"] = quantile(latencies, 0.99) * 1e6
    began = time.perf_counter()
    index = faiss.read_index(str(directory / INDEX), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    index.nprobe = PROBES
    found["index_open_s"] = time.perf_counter() - began
    queries = chosen[: scale["searches"]]
    for what in ("cold", "warm"):
        began = time.perf_counter()
        for number in queries:
            _, best = index.search(numpy.array(vectors[number, 1:]).reshape(1, -1), 1)
            if best[0, 0] != number:
                raise ValueError(f"the vector nearest to {number} is {best[0, 0]}")
        found[f"searches_{what}"] = len(queries) / (time.perf_counter() - began)
    return found


if __name__ == "__main__":
    main(make, run)

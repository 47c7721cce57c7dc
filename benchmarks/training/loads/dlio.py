"""DLIO with the shape of a MLPerf Storage workload, scaled: accelerator utilisation of each epoch.

The accelerator is a pause of the length that a batch would take. DLIO makes and reads the data itself.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _protocol import Scale, main

# The workload as DLIO has it, and what is changed of it.
SHAPES = {"unet3d": "unet3d_h100", "resnet50": "resnet50_h100"}


def overrides(directory: Path, scale: Scale) -> list[str]:
    values = {
        "dataset.data_folder": str(directory / "data"),
        "dataset.num_files_train": scale["files"],
        "dataset.num_samples_per_file": scale["samples_per_file"],
        "dataset.record_length": scale["record_bytes"],
        "dataset.record_length_stdev": 0,
        "dataset.record_length_resize": min(scale["record_bytes"], 150528),
        "reader.batch_size": scale["batch"],
        "reader.read_threads": scale["workers"],
        "reader.computation_threads": scale["workers"],
        "train.epochs": scale["epochs"],
        "train.computation_time": scale["step_us"] / 1e6,
    }
    return [f"++workload.{name}={value}" for name, value in values.items()]


def call(directory: Path, scale: Scale, *, generate: bool) -> dict[str, object]:
    shape = SHAPES[os.environ["DLIO_SHAPE"]]
    with tempfile.TemporaryDirectory() as output:
        command = [
            str(Path(sys.executable).with_name("dlio_benchmark")), f"workload={shape}",
            f"++workload.workflow.generate_data={generate}", f"++workload.workflow.train={not generate}",
            "++workload.workflow.checkpoint=False", *overrides(directory, scale), f"hydra.run.dir={output}",
        ]  # fmt: skip
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=output, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(
                f"{done.stdout[-3000:]}\nDLIO ended with {done.returncode}: {telling(done.stdout)}"
            )
        summary = Path(output) / "summary.json"
        found: dict[str, object] = {} if generate else json.loads(summary.read_text())["metric"]
        return found


def telling(output: str) -> str:
    """The last line that names an error; hints and advice come after it."""
    lines = [line.strip() for line in output.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return lines[-1] if lines else output.strip()[-200:]


def make(directory: Path, scale: Scale) -> None:
    call(directory, scale, generate=True)


def run(directory: Path, scale: Scale) -> dict[str, float]:
    metric = call(directory, scale, generate=False)
    utilisation, rates = metric["train_au_percentage"], metric["train_throughput_samples_per_second"]
    assert isinstance(utilisation, list)
    assert isinstance(rates, list)
    if len(utilisation) != scale["epochs"]:
        raise ValueError(f"DLIO reports {len(utilisation)} epochs instead of {scale['epochs']}")
    return {
        "au_cold": utilisation[0],
        "au_warm": sum(utilisation[1:]) / (len(utilisation) - 1),
        "samples_cold": rates[0],
        "samples_warm": max(rates[1:]),
    }


if __name__ == "__main__":
    main(make, run)

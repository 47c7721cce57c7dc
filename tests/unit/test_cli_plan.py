"""``tierfs plan``: options, their errors, and what is printed."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tierfs.cli import exit_codes, plan
from tierfs.cli.app import run
from tierfs.cli.plan_values import rate, typed
from tierfs.plan.scenario import GIB, TIB, Scenario

QUICK = ["plan", "--dataset", "2G", "--nvme", "1G", "--epochs", "2", "--no-curve"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dataset", "much"], "--dataset"),
        (["--step-time", "soon"], "--step-time"),
        (["--store-read-rate", "fast"], "--store-read-rate"),
        (["--network", "100 parsecs"], "--network"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "10", "--nodes", "3"], "--nodes"),
        (["--nodes", "1", "--gpus-per-node", "8"], "--nodes"),
        (["--layout", "heaps"], "--layout"),
        (["--batch-size", "8"], "--batch-size"),
        (["--batch-size", "8", "--step-time", "1s", "--samples-per-s", "8"], "--batch-size"),
        (["--parameters", "many"], "--parameters"),
        (["--parameters", "7B", "--checkpoint", "1G"], "--parameters"),
        (["--parameters", "7B", "--optimizer", "best"], "--optimizer"),
        (["--optimizer", "sgd"], "--optimizer"),
        (["--bench", "/nonexistent/report.json"], "--bench"),
        (["--goal", "95"], "--goal"),
        (["--checkpoint", "100T"], "--nvme"),
        (["--html", "/nonexistent/page.html"], "/nonexistent/page.html"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*QUICK, *arguments]) == exit_codes.USAGE
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.out == ""


def test_json_is_one_document_and_the_page_has_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run([*QUICK, "--checkpoint", "512M", "--html", str(page), "--json"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert found["scenario"]["dataset_bytes"] == 2 * GIB
    assert found["sources"]["dataset_bytes"] == "given"
    assert found["sources"]["mount_rate"].startswith("measured on ")
    assert "ram_bytes" not in found["sources"]
    text = page.read_text()
    assert text.count("<svg") >= 2
    assert "How far the model is off" in text


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(QUICK) == exit_codes.OK
    printed = capsys.readouterr().out
    assert "object store alone" in printed
    assert "hit rate, epoch 2" in printed


def values(**given: Any) -> dict[str, Any]:
    return typed(given)


def test_options_become_values_of_a_scenario() -> None:
    assert values(dataset="10TB", save_interval="1h") == {
        "dataset_bytes": 10 * TIB,
        "save_interval_s": 3600.0,
    }
    assert values(gpus=128, nodes=16) == {"gpus": 128, "gpus_per_node": 8}
    assert values(step_time="500ms", batch_size=32)["samples_per_s"] == 64.0
    assert values(parameters="100B", optimizer="none") == {"checkpoint_bytes": 200 * 10**9}
    assert values(parameters="7B") == {"checkpoint_bytes": 98 * 10**9}
    assert values(store_latency="10ms") == {"store_latency_s": 0.01, "store_latency_p99_s": 0.04}


def test_rates_are_bytes_or_bits() -> None:
    assert [rate(text) for text in ("10G", "10G/s", "100Gbit", "100Gbit/s", "1.5M")] == [
        10 * GIB, 10 * GIB, 12.5e9, 12.5e9, 1.5 * 1024**2,
    ]  # fmt: skip


def test_what_help_says_is_assumed_is_assumed() -> None:
    """The number in brackets at the end of a help text is the default of the scenario."""
    hints = get_type_hints(plan.command, include_extras=True)
    assumed = {}
    for name in inspect.signature(plan.command).parameters:
        words = hints[name].__metadata__[0].help or ""
        if name != "optimizer" and (match := re.search(r"\(([^() ]+)\)\.$", words)):
            number = re.fullmatch(r"\d+", match[1]) and name not in {"ram", "nvme"}
            assumed[name] = float(match[1]) if number else match[1]
    found, defaults = typed(assumed), Scenario()
    assert len(found) > 30
    assert {field: getattr(defaults, field) for field in found} == found

# SPDX-License-Identifier: Apache-2.0
"""``ipvs.scheduler``: valid names, when it applies, and the effect of an invalid one (docs/ipvs-mode.md)."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pyebpf_proxy.cli import main
from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.effective import Scheduler, effective
from pyebpf_proxy.config.loader import ConfigError
from pyebpf_proxy.datapath.loader.programs import SCHEDULERS
from tests import ROOT


def scheduler(*arguments: str) -> Scheduler | None:
    parsed = flags.parse(arguments)
    return effective(complete(parsed, lambda text, file: None), parsed).scheduler


def test_mode_ipvs_takes_the_scheduler_and_rr_without_one() -> None:
    assert scheduler("--proxy-mode=ipvs") == "rr"
    for name in get_args(Scheduler):
        assert scheduler("--proxy-mode=ipvs", f"--ipvs-scheduler={name}") == name


@pytest.mark.parametrize("mode", ["iptables", "nftables", ""])
def test_other_modes_choose_at_random_and_ignore_the_section(mode: str) -> None:
    assert scheduler(f"--proxy-mode={mode}", "--ipvs-scheduler=lc") is None
    assert scheduler(f"--proxy-mode={mode}", "--ipvs-scheduler=nonsense") is None


@pytest.mark.parametrize("name", ["nonsense", "RR", "rr ", "fo"])
def test_an_unknown_scheduler_is_named_with_its_field(name: str) -> None:
    with pytest.raises(ConfigError, match=rf'^ipvs\.scheduler: no scheduler is called "{name}"; there are rr, wrr, sh'):
        scheduler("--proxy-mode=ipvs", f"--ipvs-scheduler={name}")


def test_an_unknown_scheduler_ends_the_start_but_not_the_writing_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written.yaml"
    wrong = ["--proxy-mode=ipvs", "--ipvs-scheduler=nonsense"]
    assert main([*wrong, f"--write-config-to={written}"]) == 0
    assert "scheduler: nonsense" in written.read_text()
    assert main([*wrong, "--manifests", str(tmp_path), "--directory", str(tmp_path / "run")]) == 1
    assert "ipvs.scheduler" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_cleaning_up_needs_no_scheduler() -> None:
    assert scheduler("--proxy-mode=ipvs", "--ipvs-scheduler=nonsense", "--cleanup") is None


def test_every_scheduler_has_its_row_and_its_number() -> None:
    page = (ROOT / "docs" / "ipvs-mode.md").read_text()
    assert set(SCHEDULERS) == set(get_args(Scheduler))
    for name in SCHEDULERS:
        assert f"`{name}`" in page

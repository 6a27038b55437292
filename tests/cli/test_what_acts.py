"""An option without an effect is reported, or refused.

An option with an effect is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.command import good, ucpl

SPEC = """ucpl 1
model m {
  dim r = 4, c = 2
  w : r c  dtype f32
  norm : c
}
layout whole() of m {
  framework torch()
  file weights = torch "a.pt"
  w = r c  as "w"
  norm = c  as "norm"
  blob rng keep  as "rng"
}
layout ranks(tp = 2) of m {
  framework torch()
  mesh tp
  file weights = torch "{tp}.pt"
  w = r@tp c  as "w"
  norm = c  value x - 1  as "norm"
  blob rng @tp remap  as "rng"
}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.ucpl").write_text(SPEC)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "whole").mkdir()
    held = {"w": torch.arange(8.0).reshape(4, 2), "norm": torch.tensor([0.1, 1.0]), "rng": 3}
    torch.save(held, tmp_path / "whole" / "a.pt")
    return tmp_path


def converting(*more: str) -> tuple[str, ...]:
    return ("convert", "whole", "made", "--from", "spec.ucpl:whole()", "--to", "spec.ucpl:ranks()", *more)


def test_the_value_of_a_line_may_need_rounding_which_is_no_idle_word(here: Path) -> None:
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first"))
    done = ucpl(*converting())
    assert done.status == 5 and "[0] has no equal in f32" in done.err
    assert "write `lossy` behind it" in done.err
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first").replace("x - 1", "x - 1 lossy"))
    assert "does nothing" not in good("check", "spec.ucpl").out
    good(*converting())
    made = torch.load(here / "made" / "1.pt", weights_only=True)
    assert torch.equal(made["norm"], torch.tensor([0.1, 1.0]) - 1)


def test_a_blob_of_other_axes_is_not_reported_to_be_what_it_is(here: Path) -> None:
    done = ucpl(*converting())
    assert done.status == 1 and "`remap` needs the same axes" in done.err
    assert "write in the target `first` (the value at coordinate 0, for all) or `drop`" in done.err


def test_a_tensor_that_the_target_stores_is_not_reported_to_be_left_out(here: Path) -> None:
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first").replace("  value x - 1", ""))
    done = ucpl(*converting("--drop", "norm"))
    assert done.status == 2 and "error[E327]: --drop norm: ranks, which is of m, stores it" in done.err
    assert "norm = none" in done.err
    text = (here / "spec.ucpl").read_text()
    (here / "spec.ucpl").write_text(
        text.replace('  norm = c  as "norm"\n  blob rng @tp', "  norm = none\n  blob rng @tp")
    )
    assert "left out by --drop norm: 1 tensor, 2 elements" in good(*converting("--drop", "norm")).out


def test_a_model_that_no_layout_asks_for_is_reported(here: Path) -> None:
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first").replace("  value x - 1", ""))
    unread = "both layouts are of models of their own, and --model is of none"
    assert unread in good(*converting("--model", "spec.ucpl:m", "--dry-run")).out
    assert unread not in good(*converting("--dry-run")).out


def test_a_round_trip_says_that_nothing_reads_its_config(here: Path) -> None:
    unread = "nothing here reads the config"
    assert unread in good("roundtrip", "spec.ucpl:ranks", "--config", "config.json").out
    assert unread not in good("roundtrip", "spec.ucpl:ranks").out
    (here / "spec.ucpl").write_text(SPEC.replace("c = 2", "c = config.hidden_size"))
    assert unread not in good("roundtrip", "spec.ucpl:ranks", "--config", "config.json").out


def test_of_a_checkpoint_in_another_layout_the_verb_for_that_is_named(here: Path) -> None:
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first").replace("  value x - 1", ""))
    good(*converting())
    done = ucpl("verify", "made", "--from", "spec.ucpl:ranks()", "--against", "whole")
    assert done.status == 1 and "`ucpl compare A B` compares the two" in done.err


def test_a_call_of_the_command_line_is_shown_where_it_is_wrong(here: Path) -> None:
    done = ucpl("check", "spec.ucpl:ranks(tp = 7 / 2)")
    assert "1 | ranks(tp = 7 / 2)\n" in done.err, "though no word of the message stands there"


def test_of_a_file_that_is_missing_those_that_are_there_are_named(here: Path) -> None:
    (here / "whole" / "a.pt").rename(here / "whole" / "b.pt")
    done = ucpl(*converting())
    assert done.status == 3 and "a.pt is missing" in done.err
    assert "there are b.pt: check the degrees in --from, the names that `file` lines make" in done.err


def test_what_is_at_a_key_and_is_no_tensor_is_not_called_absent(here: Path) -> None:
    torch.save({"w": [1, 2], "norm": torch.zeros(2), "rng": 3}, here / "whole" / "a.pt")
    done = ucpl(*converting())
    assert done.status == 1 and "a.pt: w: no tensor in this file" in done.err


def test_what_exact_does_not_hold_says_the_word_for_rounding(here: Path) -> None:
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first").replace("value x - 1", "dtype bf16 exact"))
    done = ucpl(*converting())
    assert done.status == 5 and "write `lossy` on the entry" in done.err.lower()


def test_show_says_what_nothing_reads(here: Path) -> None:
    (here / "spec.ucpl").write_text(SPEC.replace("remap", "first"))
    unread = ("nothing here reads the config", "the layout has a model of its own, and --model is of none")
    said = good("show", "spec.ucpl:ranks", "--config", "config.json", "--model", "spec.ucpl:m")
    assert [text for text in unread if text not in said.out] == []
    assert not any(text in good("show", "spec.ucpl:ranks").out for text in unread)
    of_any = good("show", "plain()", "--config", "config.json", "--model", "spec.ucpl:m", "--after", "resolve").out
    assert not any(text in of_any for text in unread)
    (here / "spec.ucpl").write_text(SPEC.replace("c = 2", "c = config.hidden_size"))
    assert unread[0] not in good("show", "spec.ucpl:ranks", "--config", "config.json").out

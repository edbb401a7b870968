import gzip
import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest

from runwatch.checks import Phase, Signals
from runwatch.checks.signals import FAMILIES, VOCABULARY
from runwatch.monitor.read.sources import HEADS, Loaded, Naming, Source, SourceError, load

SAMPLES = Path(__file__).parent / "samples"


def table(folder: Path, text: str, maps: Sequence[str] = (), units: Sequence[str] = ()) -> Loaded:
    path = folder / "run.csv"
    path.write_text(text)
    return load(path, Naming.parse(maps, units))


def train_rows(signals: Signals) -> list[int]:
    return signals.step[(signals.phase == Phase.TRAIN) & ~signals.tick].tolist()


def test_no_foreign_name_means_two_signals() -> None:
    aliases = [alias for signal in VOCABULARY.values() for alias in signal.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & (set(VOCABULARY) | set(FAMILIES))
    assert not set(aliases) & {name for names in HEADS.values() for name in names}


TRAINERS = {
    "OLMo-core": {
        "train/CE loss": ("train/loss", 2.5, 2.5),
        "train/Z loss": ("train/z_loss", 3.0, 3.0),
        "optim/total grad norm": ("optim/grad_norm", 0.3, 0.3),
        "optim/step skipped": ("optim/skipped_step", 1, 1),
        "throughput/device/MFU": ("throughput/mfu", 43.0, 0.43),
    },
    "OLMo": {
        "train/CrossEntropyLoss": ("train/loss", 2.5, 2.5),
        "optim/total_grad_norm": ("optim/grad_norm", 0.3, 0.3),
        "optim/learning_rate_group0": ("optim/learning_rate", 1e-3, 1e-3),
    },
    "Levanter and Marin": {
        "train/loss": ("train/loss", 2.5, 2.5),
        "grad/norm/total": ("optim/grad_norm", 0.3, 0.3),
        "throughput/duration": ("throughput/step_time", 18.0, 18.0),
        "moe/drop_fraction": ("moe/drop_rate", 0.03, 0.03),
        "eval/paloma/macro_loss": ("eval/loss", 3.0, 3.0),
    },
    "MaxText": {
        "learning/loss": ("train/loss", 2.5, 2.5),
        "learning/raw_grad_norm": ("optim/grad_norm", 0.3, 0.3),
        "learning/current_learning_rate": ("optim/learning_rate", 1e-3, 1e-3),
        "learning/param_norm": ("params/norm", 100.0, 100.0),
        "perf/step_time_seconds": ("throughput/step_time", 18.0, 18.0),
    },
    "torchtitan": {
        "loss_metrics/global_avg_loss": ("train/loss", 2.5, 2.5),
        "grad_norm": ("optim/grad_norm", 0.3, 0.3),
        "throughput(tps)": ("throughput/tokens_per_second", 7000, 7000),
        "mfu(%)": ("throughput/mfu", 43.0, 0.43),
        "time_metrics/end_to_end(s)": ("throughput/step_time", 18.0, 18.0),
        "validation_metrics/loss": ("eval/loss", 3.0, 3.0),
    },
    "Megatron": {
        "lm loss": ("train/loss", 2.5, 2.5),
        "grad-norm": ("optim/grad_norm", 0.3, 0.3),
        "params-norm": ("params/norm", 100.0, 100.0),
        "learning-rate": ("optim/learning_rate", 1e-3, 1e-3),
        "iteration-time": ("throughput/step_time", 18.0, 18.0),
    },
    "Composer and llm-foundry": {
        "loss/train/total": ("train/loss", 2.5, 2.5),
        "l2_norm/grad/global": ("optim/grad_norm", 0.3, 0.3),
        "lr-DecoupledAdamW/group0": ("optim/learning_rate", 1e-3, 1e-3),
        "throughput/tokens_per_sec": ("throughput/tokens_per_second", 7000, 7000),
        "throughput/device/mfu": ("throughput/mfu", 0.43, 0.43),
        "metrics/eval/LanguageCrossEntropy": ("eval/loss", 3.0, 3.0),
    },
    "nanoGPT and llm.c": {
        "loss": ("train/loss", 2.5, 2.5),
        "lr": ("optim/learning_rate", 1e-3, 1e-3),
        "dt_ms": ("throughput/step_time", 250.0, 0.25),
        "val_loss": ("eval/loss", 3.0, 3.0),
    },
    "HF Trainer": {
        "loss": ("train/loss", 2.5, 2.5),
        "learning_rate": ("optim/learning_rate", 1e-3, 1e-3),
        "train/grad_norm": ("optim/grad_norm", 0.3, 0.3),
        "eval_loss": ("eval/loss", 3.0, 3.0),
    },
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_names_and_units_of_other_trainers_are_known(trainer: str, tmp_path: Path) -> None:
    names = TRAINERS[trainer]
    path = tmp_path / "history.jsonl"
    path.write_bytes(orjson.dumps({"step": 1} | {name: value for name, (_, value, _) in names.items()}))
    loaded = load(path)
    assert not loaded.warnings
    for signal, _, expected in names.values():
        assert loaded.signals.values(signal).tolist() == pytest.approx([expected])


def test_an_empty_cell_is_missing_and_nan_is_not(tmp_path: Path) -> None:
    signals = table(tmp_path, "step,loss,grad_norm\n1,2.5,\n2,nan,0.3\n3,inf,0.3").signals
    assert signals.observed("optim/grad_norm").tolist() == [1, 2]
    assert np.isnan(signals.values("train/loss")[1])
    assert np.isposinf(signals.values("train/loss")[2])
    assert np.isnan(signals.tokens).all()


def test_a_table_may_be_packed_and_have_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "run.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfstep,loss\r\n1,2.5\r\n2,2.4\r\n"))
    assert load(path).signals.values("train/loss").tolist() == [2.5, 2.4]


def test_a_row_with_too_few_cells_or_bad_bytes_is_told_with_its_line_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(b"step,loss\n1,2.5\n2\n3,\xff\nx,2.5\n5,2.5\n")
    loaded = load(path)
    assert loaded.signals.step.tolist() == [1, 5]
    for place in ("run.csv:3: 1 cells under 2 columns", "run.csv:4: not CSV", "run.csv:5: step is x"):
        assert any(place in warning for warning in loaded.warnings)


def test_nested_objects_are_flattened_and_torn_or_malformed_lines_told(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "train": {"loss": 2.5}}\n{"step": 2\n{"step": 3, "train": {"loss": NaN}}\n')
    loaded = load(path)
    assert loaded.signals.step.tolist() == [1, 3]
    assert "run.jsonl:2" in loaded.warnings[0]


def test_a_step_that_goes_back_is_a_resume_and_cuts_the_superseded_tail(tmp_path: Path) -> None:
    loaded = table(tmp_path, "step,loss\n1,5\n2,4\n3,3\n2,4\n3,3\n4,2\n")
    assert loaded.attempts == ("1", "2")
    assert [piece.intervals for piece in loaded.signals.pieces()] == [(), ((0, 1),)]


def test_a_late_evaluation_of_an_earlier_step_is_no_resume(tmp_path: Path) -> None:
    loaded = table(tmp_path, "step,loss,eval_loss\n1,5,\n2,4,\n1,,4.5\n3,3,\n")
    assert loaded.attempts == ("1",)
    assert loaded.signals.phase.tolist() == [Phase.TRAIN, Phase.TRAIN, Phase.EVAL, Phase.TRAIN]
    assert loaded.signals.step.tolist() == [1, 2, 2, 3]


def test_a_clock_that_begins_again_goes_on_so_that_attempts_follow_each_other(tmp_path: Path) -> None:
    rows = "attempt,step,wall_time_s,loss\na,1,5,9\na,2,3000,8\nb,1,4,9\nb,2,8,8\n"
    signals = table(tmp_path, rows).signals
    real = signals.time[~signals.tick].tolist()
    assert real == [5, 3000, 3004, 3008]
    assert signals.time[signals.tick].max() < 3000


def test_a_unix_clock_and_an_iso_clock_are_taken_as_they_are(tmp_path: Path) -> None:
    assert table(tmp_path, "_step,_timestamp,loss\n1,1.79e9,5\n").signals.time.tolist() == [1.79e9]
    assert table(tmp_path, "step,timestamp,loss\n1,2026-01-01T00:00:00Z,5\n").signals.time.tolist() == [1767225600.0]


def test_rows_of_a_foreign_phase_are_kept_and_told_but_are_no_train_rows(tmp_path: Path) -> None:
    loaded = table(tmp_path, "step,phase,loss\n1,train,5\n1,overflow,\n2,,4\n")
    assert (loaded.records, train_rows(loaded.signals)) == (3, [1, 2])
    assert "1 rows of phase overflow" in loaded.warnings[0]


def test_a_cumulative_counter_becomes_what_each_row_adds(tmp_path: Path) -> None:
    signals = table(tmp_path, "step,skipped_steps\n1,6\n2,6\n3,8\n4,9\n").signals
    assert signals.observed("optim/skipped_step").tolist() == [1, 2, 3]
    assert signals.values("optim/skipped_step").tolist() == [0, 2, 1]


def test_a_source_of_evaluations_only_is_judged_by_their_steps(tmp_path: Path) -> None:
    loaded = table(tmp_path, "step,eval_loss\n100,4\n200,3\n100,4\n")
    assert train_rows(loaded.signals) == [100, 200, 100]


def test_a_file_of_several_runs_says_where_each_begins(tmp_path: Path) -> None:
    loaded = table(tmp_path, "run,step,eval_loss\na,1,4\na,2,3\nb,1,4\nb,2,3\n")
    assert loaded.starts == (2,)
    assert len(loaded.attempts) == 2


def test_a_percentage_under_the_name_of_a_ratio_is_refused_until_its_unit_is_declared(tmp_path: Path) -> None:
    text = "step,loss,mfu\n1,5,41\n2,4,42\n"
    refused = table(tmp_path, text)
    assert not refused.signals.has("throughput/mfu")
    assert "Declare --unit throughput/mfu=percent." in refused.warnings[0]
    declared = table(tmp_path, text, units=["throughput/mfu=percent"])
    assert declared.signals.values("throughput/mfu").tolist() == pytest.approx([0.41, 0.42])
    assert not declared.warnings


def test_a_mapping_names_signals_and_heads_and_wins_over_aliases(tmp_path: Path) -> None:
    maps = ["train/loss=ce", "step=n", "data/mixture/code=share"]
    signals = table(tmp_path, "n,loss,ce,share\n7,9,2.5,0.5\n", maps).signals
    assert signals.step.tolist() == [7]
    assert signals.values("train/loss").tolist() == [2.5]
    assert signals.values("data/mixture/code").tolist() == [0.5]


WORDS = {
    "train/los=x": "did you mean train/loss?",
    "train/loss": "is not NAME=VALUE",
    "train/loss=": "is not NAME=VALUE",
}


@pytest.mark.parametrize(("word", "reason"), WORDS.items(), ids=WORDS)
def test_a_wrong_mapping_names_its_remedy(word: str, reason: str) -> None:
    with pytest.raises(SourceError, match="^" + repr(word.removesuffix("=x"))) as raised:
        Naming.parse([word], [])
    assert reason in str(raised.value)


@pytest.mark.parametrize("unit", ["parsec", "0", "-1", "nan", "inf"])
def test_a_wrong_unit_names_the_known_ones(unit: str) -> None:
    with pytest.raises(SourceError, match="percent"):
        Naming.parse([], [f"throughput/mfu={unit}"])


def test_a_megatron_log_gives_losses_times_skips_and_evaluations() -> None:
    loaded = load(SAMPLES / "megatron.log")
    signals = loaded.signals
    real = ~signals.tick
    assert signals.step[real].tolist() == [1, 2, 2, 2, 1]
    assert loaded.attempts == ("1", "2")
    assert signals.values("throughput/step_time")[0] == pytest.approx(106.46)
    assert signals.values("optim/skipped_step").tolist() == [0, 1, 0, 0]
    assert signals.values("eval/loss").tolist() == [9.87]
    assert np.isnan(signals.values("train/loss")[1])
    assert np.diff(signals.time[real])[0] == 106


def test_a_trainer_state_gives_its_history_without_the_closing_summary() -> None:
    signals = load(SAMPLES / "trainer_state.json").signals
    assert signals.step.tolist() == [10, 20, 20, 30]
    assert signals.values("train/loss").tolist() == [2.4977, 2.4, 2.3]
    assert signals.values("eval/loss").tolist() == [2.31]
    assert np.isnan(signals.values("optim/grad_norm")[1])


def test_a_directory_of_checkpoints_means_the_newest_trainer_state(tmp_path: Path) -> None:
    for step in (90, 100, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": step, "loss": 1.0}]}))
    assert load(tmp_path).signals.step.tolist() == [100]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_files_give_one_record_per_step_and_an_attempt_per_resume(tmp_path: Path) -> None:
    event = pytest.importorskip("tensorboard.compat.proto.event_pb2").Event
    for number, first in enumerate((0, 20)):
        with (tmp_path / f"events.out.tfevents.{number}.host").open("wb") as file:
            for step in range(first, first + 30):
                for tag, value in (("loss_metrics/global_avg_loss", 3.0), ("mfu(%)", 40.0)):
                    one = event(step=step, wall_time=1.79e9 + 60 * number + step)
                    one.summary.value.add(tag=tag, simple_value=value)
                    data = one.SerializeToString()
                    file.write(struct.pack("<QI", len(data), 0) + data + bytes(4))
            file.write(b"\x20\x00\x00\x00\x00\x00\x00\x00torn")
    loaded = load(tmp_path)
    assert train_rows(loaded.signals) == [*range(30), *range(20, 50)]
    assert loaded.attempts == ("1", "2")
    assert loaded.signals.values("throughput/mfu") == pytest.approx(0.4)
    assert "torn" in loaded.warnings[0]


RECORD = {"attempt": "a", "step": 1, "tokens": 5, "time": 1e9, "phase": "train", "train/loss": 2.5}


def test_a_run_directory_is_read_with_its_ticks_and_its_torn_last_line_waits(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    segment = tmp_path / "telemetry" / "000.jsonl"
    later = RECORD | {"step": 2, "time": 1e9 + 25, "phase": "eval"}
    segment.write_bytes(orjson.dumps(RECORD) + b"\n" + orjson.dumps(later) + b"\n" + b'{"step": 3')
    loaded = load(tmp_path)
    assert loaded.signals.tick.tolist() == [False, True, True, False]
    assert (loaded.records, loaded.warnings, loaded.attempts) == (2, (), ("a",))


NOT_READABLE = {
    "nothing.csv": "there is no such file",
    "empty_directory": "no source",
    "two_tables": "several sources",
    "notes.bin": "not a supported format",
    "broken.csv.gz": "broken.csv.gz",
    "state.wandb": "not a W&B file",
    "log_history.json": "no trainer state",
}


@pytest.mark.parametrize(("name", "reason"), NOT_READABLE.items(), ids=NOT_READABLE)
def test_what_cannot_be_read_is_an_error_that_names_it(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "empty_directory").mkdir()
    (tmp_path / "two_tables").mkdir()
    for table_name in ("a.csv", "b.csv"):
        (tmp_path / "two_tables" / table_name).write_text("step,loss\n1,2\n")
    for file in ("notes.bin", "broken.csv.gz", "state.wandb"):
        (tmp_path / file).write_bytes(b"\x00\x01\x02 no such thing")
    (tmp_path / "log_history.json").write_text('["log_history"]')
    with pytest.raises(SourceError, match=reason) as raised:
        load(tmp_path / name)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("version", ["0.28.2", "0.31.0"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wandb_file_is_read_whole_with_its_non_finite_values(version: str) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    loaded = load(SAMPLES / f"wandb-{version}.wandb", Naming.parse([], ["throughput/mfu=percent"]))
    assert loaded.signals.step.tolist() == list(range(90))
    loss = loaded.signals.values("train/loss")
    assert np.isnan(loss[60])
    assert np.isposinf(loss[61])
    assert loaded.signals.values("optim/learning_rate").tolist() == [1e-3] * 90
    assert loaded.signals.values("throughput/mfu") == pytest.approx(0.415)
    assert not loaded.warnings


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wandb_file_that_grows_byte_by_byte_gives_each_record_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    whole = (SAMPLES / "wandb-0.31.0.wandb").read_bytes()
    path = tmp_path / "run.wandb"
    path.write_bytes(b"")
    source, steps = Source(path), list[int]()
    for end in [*range(0, len(whole), 777), len(whole)]:
        path.write_bytes(whole[:end])
        steps += source.read(end=False).step.tolist()
    assert steps == list(range(90))
    assert not [warning for warning in source.warnings() if "checksum" in warning]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_damaged_block_of_a_wandb_file_is_told_and_the_next_block_is_read(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    damaged = bytearray((SAMPLES / "wandb-0.31.0.wandb").read_bytes())
    damaged[20_000] ^= 0xFF
    path = tmp_path / "run.wandb"
    path.write_bytes(damaged)
    loaded = load(path)
    assert 10 < loaded.records < 90
    assert loaded.signals.step[-1] == 89
    assert any("checksum" in warning for warning in loaded.warnings)


def test_a_table_that_grows_gives_each_row_once_and_keeps_a_torn_one_for_later(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n1,5\n2,4")
    source = Source(path)
    assert source.read(end=False).step.tolist() == [1]
    with path.open("a") as file:
        file.write("\n3,3\n")
    assert source.read(end=False).step.tolist() == [2, 3]
    assert source.read(end=False).step.tolist() == []


def test_a_sample_in_a_directory_of_its_own_is_found(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    folder = tmp_path / "offline-run-1"
    folder.mkdir()
    shutil.copy(SAMPLES / "wandb-0.31.0.wandb", folder / "run-1.wandb")
    assert load(tmp_path).records == 90

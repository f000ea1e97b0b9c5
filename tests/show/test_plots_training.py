import struct

from helpers.show import plots_training
from helpers.training.tiny_training import Record


def record(last=2.0, seconds=0.5):
    losses = [struct.pack(">f", value).hex() for value in (3.0, last)]
    return Record(losses=losses, gradients=["a", "b"], step_seconds=[seconds, seconds])


def test_comparison():
    figure = plots_training.comparison(record(seconds=0.5), record(seconds=0.25))
    assert "every bit the same" in figure.alt and "500.0 ms without, 250.0 ms with" in figure.alt
    assert figure.axes[1].get_title() == "without / with: 2.00" and figure.png()
    curves = [line.get_ydata().tolist() for line in figure.axes[0].lines]
    assert curves == [[3.0, 2.0], [3.0, 2.0]]


def test_comparison_of_runs_that_differ_and_without_times():
    figure = plots_training.comparison(record(), record(last=1.0), timed=False)
    assert "differ: losses from step 1" in figure.alt and "ms" not in figure.alt


def test_training_from_a_result_file():
    def size(tokens, p50):
        return {"tokens": tokens, "speedup": {"p20": p50 - 0.01, "p50": p50, "p80": p50 + 0.02}}

    data = {"libraries": {"peft": {"sizes": [size(128, 1.2), size(512, 1.1)]}, "unsloth": {"failed": "why"}}}
    result = {"environment": {"gpu": "Card", "date": "2026-01-01"}, "kernel_hash": "0", "data": data}
    figure = plots_training.training(result)
    assert "PEFT + bitsandbytes 1.20, 1.10" in figure.alt and figure.png()
    assert "not measured (no GPU)" in plots_training.training(
        {**result, "data": {"not_measured": "no GPU"}}
    ).alt.replace("Training speed ", "")
    assert "no result file" in plots_training.training(None).alt

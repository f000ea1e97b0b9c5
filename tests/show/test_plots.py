import pytest

from helpers.record import goals
from helpers.show import plots

SIZES = (2**16, 2**22, 58_720_256, 2**30)
NAMES = ("kernel", "unsloth_today", "unsloth_classic", "bitsandbytes", "copy", "floor_cuda", "floor_triton")
HOST = ("kernel", "unsloth_today", "unsloth_classic", "bitsandbytes", "peft", "empty_strided + fill_")


def invented(position: int, *parts) -> float:
    """Some number that differs for every series and every point, the same in each run."""
    return 10.0 + position + sum(ord(letter) for letter in "".join(map(str, parts))) % 97


@pytest.fixture
def result():
    cases = [
        {
            "numel": numel,
            "dtype": dtype,
            "rows": {name: {"gb_s": 10 * invented(i, name, dtype)} for name in NAMES},
            "vs": {name: 1 + invented(i, dtype, name) / 100 for name in NAMES[1:4]},
        }
        for i, numel in enumerate(SIZES)
        for dtype in ("float16", "bfloat16")
    ]
    cases.insert(0, {"numel": 2**31, "dtype": "float16", "skipped": "needs more memory"})
    parts = {
        name: {key: invented(i, name) / 10 for i, key in enumerate((*plots.PARTS, "returned_us"))}
        for name in HOST
    }
    entries = {
        name: {
            "spread": {"p20": seconds - 0.5, "p50": seconds, "p80": seconds + 0.7},
            "speedup_over": {"unsloth_today": 20 / seconds},
        }
        for name, seconds in ((name, invented(0, name)) for name in HOST[:5])
    }
    entries["broken"] = {"spread": None, "speedup_over": {}}
    return {
        "environment": {
            "gpu": "Card of a test",
            "date": "2030-01-02T03:04:05+00:00",
            "torch": "9.9",
            "triton": "8.8",
        },
        "kernel_hash": "0123456789abcdef",
        "data": {
            "gpu": {"sizes": cases},
            "host": {"parts": parts, "cases": [{"shape": [1024, 4096], "dtype": "bfloat16"}]},
            "protocol": {"entries": entries, "rounds": 1000, "repeats": 5},
        },
    }


def series(panel) -> dict[str, tuple[list, list]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}


def in_order(result, dtype):
    return [case for case in result["data"]["gpu"]["sizes"] if case["dtype"] == dtype and "rows" in case]


def test_speedup_is_the_data(result):
    figure = plots.speedup_by_size(result)
    for panel, dtype in zip(figure.axes, ("float16", "bfloat16"), strict=True):
        drawn = series(panel)
        for name in ("unsloth_today", "unsloth_classic", "bitsandbytes"):
            expected = [case["vs"][name] for case in in_order(result, dtype)]
            assert drawn[plots.LABELS[name]] == (list(SIZES), expected)
        assert len(drawn) == 4, "and the line of ours, nothing else"
        low, high = panel.get_ylim()
        assert low < 1.0 and high > max(max(ys) for _, ys in drawn.values())


def test_bandwidth_is_the_data_with_both_ceilings(result):
    figure = plots.bandwidth_by_size(result)
    for panel, dtype in zip(figure.axes, ("float16", "bfloat16"), strict=True):
        drawn = series(panel)
        labels = {name: plots.LABELS[name] for name in NAMES[:5]}
        labels |= {kind: f"ceiling: no arithmetic, {text}" for kind, text in goals.FLOORS.items()}
        for name, label in labels.items():
            expected = [case["rows"][name]["gb_s"] for case in in_order(result, dtype)]
            assert drawn[label] == (list(SIZES), expected)


def test_classic_is_not_drawn_where_bitsandbytes_line_hides_it(result):
    for case in in_order(result, "float16"):
        case["vs"]["unsloth_classic"] = 1.01 * case["vs"]["bitsandbytes"]
        case["rows"]["unsloth_classic"] = {"gb_s": 0.99 * case["rows"]["bitsandbytes"]["gb_s"]}
    both = "bitsandbytes (and Unsloth classic: same kernels)"
    for figure in (plots.speedup_by_size(result), plots.bandwidth_by_size(result)):
        fp16, bf16 = map(series, figure.axes)
        assert both in fp16 and not {"bitsandbytes", "Unsloth classic"} & set(fp16)
        assert both not in bf16 and {"bitsandbytes", "Unsloth classic"} <= set(bf16)
        assert both in figure.alt


def test_a_notebook_gets_the_words_with_the_picture(result):
    formatters = pytest.importorskip("IPython.core.formatters")
    figure = plots.call_parts(result)
    data, metadata = formatters.DisplayFormatter().format(figure)
    assert data["image/png"].startswith(b"\x89PNG")
    assert metadata["image/png"] == {"alt": figure.alt} and figure.alt


def test_parts_of_a_call_stack_to_its_total(result):
    figure = plots.call_parts(result)
    (panel,) = figure.axes
    names = [text.get_text() for text in panel.get_yticklabels()]
    assert sorted(names) == sorted(plots.LABELS[name] for name in HOST)
    parts = {plots.LABELS[name]: row for name, row in result["data"]["host"]["parts"].items()}
    ends = dict.fromkeys(names, 0.0)
    for (key, (label, _)), bars in zip(plots.PARTS.items(), panel.containers, strict=True):
        assert bars.get_label() == label
        for name, bar in zip(names, bars, strict=True):
            assert bar.get_width() == pytest.approx(parts[name][key])
            assert bar.get_x() == pytest.approx(ends[name])
            ends[name] += bar.get_width()


def test_a_part_below_zero_is_drawn_as_nothing(result):
    result["data"]["host"]["parts"]["kernel"]["rest_us"] = -0.4
    (panel,) = plots.call_parts(result).axes
    assert min(bar.get_width() for bars in panel.containers for bar in bars) == 0


def test_protocol_bars_are_the_medians(result):
    figure = plots.protocol(result)
    (panel,) = figure.axes
    entries = result["data"]["protocol"]["entries"]
    expected = sorted((entries[name]["spread"]["p50"], plots.LABELS[name]) for name in HOST[:5])
    names = [text.get_text() for text in panel.get_yticklabels()]
    assert [(bar.get_width(), name) for bar, name in zip(panel.patches, names, strict=True)] == expected
    texts = " ".join(text.get_text() for text in panel.texts)
    ours, today = (entries[name]["spread"]["p50"] for name in ("kernel", "unsloth_today"))
    assert f"{ours:.3f} s (1)" in texts and f"{today:.3f} s ({today / ours:.2f})" in texts
    entries["kernel"]["spread"] = None
    (panel,) = plots.protocol(result).axes
    assert "(" not in " ".join(text.get_text() for text in panel.texts), "no ratio to what has no time"


@pytest.mark.parametrize("name", plots.FIGURES)
def test_every_figure_names_card_date_and_kernel(result, name):
    figure = plots.FIGURES[name](result)
    label = figure._supxlabel.get_text()
    for fact in ("Card of a test", "2030-01-02", "0123456789abcdef", "torch 9.9", "triton 8.8"):
        assert fact in label
        assert fact in plots.alt_text(figure)


@pytest.mark.parametrize("name", plots.FIGURES)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "not in this result file"),
        (
            dict.fromkeys(("gpu", "host", "protocol"), {"not_measured": "needs an NVIDIA GPU"}),
            "needs an NVIDIA GPU",
        ),
        (dict.fromkeys(("gpu", "host", "protocol"), {"failed": "gpu: boom"}), "gpu: boom"),
        ({"gpu": {"sizes": []}, "host": {"cases": [], "parts": {}}, "protocol": {"entries": {}}}, ""),
    ],
)
def test_what_was_not_measured_is_said(result, name, data, reason):
    result["data"] = data
    figure = plots.FIGURES[name](result)
    assert not any(panel.patches or panel.lines for panel in figure.axes)
    for panel in figure.axes:
        (text,) = panel.texts
        assert "not measured" in text.get_text() and reason in text.get_text()
    assert "not measured" in plots.alt_text(figure)
    assert figure.png()


@pytest.mark.parametrize("name", plots.FIGURES)
def test_no_result_file_at_all(name):
    figure = plots.FIGURES[name](None)
    assert "no result file" in figure.axes[0].texts[0].get_text()


def test_one_dtype_missing_leaves_the_other_drawn(result):
    sizes = result["data"]["gpu"]["sizes"]
    result["data"]["gpu"]["sizes"] = [case for case in sizes if case["dtype"] == "bfloat16"]
    fp16, bf16 = plots.speedup_by_size(result).axes
    assert "not measured" in fp16.texts[0].get_text()
    assert len(series(bf16)) == 4


def test_pictures_are_opaque_white_and_fit_a_colab_cell(result, tmp_path):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    paths = plots.save_all(result, tmp_path / "figures")
    assert set(paths) == set(plots.FIGURES)
    for path in paths.values():
        pixels = matplotlib_image.imread(path)
        assert 700 <= pixels.shape[1] <= 850
        corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
        assert (corners == 1).all()


def test_forced_and_quick_runs_are_labelled(result):
    result["environment"]["forced"] = "t4"
    result["data"]["quick"] = True
    assert "decisions forced: t4" in plots.caption(result)
    assert "quick run" in plots.caption(result)

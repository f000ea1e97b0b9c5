import pytest

from helpers.results import names, old_store as results
from helpers.results import idea, plots
from helpers.t4.simulated import Span, Total

FIGURES = {"share_by_size": plots.share_by_size, "call_parts": plots.call_parts, "training": plots.training}


@pytest.fixture
def of(result, training):
    """{name of a figure: the result it is drawn from}."""
    return {"share_by_size": result, "call_parts": result, "training": training}


def series(panel) -> dict[str, list[tuple]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in panel.lines}


def test_shares_are_the_ratios_of_the_data(result):
    panels = plots.share_by_size(result).axes
    for panel, dtype in zip(panels, names.DTYPES, strict=True):
        drawn = series(panel)
        cases = [case for case in result.data.gpu.sizes if case.dtype == dtype and case.rows]
        for name in ("kernel", *names.BASELINES_ON_GPU):
            shares = [(case.numel, results.ratio(case.rows, "ceiling_cuda", name)) for case in cases]
            assert drawn[names.label(name)] == shares
            assert all(
                line.get_marker() != "None" for line in panel.lines if line.get_label() == names.label(name)
            )
        assert len(drawn) == 5, "and the line of the byte-mover, nothing else"


def test_without_the_ceiling_there_is_no_share(result):
    for case in result.data.gpu.sizes:
        case.rows.pop(names.CEILING, None)
    for panel in plots.share_by_size(result).axes:
        assert not panel.lines and "not measured" in panel.texts[0].get_text()


def test_classic_is_not_drawn_where_bitsandbytes_line_hides_it(result):
    for case in result.data.gpu.sizes:
        if case.rows and case.dtype == "float16":
            case.rows["unsloth_classic"].p50 = 1.01 * case.rows["bitsandbytes"].p50
    figure = plots.share_by_size(result)
    both = "bitsandbytes, Unsloth classic (same kernels)"
    fp16, bf16 = map(series, figure.axes)
    assert both in fp16 and not {"bitsandbytes", "Unsloth classic"} & set(fp16) and both in figure.alt
    assert both not in bf16 and {"bitsandbytes", "Unsloth classic"} <= set(bf16)


def test_one_dtype_missing_leaves_the_other_drawn(result):
    result.data.gpu.sizes[:] = [case for case in result.data.gpu.sizes if case.dtype == "bfloat16"]
    fp16, bf16 = plots.share_by_size(result).axes
    assert "not measured" in fp16.texts[0].get_text() and len(series(bf16)) == 5


def test_parts_of_a_call_stack_to_its_total(result):
    result.data.host.parts["kernel"].rest_us = -0.4  # drawn as nothing
    (panel,) = plots.call_parts(result).axes
    shown = [text.get_text() for text in panel.get_yticklabels()]
    parts = {names.label(name): part for name, part in result.data.host.parts.items()}
    assert sorted(shown) == sorted(parts)
    ends = dict.fromkeys(shown, 0.0)
    for (key, (label, _)), bars in zip(plots.PARTS.items(), panel.containers, strict=True):
        assert bars.get_label() == label
        for name, bar in zip(shown, bars, strict=True):
            assert bar.get_width() == pytest.approx(max(0.0, getattr(parts[name], key)))
            assert bar.get_x() == pytest.approx(ends[name])
            ends[name] += bar.get_width()


def test_training_bars_are_the_medians(training):
    figure = plots.training(training)
    (bars,) = [c for c in figure.axes[0].containers if hasattr(c, "patches")]
    assert [bar.get_height() for bar in bars] == [1.2, 1.1] and bars.get_label() == "PEFT"
    assert "PEFT 1.20, 1.10" in figure.alt and "Unsloth" not in figure.alt


def test_a_t4s_bars_end_where_the_sums_do():
    totals = {
        "kernel": Total(Span(2.5, 2.9), Span(0.2, 0.3)),
        "unsloth_classic": Total(Span(2.6, 3.1), Span(0.5, 0.7)),
    }
    figure = plots.t4(totals, (3.5, 4.5), "where it is from")
    (line,) = [c.lines[0] for c in figure.axes[0].containers if "others" in str(c.get_label())]
    assert line.get_xdata() == [4.0] and "Unsloth classic, by others: 3.5 to 4.5 s" in figure.alt
    ends = sorted(bar.get_x() + bar.get_width() for bar in figure.axes[0].patches)
    assert ends == pytest.approx(sorted([2.5, 2.7, 3.2, 2.6, 3.1, 3.8]))
    assert "predicted, not measured here" in figure.alt and "where it is from" in figure.alt
    assert "with calls 2.7 to 3.2 s" in figure.alt


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_card_date_kernel_and_an_earlier_kernel(of, name):
    figure = FIGURES[name](of[name])
    for fact in ("Card of a test", "2030-01-02", "0123abcd", "torch 9.9", "triton 8.8", results.EARLIER):
        assert fact in figure._supxlabel.get_text() and fact in figure.alt


@pytest.mark.parametrize("name", ["share_by_size", "call_parts"])
def test_what_was_not_measured_is_said(result, name):
    result.data.gpu, result.data.host, reason = None, None, "needs an NVIDIA GPU"
    result.data.not_measured = dict.fromkeys(("gpu", "host"), reason)
    figure = FIGURES[name](result)
    assert not any(panel.patches or panel.lines for panel in figure.axes)
    assert all(reason in panel.texts[0].get_text() for panel in figure.axes)
    assert "not measured" in figure.alt and figure.png()


def test_a_notebook_gets_the_words_with_the_picture(result):
    formatters = pytest.importorskip("IPython.core.formatters")
    figure = plots.call_parts(result)
    data, metadata = formatters.DisplayFormatter().format(figure)
    assert data["image/png"].startswith(b"\x89PNG") and metadata["image/png"] == {"alt": figure.alt}


def test_pictures_are_opaque_white_and_fit_a_colab_cell(result, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    (tmp_path / "a.png").write_bytes(plots.share_by_size(result).png())
    pixels = image.imread(tmp_path / "a.png")
    assert 700 <= pixels.shape[1] <= 850 and (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] == 1).all()


def test_the_idea_has_the_kernels_numbers():
    """What the picture says is stored is what bitsandbytes makes of the layer's first word."""
    from helpers.puzzle.protocol import expected

    numbers = idea.numbers()
    assert numbers["stored"] == expected(numbers["layer"]).flatten()[:8].tolist()
    picture = idea.idea()
    texts = [text.get_text() for text in picture.axes[0].texts]
    followed = numbers["stored"][idea.FOLLOWED]
    assert texts.count(f"{followed:.3f}") >= 2 and f"fetches {followed:.3f} from lane" in picture.alt
    assert any("2.516" in text for text in texts)
    assert names.bytes_moved(2**24) / 2**24 == pytest.approx(2.516, abs=5e-4)


@pytest.mark.gpu
def test_the_idea_is_drawn_beside_a_gpu():
    """From the layer of a machine without one, so that the picture is the same."""
    assert idea.numbers()["layer"].weight.device.type == "cpu"

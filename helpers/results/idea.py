"""The picture of the idea: a real layer's first word, its scale, the table of 16 lanes, what is stored."""

import torch
from matplotlib.patches import FancyArrowPatch, Rectangle

from helpers.nf4.kernel import NF4
from helpers.nf4.layers import quantized_layer
from helpers.results.plots import DPI, INK, WIDTH, Picture, styled

FOLLOWED = 3  # the code of the word whose way is drawn
PALE, BLUE, GREEN, GOLD, ARROW = "#EEF2F6", "#CFE3F5", "#D7EFD9", "#FDEBC8", "#D55E00"


def numbers() -> dict:
    """The first two blocks of a layer of 2 x 128 normal weights, computed as the kernel does, in fp16."""
    state = (layer := quantized_layer(128, 2, torch.float16, device="cpu")).weight.quant_state
    absmax, absmax2, offset = int(state.absmax[0]), state.state2.absmax[0], state.offset
    scales = (state.state2.code[state.absmax.long()] * absmax2 + offset)[:2]
    codes = [nibble for byte in layer.weight.data.flatten()[:4].tolist() for nibble in divmod(byte, 16)]
    table = [(torch.tensor(NF4) * scale).to(torch.float16).tolist() for scale in scales]
    return {
        "layer": layer,
        "codes": codes,
        "absmax": absmax,
        "code2": float(state.state2.code[absmax]),
        "absmax2": float(absmax2),
        "offset": float(offset),
        "scales": scales.tolist(),
        "table": table,
        "stored": [table[0][code] for code in codes],
    }


@styled
def idea() -> Picture:
    """From 4 bytes and a scale to 8 weights in one 128-bit store."""
    n = numbers()
    code, stored = n["codes"][FOLLOWED], n["stored"][FOLLOWED]
    lane_x = 19.2 + 5 * code + 2.5
    word = lane_x - 4.6 * (FOLLOWED + 0.5)
    figure = Picture(figsize=(WIDTH, 4.7), dpi=DPI)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 100), ylim=(0, 62))
    panel.set_axis_off()

    def box(x, y, width, text, color=PALE, size=7.0, strong=False):
        edge, line, layer = (ARROW, 1.6, 3) if strong else ("#8A97A3", 0.6, 2)
        style = dict(facecolor=color, edgecolor=edge, linewidth=line, zorder=layer)
        panel.add_patch(Rectangle((x, y), width, 3.4, **style))
        say(x + width / 2, y + 1.6, text, size, ha="center", zorder=4)

    def say(x, y, text, size=7.6, **style):
        panel.text(x, y, text, fontsize=size, va="center", **({"color": INK} | style))

    def arrow(start, end):
        style = dict(arrowstyle="-|>", mutation_scale=10, color=ARROW, linewidth=1.3, zorder=5)
        panel.add_patch(FancyArrowPatch(start, end, **style))

    say(1, 59.5, "1  The bytes", 9, weight="bold")
    facts = (
        (f"absmax {n['absmax']}", f"one byte per block: code2[{n['absmax']}] = {n['code2']:.4f}"),
        (f"{n['absmax2']:.4f}", "times absmax2, fp32, one per 256 blocks"),
        (f"{n['offset']:.4f}", "plus offset, fp32, one per tensor"),
    )
    for row, (value, text) in enumerate(facts):
        box(3, 53.4 - 3.9 * row, 11, value, GOLD)
        say(15.2, 55 - 3.9 * row, text)
    say(3, 43.2, f"scale = {n['scales'][0]:.4f}: two roundings, never an FMA", weight="bold")
    say(53, 57.8, "a 32-bit word: 4 bytes, 8 codes, high nibble first")
    for i, nibble in enumerate(n["codes"]):
        color = BLUE if i // 2 % 2 == 0 else PALE
        box(word + 4.6 * i, 52, 4.6, f"{nibble:X}", color, 9, i == FOLLOWED)
    say(53, 49, "8 words: a block")
    say(lane_x + 1.5, 45, f"code {code:X} asks lane {code:X}", color=ARROW)

    say(1, 39.6, "2  The table: one register in 16 lanes, its two halves for two blocks", 9, weight="bold")
    rows = (
        ("lane", PALE),
        ("NF4 value", PALE),
        (f"x {n['scales'][0]:.4f}, low half", BLUE),
        (f"x {n['scales'][1]:.4f}, high half", GREEN),
    )
    for row, (text, color) in enumerate(rows):
        y = 33.4 - 3.4 * row
        say(18.6, y + 1.6, text, 6.8, ha="right")
        for lane in range(16):
            halves = (f"{half[lane]:.3f}" for half in n["table"])
            cell = (f"{lane:X}", f"{NF4[lane]:.3f}", *halves)[row]
            box(19.2 + 5 * lane, y, 5, cell, color, 6.0, row == 2 and lane == code)
    say(3, 20.6, "16 products per block, each rounded once: all that its 64 weights can be")

    say(1, 15.4, "3  The lookup: 8 codes, 8 shuffles, one 128-bit store", 9, weight="bold")
    for i, value in enumerate(n["stored"]):
        box(lane_x - 3.5 * 6.2 + 6.2 * i, 8.6, 6.2, f"{value:.3f}", BLUE, 7.0, i == FOLLOWED)
    say(3, 10.2, "8 x 16 bits, in order, fp16 here. bf16: rounded")
    say(3, 7.2, "in step 2, in integers where the card has none")
    text = "bytes per weight: 0.5 of codes + 1/64 of absmax + 4/16384 of absmax2 read, 2 written: 2.516"
    say(3, 2.6, text, weight="bold")
    arrow((lane_x, 51.8), (lane_x, 37.2))
    arrow((lane_x, 23.0), (lane_x, 12.3))
    figure.alt = (
        f"The codes {' '.join(f'{c:X}' for c in n['codes'])} of a 32-bit word; the scale "
        f"{n['scales'][0]:.4f} from an absmax byte, absmax2 and the offset; 16 lanes, each with its NF4 "
        f"value times the scales of two blocks in the halves of one register; code {code:X} fetches "
        f"{stored:.3f} from lane {code:X}, one of 8 values that leave in one 128-bit store."
    )
    return figure

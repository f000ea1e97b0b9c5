"""Names and sizes that every room shares: dtypes, contenders, cards, measured sizes, bytes an element."""

DTYPES = {"float16": "fp16", "bfloat16": "bf16"}  # the official outputs, and how they are shown
CARD = "nvidia-h200"  # the folder under results/ that README and the notebook quote
T4 = "tesla-t4"  # ... and where the first run on a T4 belongs

BASELINES_ON_GPU = ("unsloth_today", "unsloth_classic", "bitsandbytes")  # with GPU code of their own
CEILING = "ceiling_cuda"  # moves the bytes and computes nothing, in CUDA C
ALLOCATE_FILL = "empty_strided + fill_"  # the least a call can cost that returns new memory
BYTE_MOVER = "byte_mover"  # no arithmetic, our tile, our launch path
LABELS = {
    "kernel": "this kernel",
    "unsloth_today": "Unsloth today",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_zoo": "bitsandbytes through unsloth_zoo",
    "peft": "PEFT",
    ALLOCATE_FILL: "allocate + fill",
    BYTE_MOVER: "only moves the bytes",
}

SMALLEST, LARGEST = 2**16, 2**30  # elements: the span in which no size may be slower than Unsloth today
SHARES = {4_194_304: 0.96, 16_777_216: 0.98, 58_720_256: 0.99, 234_881_024: 0.99}  # of the ceiling, to reach
TARGET_SIZES = tuple(SHARES)
HOST_SHAPE = (1024, 4096)  # the smallest official layer: there a call weighs most


def label(name: str) -> str:
    """How a contender is shown; a name without a label is its own."""
    return LABELS.get(name, name)


def size_text(numel: int) -> str:
    """65536 -> '64K', 2**30 -> '1G', 58720256 -> '58.7M' (decimal where it is no power of two)."""
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if numel >= scale and numel.bit_count() == 1:
            return f"{numel // scale}{unit}"
    return f"{numel / 1e6:.3g}M" if numel >= 1e6 else f"{numel / 1e3:.3g}k"


def bytes_moved(numel: int) -> int:
    """Bytes that must cross DRAM for `numel` elements: packed codes, scales and 16-bit output, each once.

    An element reads 0.5 + 1/64 + 4/16384 bytes and writes 2. The codebooks and the offset (about 1 KB, read
    once and then cached) are left out.
    """
    blocks = -(-numel // 64)
    return -(-numel // 2) + blocks + 4 * -(-blocks // 256) + 2 * numel

"""How long a kernel takes on a card, from its instruction counts and its bytes.

The time is the largest of the pipes' and the memory's times. Every rate carries its source; none was
measured by this project on a T4. What the model is worth shows on a card with stored measurements:
`python -m helpers sass` applies it there too and prints the error.
"""

from dataclasses import dataclass, field

GUIDE = "CUDA C++ Programming Guide, table of arithmetic throughput"
TURING = "NVIDIA Turing whitepaper, figure of the SM"
JIA = "Jia et al. 2019, arXiv:1903.07486 (T4 microbenchmarks)"
HOPPER = "NVIDIA H100 whitepaper, figure of the SM"
OCCUPANCY = "CUDA C++ Programming Guide, technical specifications per compute capability"

# Opcode stems (before the first dot) to the pipe that executes them. FMA-pipe integer multiplies count as fp.
PIPES = {
    "int": """IADD3 IADD LOP3 LOP LOP32I PLOP3 SHF SHL SHR LEA PRMT ISETP SEL IMNMX VIMNMX SGXT BMSK MOV
        IABS IDP FSETP FSEL FSET FMNMX FCHK HMNMX2 HSETP2 HSET2 P2R R2P VABSDIFF VABSDIFF4 I2IP F2FP BREV
        VOTE VIADD VIADDMNMX""",
    "fp": """FADD FMUL FFMA FSWZADD FADD32I FMUL32I FFMA32I IMAD IMUL
        HADD2 HMUL2 HFMA2 HADD2_32I HMUL2_32I HFMA2_32I""",
    "load/store": "LDG STG LD ST LDS STS LDL STL LDC LDSM STSM SHFL MATCH ATOM ATOMG ATOMS RED CCTL MEMBAR",
    "conversion": "F2F F2I I2F I2I FRND MUFU FLO POPC",
    "uniform": """UIADD3 ULOP3 UPLOP3 USHF ULEA UCLEA UMOV ULDC UISETP USEL UIMAD UIMNMX UPRMT USGXT UBMSK
        UFLO UPOPC UP2UR R2UR S2UR VOTEU""",
    "control": """EXIT BRA BRX JMP CALL RET BSSY BSYNC BREAK WARPSYNC YIELD NOP BAR DEPBAR ERRBAR BMOV KILL
        S2R CS2R NANOSLEEP RPCMOV ELECT ACQBULK PREEXIT LEPC""",
}
_PIPE_OF = {stem: pipe for pipe, stems in PIPES.items() for stem in stems.split()}
SHOWN = ("int", "fp", "load/store", "conversion", "uniform", "control")


def pipe_of(opcode: str) -> str:
    """The pipe of a SASS opcode such as "LDG.E.128.SYS"; "unknown" for one this table does not have."""
    return _PIPE_OF.get(opcode.split(".")[0], "unknown")


@dataclass(frozen=True)
class Rate:
    """A figure of a card and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Card:
    """What the model needs of a card. `lanes`: thread-instructions a clock and SM, by pipe ("issue": all)."""

    name: str
    arch: int
    sms: Rate
    clock_ghz: tuple[Rate, Rate]  # low, high
    dram_gb_s: tuple[Rate, Rate]  # achieved, low and high; peak is apart
    peak_gb_s: Rate
    lanes: dict[str, Rate]
    l1_bytes: Rate  # a clock and SM
    threads: int  # resident, an SM
    blocks: int
    registers: int
    shared_kib: int
    reserved: int  # bytes of shared memory the driver keeps of every block
    occupancy_source: str = OCCUPANCY


T4 = Card(
    name="Tesla T4",
    arch=75,
    sms=Rate(40, "NVIDIA T4 datasheet: 2560 CUDA cores, 64 an SM"),
    clock_ghz=(
        Rate(0.9, "assumed for a throttled 70 W card"),
        Rate(1.59, "T4 datasheet, boost"),
    ),
    dram_gb_s=(
        Rate(213, "published by a solution of this puzzle, 8192x8192"),
        Rate(240, f"assumed, 75% of the peak; 220 in {JIA}"),
    ),
    peak_gb_s=Rate(320, "NVIDIA T4 datasheet"),
    lanes={
        "issue": Rate(128, f"4 schedulers: {TURING}"),
        "int": Rate(64, f"{GUIDE}, 7.5"),
        "fp": Rate(64, f"{GUIDE}, 7.5"),
        "load/store": Rate(16, f"{TURING} (the guide's 32 shuffles a clock are more)"),
        "conversion": Rate(16, f"{GUIDE}, 7.5"),
    },
    l1_bytes=Rate(64, f"L1 and shared memory, bytes a clock: {JIA}"),
    threads=1024,
    blocks=16,
    registers=65536,
    shared_kib=64,
    reserved=0,
)
H200 = Card(
    name="NVIDIA H200",
    arch=90,
    sms=Rate(132, "NVIDIA H100 whitepaper, SXM5 (the H200 carries the same GPU)"),
    clock_ghz=(Rate(1.98, "NVIDIA H200 boost clock"), Rate(1.98, "NVIDIA H200 boost clock")),
    dram_gb_s=(
        Rate(4800, "peak; replaced by the bandwidth measured in the stored run"),
        Rate(4800, "peak; replaced by the bandwidth measured in the stored run"),
    ),
    peak_gb_s=Rate(4800, "NVIDIA H200 datasheet"),
    lanes={
        "issue": Rate(128, f"4 schedulers: {HOPPER}"),
        "int": Rate(64, f"{GUIDE}, 9.0"),
        "fp": Rate(128, f"{GUIDE}, 9.0"),
        "load/store": Rate(32, f"{HOPPER}; also the guide's shuffles"),
        "conversion": Rate(64, f"{GUIDE}, 9.0"),
    },
    l1_bytes=Rate(128, f"L1 and shared memory, bytes a clock: {HOPPER}"),
    threads=2048,
    blocks=32,
    registers=65536,
    shared_kib=228,
    reserved=1024,
)
CARDS = {card.arch: card for card in (T4, H200)}

# The official protocol: (elements of one weight, dtype, calls of that size in 1000 rounds).
OFFICIAL = (
    (2048 * 8192, "float16", 3000),
    (1024 * 4096, "bfloat16", 3000),
    (4096 * 14336, "bfloat16", 3000),
)
CALLS = sum(calls for *_, calls in OFFICIAL)

# Seconds of the official protocol on a T4 that others published; never measured by this project.
PUBLISHED_TOTALS = {
    "Unsloth classic": (3.91, 5.5),
    "best public solutions (fp16 only, looser tolerances)": (3.35, 3.4),
}
# Published totals of public solutions less their kernels' time, microseconds a call on a T4 Colab.
PUBLISHED_CALL_US = (60.0, 77.0)
# Classic's three launches against one fused kernel at 4.2M elements, in a cycle-level Turing simulation of
# the sm_75 machine code: fp16 at 1.35 GHz to bf16 at 0.9 GHz. A simulation by others, not this model.
SIMULATED_GAIN = (1.05, 1.18)
CLASSIC_LABELS = ("decode of absmax", "add of the offset", "decode of the weight")


@dataclass(frozen=True)
class Prediction:
    """Microseconds, the fast and the slow end; what bounds each end; pipe times (us) at the slow end."""

    low: float
    high: float
    bound_low: str
    bound_high: str
    pipes: dict[str, float] = field(default_factory=dict)

    @property
    def busiest(self) -> tuple[str, float]:
        """The busiest pipe at the slow end, and its share of the memory's time."""
        pipe = max(self.pipes.keys() - {"DRAM"}, key=self.pipes.get)
        return pipe, self.pipes[pipe] / self.pipes["DRAM"]


def pipe_times(card: Card, elements: float, per_element: dict, clock_ghz: float) -> dict[str, float]:
    """Microseconds each pipe is busy. per_element: thread-instructions by pipe, "total" and "l1 bytes"."""
    cycles = elements / card.sms.value
    times = {
        pipe: cycles * per_element.get("total" if pipe == "issue" else pipe, 0.0) / rate.value
        for pipe, rate in card.lanes.items()
    }
    times["l1"] = cycles * per_element.get("l1 bytes", 0.0) / card.l1_bytes.value
    return {pipe: time / clock_ghz / 1e3 for pipe, time in times.items()}


def memory_time(nbytes: float, gb_s: float) -> float:
    """Microseconds to move `nbytes` at `gb_s` GB/s."""
    return nbytes / gb_s / 1e3


def predict(
    card: Card, elements: float, nbytes: float, per_element: dict[str, float], gb_s: float | None = None
) -> Prediction:
    """Time of one kernel: the largest of its pipes' times and its memory time.

    `nbytes` cross DRAM; `gb_s` replaces the card's own range of achieved bandwidth. Launch latency, the
    first and last wave, bank conflicts and imperfect overlap are not modelled (they lengthen the time), nor
    is the L2 cache (it shortens that of small tensors).
    """
    ends = []
    for clock, bandwidth in zip(reversed(card.clock_ghz), reversed(card.dram_gb_s), strict=True):
        times = pipe_times(card, elements, per_element, clock.value)
        times["DRAM"] = memory_time(nbytes, gb_s or bandwidth.value)
        ends.append((max(times.values()), max(times, key=times.get), times))
    (low, bound_low, _), (high, bound_high, times) = ends
    return Prediction(low, high, bound_low, bound_high, times)


def occupancy(card: Card, threads: int, registers: int, shared: int) -> float:
    """Share of an SM's resident threads that blocks of `threads` with these resources can fill (0 to 1)."""
    warps = -(-threads // 32)
    a_warp = -(-max(registers, 1) * 32 // 256) * 256  # registers are allotted in units of 256 a warp
    by_registers = card.registers // a_warp // warps
    need = shared + card.reserved
    by_shared = card.shared_kib * 1024 // need if need else card.blocks
    blocks = min(card.blocks, card.threads // (warps * 32), by_registers, by_shared)
    return blocks * warps * 32 / card.threads


def dram_bytes(elements: int, itemsize: int = 2, nested: bool = True) -> float:
    """Bytes a fused kernel must move: packed codes, scales and the output, each once."""
    return elements * (0.5 + itemsize) + elements / 64 * (1 + 4 / 256 if nested else 4)


def classic_kernels(elements: int, itemsize: int = 2) -> list[tuple[str, float, float]]:
    """(what, elements, bytes) of Unsloth classic's three launches: an fp32 absmax goes through memory."""
    blocks = elements / 64
    decode, add, weight = CLASSIC_LABELS
    return [
        (decode, blocks, blocks * (1 + 4 / 256 + 4)),
        (add, blocks, blocks * 8),
        (weight, elements, elements * (0.5 + itemsize) + blocks * 4),
    ]


def official_total(predict_call) -> tuple[float, float]:
    """Seconds of GPU time in the official protocol; predict_call(elements, dtype) predicts one call."""
    low = high = 0.0
    for elements, dtype, calls in OFFICIAL:
        prediction = predict_call(elements, dtype)
        low += calls * prediction.low * 1e-6
        high += calls * prediction.high * 1e-6
    return low, high


def call_cost(ratios: list[float]) -> tuple[float, float]:
    """Seconds the official protocol's calls lose beside the kernel on a T4 Colab.

    The published 60 to 77 us a call times the least and the largest of `ratios`: a contender's host cost over
    Unsloth's, measured elsewhere. Python's part scales with the host, the driver's does not: hence a range.
    """
    low, high = PUBLISHED_CALL_US
    return CALLS * low * min(ratios) * 1e-6, CALLS * high * max(ratios) * 1e-6

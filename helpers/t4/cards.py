"""The card generations that people own: what an SM holds, and which card stands for each.

From the CUDA C++ Programming Guide, technical specifications per compute capability.
"""

from dataclasses import dataclass

REGISTERS = 65536  # an SM's, in all of them


@dataclass(frozen=True)
class Card:
    """One generation. Threads and blocks that an SM holds at most, its shared memory in KiB."""

    arch: int
    name: str
    threads: int
    blocks: int
    shared_kib: int
    reserved: int  # bytes of shared memory that the driver keeps of every block

    def occupancy(self, threads: int, registers: int, shared: int) -> float:
        """Share of the resident threads that blocks with these resources fill (0 to 1).

        threads: per block; registers: per thread; shared: bytes per block.
        """
        warps = -(-threads // 32)
        per_warp = -(-max(registers, 1) * 32 // 256) * 256  # allotted in units of 256
        limits = [self.blocks, self.threads // (warps * 32), REGISTERS // per_warp // warps]
        if shared + self.reserved:
            limits.append(self.shared_kib * 1024 // (shared + self.reserved))
        return min(limits) * warps * 32 / self.threads


CARDS = {
    card.arch: card
    for card in (
        Card(75, "Tesla T4", 1024, 16, 64, 0),
        Card(80, "A100", 2048, 32, 164, 1024),
        Card(86, "RTX 30, A10", 1536, 16, 100, 1024),
        Card(89, "L4, RTX 40", 1536, 24, 100, 1024),
        Card(90, "H100, H200", 2048, 32, 228, 1024),
        Card(100, "B200", 2048, 32, 228, 1024),
        Card(120, "RTX 50", 1536, 24, 100, 1024),
    )
}

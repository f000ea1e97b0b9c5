"""The card generations that people own: what an SM holds, and which card stands for each.

From the CUDA C++ Programming Guide, technical specifications per compute capability.
"""

from dataclasses import dataclass

REGISTERS = 65536  # an SM's, in all of them


@dataclass(frozen=True)
class Card:
    """One generation. Threads and blocks that an SM holds at most, its shared memory in KiB."""

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
        by_shared = self.shared_kib * 1024 // max(shared + self.reserved, 1)
        limits = (self.blocks, self.threads // (warps * 32), REGISTERS // per_warp // warps, by_shared)
        return min(limits) * warps * 32 / self.threads


CARDS = {  # by the number of their sm_
    75: Card("Tesla T4", 1024, 16, 64, 0),
    80: Card("A100", 2048, 32, 164, 1024),
    86: Card("RTX 30, A10", 1536, 16, 100, 1024),
    89: Card("L4, RTX 40", 1536, 24, 100, 1024),
    90: Card("H100, H200", 2048, 32, 228, 1024),
    100: Card("B200", 2048, 32, 228, 1024),
    120: Card("RTX 50", 1536, 24, 100, 1024),
}

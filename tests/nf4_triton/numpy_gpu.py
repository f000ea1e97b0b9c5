"""A GPU made of numpy, to test launches without one: kernels get addresses and integers, and read and write
memory there. It fails where a launch breaks what the compiled kernel assumes. It does not test the kernels.
"""

import collections
import contextlib
import ctypes
import threading

import numpy as np
import torch
import triton

from nf4_triton.core import reference
from nf4_triton.core.checks import DTYPES, OFFSETS
from nf4_triton.core.settings import settings

TABLES = {quant_type: np.float32(values) for quant_type, values in reference.VALUES.items()}
# Values for the puzzle's kernel of arguments that only the general kernel takes.
PUZZLES = dict(
    skip=0, SELECT=False, NESTED=True, QUANT_TYPE="nf4", BYTES=False, LOG2_ROW=6, UNIT=64, ALIGNED=True
)
OWN = -1  # torch's index of the device of a tensor on the CPU


def memory_of(x):
    """Return (start, end) of a tensor's memory; the same address twice if it has none."""
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return 0, 0
    return x.data_ptr(), x.data_ptr() + min(x.nbytes, x.untyped_storage().nbytes())


class NumpyGPU(threading.local):
    """The state of one thread."""

    def __init__(self):
        self.owned = None  # memory that a replay may touch, as [(start, end)]; None: any
        self.current = OWN  # device
        self.launches = collections.Counter()  # by kernel: through Triton (ordinary), and replays (kept)

    def install(self, room, monkeypatch):
        """Replace a launch module's kernels, allocator, and streams by this GPU's."""
        replacements = {
            "launcher": lambda compiled, version: (compiled.run, ()),
            "empty_cuda": self.empty,
            "current_stream": lambda device: 100 + device,
            "current_device": lambda: self.current,
            "CAN_RELAUNCH": True,
        }
        for name in ("_your_dequantize_nf4_kernel", "_dequantize_general_kernel"):
            replacements[name] = Kernel(self, getattr(room, name, None))
        for name, value in replacements.items():
            if hasattr(room, name):
                monkeypatch.setattr(room, name, value)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def own(self, *tensors):
        """Let replays touch only the memory of these tensors and of those that they allocate."""
        self.owned = [memory_of(x) for x in tensors]

    def empty(self, size, stride, dtype):
        result = torch.full(size, np.nan, dtype=dtype, device="cpu").as_strided(size, stride)
        if self.owned is not None:
            self.owned.append(memory_of(result))
        return result


class Kernel:
    """kernel[(grid,)](*arguments, **options) compiles and launches it."""

    def __init__(self, gpu, kernel):
        self.gpu, self.kernel = gpu, kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion):
            assert not enable_fp_fusion, "an FMA changes bits"
            compiled = Compiled(self.gpu, self.kernel, arguments)
            compiled.launch("ordinary", *grid, [memory_of(x) for x in arguments], arguments)
            return compiled

        return launch


class Compiled:
    """A kernel compiled for the dtypes and the constexprs of a call."""

    def __init__(self, gpu, kernel, arguments):
        self.gpu, self.name, self.names = gpu, kernel.fn.__name__, kernel.arg_names
        named = dict(zip(self.names, arguments, strict=True))
        self.dtypes = {name: x.dtype for name, x in named.items() if isinstance(x, torch.Tensor)}
        self.constexprs = {name: x for name, x in named.items() if name.isupper()}

    def run(self, grid, y, z, stream, *arguments):
        assert (y, z, stream, self.gpu.current) == (1, 1, 100 + OWN, OWN), "another device or its stream"
        assert self.constexprs["TILE_ROWS"] == settings().tile_rows, "settings were forced since"
        assert self.constexprs.get("ALIGNED", True), "slow stores"
        assert triton.knobs.runtime.launch_enter_hook is not bool, "a profiler's hook sees nothing"
        self.launch("kept", grid, self.gpu.owned, arguments)

    def launch(self, how, grid, owned, arguments):
        self.gpu.launches[f"{how} {self.name}"] += 1
        named = dict(zip(self.names, arguments, strict=True))
        for name, value in self.constexprs.items():
            assert named[name] == value, f"{name} is {named[name]}, compiled for {value}"
        for name in self.dtypes:
            if isinstance(named[name], torch.Tensor):
                named[name] = named[name].data_ptr()
        Program(named, self.dtypes, owned).run(grid)


class Program:
    """A launch. The kernel's arguments are attributes; pointers are addresses."""

    def __init__(self, arguments, dtypes, owned):
        vars(self).update(PUZZLES | arguments)
        self.offsets = OFFSETS if "SELECT" in arguments else (torch.float32,)
        self.dtypes, self.owned = dtypes, owned

    def at(self, name, first, number, *dtypes):
        """Return elements of a pointer's memory, whose dtype must be one of these."""
        dtype = self.dtypes[name]
        assert dtype in dtypes, f"{name} is of {dtype}"
        size, address = number * dtype.itemsize, getattr(self, name) + first * dtype.itemsize
        assert address > 4096, f"{name} has no memory"
        if self.owned is not None:
            inside = (start <= address and address + size <= end for start, end in self.owned)
            assert any(inside), f"{name} touches memory of no tensor of the call"
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)

    def run(self, grid):
        tiles = -(-self.n // (64 * self.TILE_ROWS))
        assert grid > 0 and grid % tiles == 0 and self.n % self.UNIT == 0, "grid or unit"
        assert self.UNIT <= 1 << self.LOG2_ROW <= 1 << self.LOG2_BLOCK
        assert self.LOG2_BLOCK - self.LOG2_ROW < 32, "a shift that has no meaning for int32"
        if not self.SELECT:
            assert grid == tiles, "grid"
            return self.dequantize(self.skip, 0)
        for i, id in enumerate(self.at("ids_ptr", 0, grid // tiles, torch.int32, torch.int64).tolist()):
            exists = 0 <= id < self.slices
            self.dequantize(id * self.n if exists else 0, i * self.n, exists)

    def dequantize(self, source, target, exists=True):
        """Dequantize n elements, starting at `source`, into elements starting at `target`."""
        n, blocks = self.n, np.arange(source, source + self.n) >> self.LOG2_BLOCK
        out = self.at("out_ptr", target, n, *DTYPES)
        codes = 2 if self.BYTES else 8
        bytes = self.at("weight_ptr", source // 2, -(-n // codes) * codes // 2, torch.uint8).numpy()
        assert source % (1 << self.LOG2_ROW) == 0, "begins within a row"
        words = bytes.ctypes.data % 16 == 0 and n % 8 == 0
        assert self.BYTES != words or self.SELECT and words, "words that are not aligned, or bytes that are"
        assert not self.ALIGNED or out.data_ptr() % 16 == 0, "a result that is not aligned"
        code = np.stack([bytes >> 4, bytes & 15], 1).reshape(-1)[:n]
        scale = self.each("absmax_ptr", blocks, torch.uint8 if self.NESTED else torch.float32)
        if self.NESTED:
            scale = self.at("code2_ptr", 0, 256, torch.float32).numpy()[scale]
            scale = scale * self.each("absmax2_ptr", blocks >> self.LOG2_BLOCK2, torch.float32)
            scale = scale + self.at("offset_ptr", 0, 1, *self.offsets).float().numpy()
        value = TABLES[self.QUANT_TYPE][code] * scale
        out.copy_(torch.from_numpy(value if exists else value * np.float32(np.nan)))

    def each(self, name, which, dtype):
        """Return these elements of a pointer's memory."""
        first, last = int(which[0]), int(which[-1])
        return self.at(name, first, last + 1 - first, dtype).numpy()[which - first]

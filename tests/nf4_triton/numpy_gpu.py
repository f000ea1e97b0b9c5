"""A GPU made of numpy, to test launches without one: kernels get addresses and integers, and read and write
memory there. It fails where a launch breaks what the compiled kernel assumes. It does not test the kernels.
"""

import collections
import contextlib
import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import torch

from nf4_triton import reference

TABLES = {"nf4": reference.NF4_VALUES, "fp4": reference.FP4_VALUES}
TABLES = {name: np.array(values, np.float32) for name, values in TABLES.items()}
# What the puzzle's kernel does not take as an argument.
PUZZLES = dict(
    skip=0, SELECT=False, NESTED=True, QUANT_TYPE="nf4", BYTES=False, LOG2_ROW=6, UNIT=64, ALIGNED=True
)
BYTE, FLOAT = {torch.uint8}, {torch.float32}
HALF = {torch.float16, torch.bfloat16}
DTYPES = dict(weight_ptr=BYTE, absmax_ptr=BYTE, code2_ptr=FLOAT, absmax2_ptr=FLOAT, offset_ptr=FLOAT)
DTYPES |= dict(out_ptr=HALF, ids_ptr={torch.int32, torch.int64})
GENERAL = DTYPES | dict(out_ptr=HALF | FLOAT, offset_ptr=HALF | FLOAT | {torch.float64})
DEVICE = -1  # what torch says of a tensor on the CPU


def memory_of(tensor):
    """Return (start, end) of a tensor's memory; it is empty for what has none."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        return 0, 0
    start = tensor.data_ptr()
    return start, start + tensor.nbytes if tensor.untyped_storage().nbytes() else start


class NumpyGPU(threading.local):
    """What a thread sees of it."""

    def __init__(self):
        self.owned = None  # memory that a relaunch may read or write, as (start, end); None: any
        self.current = DEVICE
        self.counts = collections.Counter()
        self.fails = False  # whether the next ordinary launch raises OSError

    def install(self, room, monkeypatch):
        """Give a launch room kernels, an allocator, and streams of this GPU, whatever it has of these."""
        replaced = dict(
            launcher=lambda compiled, version: (compiled.run, ()),
            empty_cuda=self.empty,
            current_stream=lambda index: 100 + index,
            current_device=lambda: self.current,
            CAN_RELAUNCH=True,
        )
        for name in ("_your_dequantize_nf4_kernel", "_dequantize_general_kernel"):
            if hasattr(room, name):
                replaced[name] = Kernel(self, getattr(room, name))
        for name, value in replaced.items():
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
        """From now on relaunches may touch the memory of these alone."""
        self.owned = [memory_of(x) for x in tensors]

    def empty(self, size, stride, dtype):
        """Return new memory full of NaN."""
        with torch.device("cpu"):
            result = torch.full(size, float("nan"), dtype=dtype).as_strided(size, stride)
        if self.owned is not None:
            self.owned.append(memory_of(result))
        return result


class Kernel:
    """Stands in for a kernel: kernel[(grid,)](*arguments, **options) compiles it and launches it."""

    def __init__(self, gpu, kernel):
        self.gpu, self.kernel, self.arg_names = gpu, kernel, kernel.arg_names

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion):
            assert not enable_fp_fusion, "an FMA changes bits"
            if self.gpu.fails:
                self.gpu.fails = False
                raise OSError("no space left on device")
            self.gpu.counts["ordinary"] += 1
            compiled = Compiled(
                self.gpu, self.kernel.fn.__name__, dict(zip(self.arg_names, arguments, strict=True))
            )
            compiled.launch(*grid, [memory_of(x) for x in arguments], arguments)
            return compiled

        return launch


class Compiled:
    """A kernel compiled for the dtypes and the constexprs of a call."""

    def __init__(self, gpu, name, arguments):
        self.gpu, self.name, self.arg_names = gpu, name, list(arguments)
        self.dtypes = {name: x.dtype for name, x in arguments.items() if name.endswith("_ptr")}
        self.constexprs = {name: value for name, value in arguments.items() if name.isupper()}

    def run(self, grid, y, z, stream, *arguments):
        """Launch it again."""
        assert (y, z) == (1, 1) and stream == 100 + DEVICE and self.gpu.current == DEVICE, "another device"
        self.gpu.counts["again"] += 1
        self.launch(grid, self.gpu.owned, arguments)

    def launch(self, grid, owned, arguments):
        given = dict(zip(self.arg_names, arguments, strict=True))
        for name, value in self.constexprs.items():
            assert given[name] == value, f"{name} is {given[name]!r}, compiled for {value!r}"
        for name in self.dtypes:
            if isinstance(given[name], torch.Tensor):
                given[name] = given[name].data_ptr()
        Program(self, owned, SimpleNamespace(**PUZZLES | given)).run(grid)


class Program:
    """A launch: k has its arguments by their names."""

    def __init__(self, compiled, owned, k):
        self.dtypes, self.owned, self.k = compiled.dtypes, owned, k
        self.allowed = GENERAL if "SELECT" in compiled.constexprs else DTYPES
        if not k.NESTED:
            self.allowed = self.allowed | {"absmax_ptr": FLOAT}

    def at(self, name, first, number):
        """Return `number` elements from `first` on of an argument's memory."""
        dtype = self.dtypes[name]
        assert dtype in self.allowed[name], f"{name} has {dtype}"
        size, address = number * dtype.itemsize, getattr(self.k, name) + first * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")
        assert address % dtype.itemsize == 0, f"{name} between elements"
        if self.owned is not None:
            inside = (start <= address and address + size <= end for start, end in self.owned)
            assert any(inside), f"{name} reads or writes outside of what the call was given"
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)

    def run(self, grid):
        k = self.k
        tile = -(-k.n // (64 * k.ROWS))
        assert grid > 0 and k.n % k.UNIT == 0 and k.UNIT <= 1 << k.LOG2_ROW <= 1 << k.LOG2_BLOCK
        if not k.SELECT:
            assert grid == tile, "grid"
            self.slice(k.skip, 0, True)
            return
        number, rest = divmod(grid, tile)
        assert not rest, "grid"
        for i, id in enumerate(self.at("ids_ptr", 0, number).tolist()):
            exists = 0 <= id < k.slices
            self.slice(id * k.n if exists else 0, i * k.n, exists)

    def slice(self, source, target, exists):
        """Dequantize n elements from `source` on."""
        k = self.k
        assert source % (1 << k.LOG2_ROW) == 0, "a slice that begins within a row"
        out = self.at("out_ptr", target, k.n)
        assert not k.ALIGNED or out.data_ptr() % 16 == 0, "a result that is not aligned"
        codes = 2 if k.BYTES else 8
        data = self.at("weight_ptr", source // 2, -(-k.n // codes) * codes // 2)
        assert k.BYTES or data.data_ptr() % 16 == 0, "words that are not aligned"
        data = data.numpy()
        code = np.stack([data >> 4, data & 15], 1).reshape(-1)[: k.n]
        block = np.arange(source, source + k.n) >> k.LOG2_BLOCK
        blocks = np.arange(block[0], block[-1] + 1)
        scale = self.take("absmax_ptr", blocks)
        if k.NESTED:
            absmax2 = self.take("absmax2_ptr", blocks >> k.LOG2_BLOCK2)
            offset = self.at("offset_ptr", 0, 1).float().numpy()
            scale = self.at("code2_ptr", 0, 256).numpy()[scale] * absmax2 + offset
        result = TABLES[k.QUANT_TYPE][code] * scale[block - block[0]]
        out.copy_(torch.from_numpy(result if exists else np.full_like(result, np.nan)))

    def take(self, name, which):
        """Return these elements, given in order, of an argument's memory."""
        first, last = int(which[0]), int(which[-1])
        return self.at(name, first, last + 1 - first).numpy()[which - first]

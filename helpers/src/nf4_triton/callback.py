"""Turn the kernel on during training: `Trainer(..., callbacks=[NF4KernelCallback()])`."""

import contextlib

from .environment import missing

try:
    from tqdm import tqdm
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    problem = missing("transformers", "tqdm", "bitsandbytes", "triton") or error
    raise ImportError(f"nf4_triton.NF4KernelCallback: {problem}") from error

from .libraries.switch import Switch, check_names, use_nf4_kernel
from .log import say


class NF4KernelCallback(TrainerCallback):
    """Switch the kernel on when training begins and off when it ends, for transformers', TRL's and Unsloth's
    trainers. A kernel that was on before stays on. At the end it logs the switch's report.

    Takes the arguments of use_nf4_kernel. Raises ValueError for an unknown name; with strict, on_train_begin
    raises the same errors as that function. If training is interrupted, the kernel stays on until restore()
    or the end of the callback's next training.
    """

    def __init__(self, *names: str, quiet: bool = False, strict: bool = False):
        check_names(names)
        self.names, self.quiet, self.strict = names, quiet, strict
        self.switch: Switch | None = None

    def __getstate__(self) -> dict:
        return vars(self) | {"switch": None}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._end()
        self.switch = use_nf4_kernel(*self.names, quiet=self.quiet, strict=self.strict)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        switch = self._end()
        if switch and not self.quiet:
            # The trainer's progress bar is still open: it is cleared for this text and drawn again below it.
            with contextlib.suppress(Exception), tqdm.external_write_mode():
                say(str(switch))

    def _end(self) -> Switch | None:
        switch, self.switch = self.switch, None
        if switch:
            switch.__exit__()
        return switch

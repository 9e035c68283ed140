"""Whether a GPU can be used, and why not."""

import re
from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: str | torch.device) -> AbstractContextManager[object]:
    """In it, GPU number N of "cuda:N" is this thread's current one, on which kernels that are not torch's are
    launched. For any other device, also one that is not there, nothing changes."""
    number = re.fullmatch(r"cuda:(\d{1,3})", str(device))
    if number is None or int(number[1]) >= torch.cuda.device_count():
        return nullcontext()
    return torch.cuda.device(int(number[1]))


def answers(device: torch.device) -> bool:
    """Whether it still computes, to be asked after an error: most errors of CUDA leave nothing of a process'
    context. One whose memory is full does."""
    if device.type != "cuda":
        return True
    try:
        return torch.ones(1, device=device).item() == 1
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False


def too_old(device: torch.device, needed: tuple[int, int]) -> str | None:
    """One sentence where a GPU has a smaller compute capability than `needed`."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= needed:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, needed))
    return f"this GPU has compute capability {have}, and {need} is needed"


def why_no_gpu(device: torch.device) -> str | None:
    """One sentence, with what to do; None where `device` (cuda or cuda:N) can be used."""
    if torch.version.cuda is None:
        return (
            "this build of torch is for CPUs only; install one for CUDA (pytorch.org says which), or use cpu"
        )
    try:
        torch.cuda.init()  # says what `is_available` keeps to itself
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:300]
        return (
            f"torch {torch.__version__} cannot start CUDA {torch.version.cuda} here: {reason}; `nvidia-smi` "
            "says which driver there is, and a newer one or a torch for an older CUDA may help; or use cpu"
        )
    if not count:
        return "torch sees no GPU here; look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES, or use cpu"
    if (device.index or 0) >= count:
        seen = "one GPU, cuda:0" if count == 1 else f"GPUs cuda:0 to cuda:{count - 1}"
        return f"torch sees {seen}"
    return None

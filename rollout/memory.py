"""How much memory KV pages may take: bytes in, bytes out."""

import torch

from rollout.config import RolloutConfig


def max_kv_bytes(config: RolloutConfig, device: torch.device, held_bytes: int) -> int | None:
    """Bytes that KV pages may take on `device` now.

    Args:
        config: `kv_bytes`, or on a GPU `kv_fraction` of what is free.
        device: Where the pages live.
        held_bytes: Bytes that they take already.

    Returns:
        Bytes, or `None` for no limit.
    """
    if config.kv_bytes is not None or device.type != "cuda":
        return config.kv_bytes
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + cached + held_bytes) * config.kv_fraction)

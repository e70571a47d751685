"""The number formats that a device computes natively."""

import functools

import torch


@functools.cache
def has_native_bf16(device_type: str) -> bool:
    """Return whether a device multiplies bf16 matrices in hardware; elsewhere bf16 is emulated and
    several times slower than fp32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    instructions = torch.cpu.get_capabilities()
    return bool(instructions.get("avx512_bf16") or instructions.get("amx_bf16"))


def uses_bf16(tensor: torch.Tensor) -> bool:
    """Return whether a training step computes in bf16.

    It does if autocast selects bf16, gradients are required, and the tensor's device computes bf16
    natively.
    """
    device_type = tensor.device.type
    return (
        torch.is_grad_enabled()
        and torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.bfloat16
        and has_native_bf16(device_type)
    )

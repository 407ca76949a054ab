"""A device, so that the script believes there is one."""

from types import SimpleNamespace

current_platform = SimpleNamespace(device_type="cuda")

"""The GPUs of a node, read from their drivers: NVIDIA through NVML, AMD through AMD SMI."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Protocol

from isles.run.env import visible_devices

POWER_LIMIT = "its power limit"
"""Cause of throttling that is usual under full load."""

_REASONS = (
    (0x20 | 0x40, "heat"),
    (0x80, "the power supply"),
    (0x8, "the hardware"),
    (0x4, POWER_LIMIT),
)
"""Bits of nvmlClocksEventReasons (nvml.h), the most serious first."""

_ALL_LINKS = 0xFFFFFFFF
"""The scope of a field that is summed over all NVLinks (nvml.h: UINT_MAX)."""


class GpuReader(Protocol):
    """The GPUs that the ranks of a node see."""

    def read(self) -> list[dict[str, Any]]:
        """Metrics of each GPU, in the order of the local ranks; None: the driver does not report
        it."""

    def speed(self, position: int) -> tuple[float | None, str]:
        """Clock in MHz and cause of throttling, or empty, of the GPU of a local rank. Cheap."""


def find_cards(count: int) -> GpuReader | None:
    """The GPUs of the first `count` local ranks; None: no driver reports any."""
    for kind in (NvidiaCards, AmdCards):
        # The library or the driver may be missing or broken in any way: then there is no GPU.
        with suppress(Exception):
            return kind(visible_devices(), count)
    return None


class NvidiaCards:
    """NVIDIA GPUs, read through NVML.

    Args:
        wanted: entries of CUDA_VISIBLE_DEVICES; None: all.
        count: number of GPUs.

    Raises:
        Exception: of any type, if a driver or a GPU is missing.
    """

    def __init__(self, wanted: list[str] | None, count: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._cards = self._visible(wanted)[:count]
        if not self._cards:
            raise LookupError("no GPU")
        self._about = [
            tuple(_text(self._get(f"nvmlDeviceGet{what}", card)) for what in ("UUID", "Name"))
            for _, card in self._cards
        ]
        self._links: dict[int, tuple[float, tuple[int | None, ...]]] = {}
        self._buses: dict[int, tuple[float | None, float | None]] = {}
        self._turn = 0

    def read(self) -> list[dict[str, Any]]:
        found = [self._read(position) for position in range(len(self._cards))]
        self._turn += 1
        return found

    def speed(self, position: int) -> tuple[float | None, str]:
        _, card = self._cards[position]
        reasons = self._get("nvmlDeviceGetCurrentClocksEventReasons", card)
        if reasons is None:  # a driver before 535
            reasons = self._get("nvmlDeviceGetCurrentClocksThrottleReasons", card)
        clock_mhz = self._get("nvmlDeviceGetClockInfo", card, self._nvml.NVML_CLOCK_SM)
        return clock_mhz, next((why for bits, why in _REASONS if (reasons or 0) & bits), "")

    def _read(self, position: int) -> dict[str, Any]:
        nvml, (index, card) = self._nvml, self._cards[position]
        uuid, name = self._about[position]
        use = self._get("nvmlDeviceGetUtilizationRates", card)
        memory = self._get("nvmlDeviceGetMemoryInfo", card)
        sensor = nvml.NVML_TEMPERATURE_GPU
        degrees = self._get("nvmlDeviceGetTemperatureV", card, sensor)
        if degrees is None:  # a driver before 570
            degrees = self._get("nvmlDeviceGetTemperature", card, sensor)
        milliwatts = self._get("nvmlDeviceGetPowerUsage", card)
        clock_mhz, throttle = self.speed(position)
        if self._turn % len(self._cards) == position:
            # Each call takes the driver 20 ms, and other calls to the GPU wait for it.
            self._buses[position] = self._bus(card, "RX"), self._bus(card, "TX")
        pcie_in, pcie_out = self._buses.get(position, (None, None))
        nvlink_in, nvlink_out = self._link_rates(position, card)
        return {
            "index": index,
            "uuid": uuid,
            "name": name,
            "use": None if use is None else use.gpu / 100,
            "memory_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "temperature_c": degrees,
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "clock_mhz": clock_mhz,
            "throttle": throttle,
            "pcie_in": pcie_in,
            "pcie_out": pcie_out,
            "nvlink_in": nvlink_in,
            "nvlink_out": nvlink_out,
        }

    def _visible(self, wanted: list[str] | None) -> list[tuple[int, Any]]:
        # As CUDA reads CUDA_VISIBLE_DEVICES: it stops at the first invalid entry.
        nvml = self._nvml
        present = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # a GPU that has fallen off the bus
                present[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        if wanted is None:
            return list(present.items())
        uuids = {i: _text(self._get("nvmlDeviceGetUUID", card)) for i, card in present.items()}
        chosen: list[tuple[int, Any]] = []
        for entry in wanted:
            if entry.startswith("MIG-"):
                if (part := self._get("nvmlDeviceGetHandleByUUID", entry)) is None:
                    break
                chosen.append((len(chosen), part))
                continue
            named = (index for index, uuid in uuids.items() if uuid.startswith(entry))
            index = int(entry) if entry.isdecimal() else next(named, -1)
            if index not in present:
                break
            chosen.append((index, present[index]))
        return chosen

    def _bus(self, card: Any, way: str) -> float | None:
        counter = getattr(self._nvml, f"NVML_PCIE_UTIL_{way}_BYTES")
        kilobytes = self._get("nvmlDeviceGetPcieThroughput", card, counter)
        return None if kilobytes is None else kilobytes * 1e3

    def _link_rates(self, position: int, card: Any) -> tuple[float | None, ...]:
        # From counters in KiB; a GPU without NVLink has none.
        nvml, now = self._nvml, time.monotonic()
        ways = (getattr(nvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{way}") for way in ("RX", "TX"))
        fields = self._get("nvmlDeviceGetFieldValues", card, [(way, _ALL_LINKS) for way in ways])
        counts = tuple(
            int(field.value.ullVal) if field.nvmlReturn == nvml.NVML_SUCCESS else None
            for field in fields or ()
        )
        before_s, before = self._links.get(position, (now, ()))
        self._links[position] = now, counts
        if now <= before_s or len(counts) != 2 or len(before) != 2:
            return None, None
        return tuple(
            None if new is None or old is None else max(0, new - old) * 1024 / (now - before_s)
            for new, old in zip(counts, before, strict=True)
        )

    def _get(self, call: str, *args: Any) -> Any:
        # None if the GPU, the driver or the library does not report it.
        with suppress(self._nvml.NVMLError, AttributeError):
            return getattr(self._nvml, call)(*args)
        return None


class AmdCards:
    """AMD GPUs, read through AMD SMI. Same arguments and errors as `NvidiaCards`."""

    def __init__(self, wanted: list[str] | None, count: int) -> None:
        import amdsmi

        self._smi: Any = amdsmi
        amdsmi.amdsmi_init()
        present = list(enumerate(amdsmi.amdsmi_get_processor_handles()))
        if wanted is not None:
            numbers = [int(entry) for entry in wanted if entry.isdecimal()]
            present = [present[number] for number in numbers if number < len(present)]
        self._cards = present[:count]
        if not self._cards:
            raise LookupError("no GPU")

    def read(self) -> list[dict[str, Any]]:
        return [self._read(position) for position in range(len(self._cards))]

    def speed(self, position: int) -> tuple[float | None, str]:
        _, card = self._cards[position]
        kind = self._smi.AmdSmiClkType.GFX
        return self._number("amdsmi_get_clock_info", card, kind, key="clk"), ""

    def _read(self, position: int) -> dict[str, Any]:
        index, card = self._cards[position]
        smi = self._smi
        use = self._number("amdsmi_get_gpu_activity", card, key="gfx_activity")
        memory = {
            key: self._number("amdsmi_get_gpu_vram_usage", card, key=key)
            for key in ("vram_used", "vram_total")
        }
        used, total = (None if mb is None else int(mb) << 20 for mb in memory.values())
        power = self._number("amdsmi_get_power_info", card, key="current_socket_power")
        if power is None:  # a GPU older than the MI300
            power = self._number("amdsmi_get_power_info", card, key="average_socket_power")
        clock_mhz, throttle = self.speed(position)
        sensor = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return {
            "index": index,
            "uuid": self._get("amdsmi_get_gpu_device_uuid", card) or "",
            "name": (self._get("amdsmi_get_gpu_asic_info", card) or {}).get("market_name", ""),
            "use": None if use is None else use / 100,
            "memory_bytes": used,
            "memory_total_bytes": total,
            "temperature_c": self._get("amdsmi_get_temp_metric", card, *sensor),
            "power_w": power,
            "clock_mhz": clock_mhz,
            "throttle": throttle,
            **dict.fromkeys(("pcie_in", "pcie_out", "nvlink_in", "nvlink_out")),
        }

    def _number(self, call: str, *args: Any, key: str) -> float | None:
        value = (self._get(call, *args) or {}).get(key)
        return value if isinstance(value, int | float) else None  # "N/A"

    def _get(self, call: str, *args: Any) -> Any:
        with suppress(self._smi.AmdSmiException, AttributeError):
            return getattr(self._smi, call)(*args)
        return None


def _text(value: Any) -> str:
    # Old versions of the library give bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")

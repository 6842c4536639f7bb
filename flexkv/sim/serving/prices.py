"""What serving costs: `Prices`, `Prices.usd_per_hour`, `usd_per_mtoken`; `SOURCES` of the defaults.

Memory and disks are bought and written off over `years`; accelerators are rented by the hour.
"""

from __future__ import annotations

from dataclasses import dataclass

_HOURS_PER_YEAR = 24 * 365.25

SOURCES = {
    "accelerator_usd_per_h": "H100 SXM5, speciality providers, $2.50 to $3.50 an hour, the middle "
    "(mercatus-ai.com/blog/cloud-gpu-pricing, May 2026)",
    "dram_usd_per_gb": "DDR5 RDIMM, kit of 16 x 256 GB for $76,999 (tuttotech.net, 29 December "
    "2025)",
    "disk_usd_per_gb": "NVMe, WD_Black SN850X 8 TB for $1,080 (thegeek.games, 10 January 2026); a "
    "consumer drive",
    "years": "assumed",
}


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars; GB is 1e9 bytes. The defaults are those of SOURCES."""

    accelerator_usd_per_h: float = 3.0
    dram_usd_per_gb: float = 18.8
    disk_usd_per_gb: float = 0.135
    years: float = 4.0

    def usd_per_hour(self, accelerators: int, host_bytes: float, disk_bytes: float) -> float:
        """Return what the accelerators and the two tiers cost in an hour."""
        bought = host_bytes / 1e9 * self.dram_usd_per_gb + disk_bytes / 1e9 * self.disk_usd_per_gb
        return accelerators * self.accelerator_usd_per_h + bought / (self.years * _HOURS_PER_YEAR)

    def usd_per_mtoken(
        self,
        tokens: int,
        elapsed_s: float,
        *,
        accelerators: int,
        host_bytes: float,
        disk_bytes: float,
    ) -> float:
        """Return dollars per million tokens (input and output) that were served in `elapsed_s`."""
        hourly = self.usd_per_hour(accelerators, host_bytes, disk_bytes)
        return hourly * elapsed_s / 3600 / tokens * 1e6 if tokens else 0.0

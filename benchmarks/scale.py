"""The curves of docs/benchmarks.md: from 2 to 10,000 clusters, and from 15M to 70B parameters.

    python benchmarks/scale.py [--smoke] [clusters] [parameters] [speed]

Nothing is trained: fleets are simulated, as `isles plan --simulate` does.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from common import make_parser, print_figures

from isles.config.sections.outer import CodecConfig, CodecName
from isles.facts.models import load_shape
from isles.plan.simulate.engine import simulate
from isles.plan.simulate.fleet import FailuresConfig, FleetConfig, GroupConfig, HubConfig
from isles.plan.simulate.setting import CODEC_COSTS, SimulationSettings
from isles.plan.simulate.sizes import equal_fragments, fragment_numbers, llama_sizes

SMALLEST = 2
"""Points of each curve with --smoke."""
COUNTS = (2, 8, 32, 128, 256, 512, 1000, 3000, 10_000)
PARAMETERS = {"15M": 15e6, "150M": 150e6, "1B": 1e9, "7B": 7e9, "13B": 13e9, "70B": 70e9}
HOME_FLOPS, SITE_FLOPS = 66e12, 3.2e15
"""An RTX 4090, and eight H100, each at 40 % of its peak in bf16."""
_GBIT = 125e6
_OUTER_STEPS = 24
_NEVER_S = 1e9
"""`deadline`: rounds keep their length; after it clusters would train on without an average."""


def bar(part: float, width: int = 30) -> str:
    """A number from 0 to 1 as a picture."""
    return "█" * round(part * width)


def clusters(points: int | None) -> dict[str, float]:
    """Homes that train 150M parameters; one hub of 10 Gbit/s."""
    fragments = fragment_numbers(llama_sizes(load_shape("llama-150m")), 4)
    setting = SimulationSettings("homes", tuple(fragments), 32_768, 500, CodecConfig(), delay=20)
    setting = replace(setting, deadline_s=_NEVER_S)
    step_s = 6 * setting.parameters * setting.tokens_per_step / HOME_FLOPS
    hub = HubConfig(uplink=10 * _GBIT, downlink=10 * _GBIT)
    print(
        f"{setting.parameters / 1e6:.0f}M parameters, {step_s:.2f} s a step, 100 Mbit/s at home; "
        "each fails once in ten days\n"
        "clusters   goodput  outer step s  stale"
    )
    found = {}
    for count in COUNTS[:points]:
        group = GroupConfig(
            name="home",
            count=count,
            step=step_s,
            spread=0.02,
            failures=FailuresConfig(every=864_000.0, lasts=180.0),
        )
        fleet = FleetConfig(clusters=(group,), hub=hub)
        one = simulate(fleet, setting, rounds=_OUTER_STEPS)
        print(
            f"{count:>8}{one.goodput:>10.1%}{one.usual_outer_s:>14.1f}{one.stale_steps:>7.0f}  "
            f"{bar(one.goodput, 20)}",
            flush=True,
        )
        found[str(count)] = round(one.goodput, 4)
    return found


def parameters(points: int | None) -> dict[str, float]:
    """Sixteen sites of eight H100 with a link of 1 Gbit/s each; a hub of 10 Gbit/s."""
    codecs: tuple[CodecName, ...] = ("none", "int8", "int4", "topk")
    print("parameters    step s" + "".join(f"{codec:>9}" for codec in codecs))
    found = {}
    for name, numbers in list(PARAMETERS.items())[:points]:
        group = GroupConfig(
            name="site",
            count=16,
            step=6 * numbers * 2**19 / SITE_FLOPS,
            uplink=_GBIT,
            downlink=_GBIT,
            spread=0.02,
            failures=FailuresConfig(every=864_000.0, lasts=600.0),
        )
        fleet = FleetConfig(
            clusters=(group,), hub=HubConfig(uplink=10 * _GBIT, downlink=10 * _GBIT)
        )
        row = []
        for codec in codecs:
            setting = SimulationSettings(
                name,
                tuple(equal_fragments(int(numbers), 4)),
                2**19,
                500,
                CodecConfig(kind=codec),
                delay=50,
                costs=CODEC_COSTS[codec],
                deadline_s=_NEVER_S,
            )
            row.append(simulate(fleet, setting, rounds=_OUTER_STEPS).goodput)
            found[f"{name}_{codec}"] = round(row[-1], 4)
        cells = "".join(f"{part:>9.1%}" for part in row)
        print(
            f"{name:>10}{group.step:>10.3g}{cells}",
            flush=True,
        )
    return found


def speed(points: int | None) -> dict[str, float]:
    """How long the simulation itself takes, in seconds of this process."""
    found = {}
    for count in (100, 1000, 10_000)[: points and 1]:
        group = GroupConfig(
            name="home",
            count=count,
            step=2.0,
            spread=0.05,
            failures=FailuresConfig(every=864_000.0, lasts=120.0),
        )
        # A hub that grows with the fleet, so that it does not slow the clusters down.
        times = math.isqrt(count)
        rate = 10 * _GBIT * times
        hub = HubConfig(uplink=rate, downlink=rate, cpu=float(times))
        setting = SimulationSettings(
            "speed", tuple(equal_fragments(150_000_000, 4)), 32_768, 500, CodecConfig(), delay=20
        )
        began = time.process_time()
        result = simulate(FleetConfig(clusters=(group,), hub=hub), setting, rounds=100)
        spent = time.process_time() - began
        failures = result.figures()["failures"]
        print(
            f"{count:>6} clusters, 100 outer steps, {failures} failures, "
            f"{result.num_events} events: {spent:.2f} s",
            flush=True,
        )
        found[str(count)] = round(spent, 2)
    return found


def main() -> None:
    """Print a table for each curve, and one line of JSON at the end."""
    curves = {"clusters": clusters, "parameters": parameters, "speed": speed}
    parser = make_parser(__doc__)
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=f"{', '.join(curves)}, or all")
    options = parser.parse_args()
    if unknown := set(options.curves) - set(curves):
        parser.error(f"no such curve: {', '.join(sorted(unknown))}")
    points = SMALLEST if options.smoke else None
    print_figures({name: curves[name](points) for name in options.curves or curves})


if __name__ == "__main__":
    main()

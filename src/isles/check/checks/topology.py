"""What lies between the GPUs of a node: NVLink or PCIe, and what is to be expected of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from isles.check.checks.gpus import query
from isles.check.finding import Finding
from isles.check.plan import NodePlan
from isles.launch.gpus import ask_driver, find_gpus

Pairs = dict[tuple[int, int], str]
"""Words of `nvidia-smi topo -m`, such as NV4 or PHB, by two numbers of GPUs, the smaller first."""

_PATHS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the processor's PCIe bridge",
    "NODE": "several PCIe bridges of one processor",
    "SYS": "the link between processors",
    "SOC": "the link between processors",
}
"""From near to far; SOC is what old drivers call SYS."""

_ACROSS = ("SYS", "SOC")
_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one PCIe lane in one direction, by generation.

Source: PCI Express Base Specification, transfer rates less 8b/10b (1, 2), 128b/130b (3 to 5) and
flit encoding (6)."""

_PCIE = ("uuid", "index", "pcie.link.gen.max", "pcie.link.width.max", "pcie.link.width.current")
_GENERATIONS = ("uuid", "pcie.link.gen.gpumax", "pcie.link.gen.hostmax")
"""Unknown to drivers before 520: asked for by itself."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")
_NVLINKS = re.compile(r"NV(\d+)")
_CARD = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"Link \d+: ([\d.]+) GB/s")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, and the slot that it is in.

    Args:
        index: its number by the driver, in the order of the PCIe bus.
        gen, width: generation and lanes that card and slot both could have; 0: not known.
        width_now: lanes now. Unlike the generation a card does not lower them when idle.
        gpu_gen, host_gen: of the card alone and of the machine alone; 0: not known.
    """

    index: int
    gen: int
    width: int
    width_now: int
    gpu_gen: int = 0
    host_gen: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Over PCIe in one direction; 0: not known."""
        return _LANE_BYTES.get(self.gen, 0.0) * (self.width_now or self.width)


def topology(plan: NodePlan) -> Iterator[Finding]:
    """Findings on the links between the GPUs that the ranks of a node use."""
    found = find_gpus()
    cards = _cards()
    used = [cards[gpu.uuid] for gpu in found.gpus[: plan.nproc] if gpu.uuid in cards]
    if not used:
        return
    pairs = read_topology(ask_driver("topo", "-m")) if len(cards) > 1 else {}
    rates = read_nvlinks(ask_driver("nvlink", "-s")) if len(used) > 1 else {}
    others = [card.index for card in cards.values()]
    yield from link_findings(plan.name, used, pairs, rates, others)


def link_findings(
    name: str,
    used: Sequence[Card],
    pairs: Pairs,
    rates: Mapping[int, Sequence[float]],
    there: Sequence[int],
) -> Iterator[Finding]:
    """Findings on cards and what lies between them.

    Args:
        used: cards of the ranks, in the order of local ranks.
        rates: bytes a second of each NVLink of a card that is up, in one direction.
        there: numbers of all GPUs of the machine.
    """
    between = combinations(sorted(card.index for card in used), 2)
    words = {pair: pairs[pair] for pair in between if pair in pairs}
    bad = [*_narrow(name, used), *_far(name, used, pairs, there)]
    if not all(_NVLINKS.fullmatch(word) for word in words.values()):
        bad += _unequal(name, used)
    bad += _down(name, {card.index: rates.get(card.index, ()) for card in used})
    yield from bad
    if len(used) > 1 and not words:
        return  # the driver does not say
    slots = ", ".join(dict.fromkeys(_slot(card) for card in used if card.gen and card.width))
    if not words:
        if not bad and slots:
            yield Finding("gpu.links", "ok", name, f"one GPU, on {slots}", slots)
        return
    expected = min(pair_rate(pair, word, used, rates) for pair, word in words.items())
    measured = " + ".join(sorted(set(words.values()), key=_distance))
    texts = [
        f"{_meaning(word, rates)} between {_listed([p for p, w in words.items() if w == word])}"
        for word in sorted(set(words.values()), key=_distance)
    ]
    text = "; ".join(texts)
    if slots:
        text += f"; each on {slots}"
    limit = f"{expected / 1e9:.0f} GB/s" if expected else ""
    if limit:
        text += f"; {limit} in each direction are to be expected of the slowest pair"
    yield Finding("gpu.links", "ok", name, text, measured, limit)


def read_topology(text: str) -> Pairs:
    """The answer of `nvidia-smi topo -m`: a matrix whose head names GPUs, and other devices too."""
    rows = [_ANSI.sub("", line).split() for line in text.splitlines()]
    head: list[str] = []
    found: Pairs = {}
    for row in rows:
        if len(row) > 1 and all(_GPU.fullmatch(word) for word in row[:2]):
            head = row
        elif head and row and (own := _GPU.fullmatch(row[0])):
            for name, word in zip(head, row[1:], strict=False):
                other = _GPU.fullmatch(name)
                if other and int(own[1]) < int(other[1]):
                    found[int(own[1]), int(other[1])] = word
    return found


def read_nvlinks(text: str) -> dict[int, list[float]]:
    """The answer of `nvidia-smi nvlink -s`: bytes a second of each link that is up, by GPU."""
    found: dict[int, list[float]] = {}
    index = -1
    for line in text.splitlines():
        if card := _CARD.match(line.strip()):
            index = int(card[1])
            found[index] = []
        elif index in found and (link := _LINK.search(line)) and float(link[1]):
            found[index].append(float(link[1]) * 1e9)
    return found


def pair_rate(
    pair: tuple[int, int], word: str, used: Sequence[Card], rates: Mapping[int, Sequence[float]]
) -> float:
    """Bytes a second that a pair of GPUs may reach in one direction; 0: not known."""
    if links := _NVLINKS.fullmatch(word):
        own = [min(rates[index]) for index in pair if rates.get(index)]
        return min(own) * int(links[1]) if own else 0.0
    return min(card.bytes_per_s for card in used if card.index in pair)


def _cards() -> dict[str, Card]:
    generations = {row["uuid"]: row for row in query("gpu", _GENERATIONS)}
    found = {}
    for row in query("gpu", _PCIE):
        more = generations.get(row["uuid"], {})
        numbers = [_number(row[field]) for field in _PCIE[1:]]
        found[row["uuid"]] = Card(*numbers, *(_number(more.get(f)) for f in _GENERATIONS[1:]))
    return found


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0  # [N/A], [Not Supported]


def _narrow(name: str, used: Sequence[Card]) -> Iterator[Finding]:
    # Cards in slots that give less than card and board could, or that are set to less.
    fix = "put it into a slot with all its lanes and seat it anew; a riser, an adapter, a second "
    fix += "card or an M.2 disk may take half of them (the board's manual says which); see also "
    fix += "the BIOS: PCIe bifurcation and speed"
    for card in used:
        if 0 < card.width_now < card.width:
            text = f"GPU {card.index} runs on {card.width_now} of the {card.width} PCIe lanes that "
            text += "it could have"
            limit = f"x{card.width}"
            yield Finding("gpu.links", "warning", name, text, f"x{card.width_now}", limit, fix)
        elif 0 < card.gen < min(card.gpu_gen, card.host_gen):
            could = min(card.gpu_gen, card.host_gen)
            text = f"GPU {card.index} is held at PCIe generation {card.gen}, and card and machine "
            text += f"both know {could}"
            yield Finding(
                "gpu.links", "warning", name, text, f"gen {card.gen}", f"gen {could}", fix
            )


def _unequal(name: str, used: Sequence[Card]) -> Iterator[Finding]:
    # Over PCIe all wait for the card with the slowest slot.
    best = max(used, key=lambda card: card.bytes_per_s)
    for card in used:
        if 0 < card.bytes_per_s < best.bytes_per_s / 2 + 1 and card.width_now >= card.width:
            text = f"GPU {card.index} is on {_slot(card)}, GPU {best.index} on {_slot(best)}: "
            text += "the others wait for it in every exchange"
            fix = "a slot with more lanes; or leave it out (CUDA_VISIBLE_DEVICES) if the run is "
            fix += "faster without it"
            yield Finding("gpu.links", "warning", name, text, _slot(card), _slot(best), fix)


def _down(name: str, rates: Mapping[int, Sequence[float]]) -> Iterator[Finding]:
    most = max(map(len, rates.values()), default=0)
    for index, own in rates.items():
        if 0 < len(own) < most:
            text = f"{len(own)} NVLinks of GPU {index} are up, and {most} of another"
            fix = f"on {name}: nvidia-smi nvlink -s shows which are inactive; reboot; then its "
            fix += "bridge or baseboard"
            measured, limit = f"{len(own)} links", f"{most} links"
            yield Finding("gpu.links", "warning", name, text, measured, limit, fix)


def _far(name: str, used: Sequence[Card], pairs: Pairs, there: Sequence[int]) -> Iterator[Finding]:
    # Ranks on cards that are further from one another than other cards of this machine.
    own = sorted(card.index for card in used)
    if len(own) < 2 or len(own) >= len(there):
        return
    kinds: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("without NVLink between them", lambda word: _NVLINKS.fullmatch(word) is not None),
        ("on two processors", lambda word: word not in _ACROSS),
    )
    for what, is_near in kinds:
        far = [p for p in combinations(own, 2) if p in pairs and not is_near(pairs[p])]
        better = _together(sorted(there), len(own), pairs, is_near) if far else None
        if better is None:
            continue
        shown = ",".join(map(str, better))
        text = f"the ranks are on GPUs {', '.join(map(str, own))}, {what} ({_listed(far)}); GPUs "
        text += f"{', '.join(map(str, better))} are nearer to one another"
        fix = f"CUDA_VISIBLE_DEVICES={shown} before `isles train`, or in "
        fix += "clusters.0.environment.variables"
        measured = max((pairs[pair] for pair in far), key=_distance)
        limit = max((pairs[pair] for pair in combinations(better, 2)), key=_distance)
        yield Finding("gpu.links", "warning", name, text, measured, limit, fix)
        return


def _together(
    there: Sequence[int], count: int, pairs: Pairs, is_near: Callable[[str], bool]
) -> list[int] | None:
    # So many GPUs that are all near one another; from each first one those that fit, in order.
    for first in there:
        chosen = [first]
        for index in there:
            near = (pairs.get((min(o, index), max(o, index)), "X") for o in chosen)
            if index not in chosen and all(word != "X" and is_near(word) for word in near):
                chosen.append(index)
        if len(chosen) >= count:
            return sorted(chosen[:count])
    return None


def _distance(word: str) -> int:
    return [*_PATHS].index(word) + 1 if word in _PATHS else 0


def _meaning(word: str, rates: Mapping[int, Sequence[float]]) -> str:
    if links := _NVLINKS.fullmatch(word):
        known = [rate for own in rates.values() for rate in own]
        each = f" of {min(known) / 1e9:.3g} GB/s" if known else ""
        count = int(links[1])
        return f"NVLink ({count} link{'s' if count > 1 else ''}{each})"
    return f"PCIe through {_PATHS[word]} ({word})" if word in _PATHS else word


def _slot(card: Card) -> str:
    lanes = card.width_now or card.width
    rate = f", {card.bytes_per_s / 1e9:.3g} GB/s" if card.bytes_per_s else ""
    return f"PCIe gen {card.gen} x{lanes}{rate}"


def _listed(pairs: Sequence[tuple[int, int]]) -> str:
    # Pairs in few words: groups in which each is joined to each, then single pairs.
    numbers = sorted({index for pair in pairs for index in pair})
    if len(pairs) == len(numbers) * (len(numbers) - 1) // 2 and len(numbers) > 2:
        return f"all of GPUs {_spans(numbers)}"
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:6])
    return f"{shown} and {len(pairs) - 6} more pairs" if len(pairs) > 6 else f"GPUs {shown}"


def _spans(numbers: Sequence[int]) -> str:
    is_row = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]} to {numbers[-1]}" if is_row else ", ".join(map(str, numbers))

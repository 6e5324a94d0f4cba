"""trace.json checked into facts: nothing that it says is believed before it is known to make sense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from clearhead.trace.errors import TraceError
from clearhead.trace.format import (
    BIASES,
    DTYPES,
    FORMAT,
    KINDS,
    VERSION,
    Checks,
    Index,
    ModelFacts,
    Side,
    Site,
    SiteCheck,
    Tokens,
)
from clearhead.trace.visible import KINDS as MASK_KINDS

T = TypeVar("T")


def from_json(data: Any, where: str) -> Index:
    """The Index that parsed JSON states. Raises TraceError for anything that this version cannot read."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceError(f"{where} does not describe a trace of Clearhead's (format {FORMAT!r})")
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise TraceError(
            f"{where} was written in format version {version} by Clearhead {data.get('clearhead')}, and this one "
            f"reads up to version {VERSION}: upgrade Clearhead"
        )
    try:
        if version not in (1, VERSION):
            raise ValueError(f"version is {version!r}")
        if version == 1:
            data = _from_version_1(data)
        index = Index(
            _string(data["clearhead"]),
            ModelFacts(**_typed(ModelFacts, data["model"])),
            _each(_side, data["sides"]),
            _each(lambda facts: Site(**_typed(Site, facts)), data["sites"]),
            _checks(data["checks"]),
            version,
        )
        _check_whole(index)
        return index
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(
            f"{where} is damaged or was not written by Clearhead: {what}. Record the trace again"
        ) from None


def _from_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew one text and one attention a layer, and checked outputs without keeping what it found."""
    tokens = {name: list(column) for name, column in data["tokens"].items()} | {"special": [], "padding": []}
    count = len(tokens["ids"])
    more = {
        "kind": "self",
        "queries": count,
        "keys": count,
        "bias": "none",
        "causal": False,
        "numbers": [],
        "kept": "all",
    }
    return {
        "clearhead": data["clearhead"],
        "model": data["model"],
        "sides": [{"name": "self", "texts": [tokens], "grid": None}],
        "sites": [dict(facts) | more for facts in data["layers"]],
        "checks": {"sites": [], "missing": []},
    }


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "int | None": (int, type(None)),
    "Kind": (str,),
    "MaskKind": (str,),
    "Bias": (str,),
    "Literal['all', 'measures']": (str,),
    "tuple[int, ...]": (list,),
}


def _typed(kind: type, facts: Any) -> dict[str, Any]:
    """The fields of a dataclass from a JSON object, each of the type that its annotation says."""
    found = {}
    for name, annotation in kind.__annotations__.items():
        value = facts[name]
        if type(value) not in _TYPES[annotation.replace('"', "'")]:
            raise TypeError(f"{name!r} is {value!r}")
        if isinstance(value, int | float) and not math.isfinite(value):
            raise ValueError(f"{name!r} is {value}")
        if isinstance(value, list):
            value = _integers(name, value)
        found[name] = value
    return found


def _each(read: Callable[[Any], T], values: Any) -> tuple[T, ...]:
    if type(values) is not list:
        raise TypeError(f"{values!r} is not a list")
    return tuple(read(value) for value in values)


def _side(data: Any) -> Side:
    grid = data["grid"]
    if grid is not None:
        rows, columns = _integers("grid", grid)
        grid = (rows, columns)
    return Side(data["name"], _each(_tokens, data["texts"]), grid)


def _tokens(data: Any) -> Tokens:
    places = {name: _integers(name, data[name]) for name in ("special", "padding")}
    columns: dict[str, Any] = {name: tuple(data[name]) for name in ("ids", "text", "start", "stop")}
    if len({len(column) for column in columns.values()}) != 1 or not columns["ids"]:
        raise ValueError("its tokens are not complete")
    for name, column in columns.items():
        wanted = str if name == "text" else int
        if not all(type(value) is wanted for value in column):
            raise TypeError(f"its tokens' {name} are not all of one type")
    if any(not 0 <= place < len(columns["ids"]) for column in places.values() for place in column):
        raise ValueError("its tokens are marked where there are none")
    return Tokens(columns["ids"], columns["text"], columns["start"], columns["stop"], **places)


def site_and_check(data: Any) -> tuple[Site, SiteCheck]:
    """What an unfinished trace says of one site. Raises KeyError, TypeError or ValueError if it makes no sense."""
    return Site(**_typed(Site, data["site"])), SiteCheck(**_typed(SiteCheck, data["check"]))


def _checks(data: Any) -> Checks:
    sites = _each(lambda facts: SiteCheck(**_typed(SiteCheck, facts)), data["sites"])
    return Checks(sites, _each(_string, data["missing"]))


def _check_whole(index: Index) -> None:
    """Raise ValueError unless sides and sites fit each other."""
    names = [side.name for side in index.sides]
    if len(set(names)) != len(names) or not set(names) <= set(KINDS):
        raise ValueError(f"its sides are {names}")
    lengths = {}
    for side in index.sides:
        sizes = {len(tokens) for tokens in side.texts}
        if len(sizes) != 1:
            raise ValueError(f"the texts of side {side.name!r} are not of one length")
        (lengths[side.name],) = sizes
        if side.grid is not None and not 0 < side.grid[0] * side.grid[1] <= lengths[side.name]:
            raise ValueError(f"side {side.name!r} has a grid of {side.grid} and {lengths[side.name]} tokens")
    if len({(site.kind, site.layer) for site in index.sites}) != len(index.sites) or not index.sites:
        raise ValueError("layers are missing or named twice")
    checked = {(check.kind, check.layer) for check in index.checks.sites}
    for site in index.sites:
        _check_site(site, index.model, lengths)
        if site.kept == "measures" and (site.kind, site.layer) not in checked:
            raise ValueError(f"{site} keeps measures only, and was not checked when it was recorded")


def _check_site(site: Site, model: ModelFacts, lengths: dict[Any, int]) -> None:
    if site.kind not in KINDS:
        raise ValueError(f"a site is of kind {site.kind!r}; known are {KINDS}")
    if not 0 <= site.layer < model.layers:
        raise ValueError(f"there is no layer {site.layer} in a model of {model.layers}")
    if (site.queries, site.keys) != (lengths[site.query_side], lengths[site.key_side]):
        raise ValueError(f"{site} has {site.queries} queries and {site.keys} keys, which its tokens are not")
    if site.heads < 1 or site.key_heads < 1 or site.dim < 1 or site.heads % site.key_heads:
        raise ValueError(f"{site} has {site.heads} heads on {site.key_heads} of dim {site.dim}")
    if site.numbers and (len(set(site.numbers)) != site.heads or min(site.numbers) < 0):
        raise ValueError(f"{site} has {site.heads} heads with the numbers {site.numbers}")
    if site.mask not in MASK_KINDS or site.dtype not in DTYPES or site.bias not in BIASES:
        raise ValueError(
            f"{site} has mask {site.mask!r}, dtype {site.dtype!r} and bias {site.bias!r}; known are {MASK_KINDS}, "
            f"{DTYPES} and {BIASES}"
        )
    if site.kept not in ("all", "measures"):
        raise ValueError(f"{site} keeps {site.kept!r}")
    if site.softcap is not None and site.softcap <= 0:
        raise ValueError(f"{site} has softcap {site.softcap}")


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if type(values) is not list or not all(type(value) is int for value in values):
        raise TypeError(f"{name!r} is {values!r}")
    return tuple(values)


def _string(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value

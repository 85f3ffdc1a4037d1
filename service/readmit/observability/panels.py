"""Panels of classic Grafana dashboards (schema 39: Grafana 10 to 13), as plain dicts in a fixed order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Json = dict[str, Any]
Kind = Literal["stat", "timeseries", "bargauge", "table", "heatmap", "state-timeline"]

SOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24


@dataclass(frozen=True)
class Target:
    """One query. An instant one is asked at the end of the range, any other over it."""

    expr: str
    legend: str = ""
    instant: bool = False
    exemplar: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        title: what it shows.
        targets: its queries.
        unit: Grafana's name of the unit.
        text: what it means, and what to do when it is red.
        runbook: the alert whose runbook reads on.
        kind: how it is drawn.
        width: of 24 columns.
        red: from which value it is red; ``red_below`` turns that around.
        empty: what it says in place of a value that is not there.
        names: names of values, for tables of states.
    """

    title: str
    targets: Sequence[Target]
    unit: str
    text: str
    runbook: str
    kind: Kind = "timeseries"
    width: int = 8
    red: float | None = None
    red_below: bool = False
    empty: str = ""
    names: Mapping[int, str] = field(default_factory=dict)

    def build(self, number: int, x: int, y: int, runbooks: str) -> Json:
        """The panel as Grafana reads it, at a place of the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "links": [
                {"title": f"Runbook: {self.runbook}", "url": f"{runbooks}{self.runbook}.md", "targetBlank": True}
            ],
            "options": self._options(),
            "targets": [self._target(target, "ABCDEFGH"[place]) for place, target in enumerate(self.targets)],
        }

    @property
    def height(self) -> int:
        return 4 if self.kind == "stat" else 8

    def _defaults(self) -> Json:
        base, edge = ("red", "green") if self.red_below else ("green", "red")
        steps: list[Json] = [{"color": base if self.red is not None else "blue", "value": None}]
        if self.red is not None:
            steps.append({"color": edge, "value": self.red})
        defaults: Json = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.empty:
            defaults["noValue"] = self.empty
        if self.names:
            options = {str(value): {"text": name, "index": value} for value, name in self.names.items()}
            defaults["mappings"] = [{"type": "value", "options": options}]
        return defaults

    def _options(self) -> Json:
        if self.kind in ("stat", "bargauge"):
            return {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}, "orientation": "auto"}
        if self.kind == "timeseries":
            return {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}}
        if self.kind == "heatmap":
            return {"calculate": False, "yAxis": {"unit": self.unit}, "color": {"scheme": "Oranges", "mode": "scheme"}}
        if self.kind == "state-timeline":
            return {"mergeValues": True, "showValue": "auto", "legend": {"displayMode": "list", "placement": "bottom"}}
        return {"showHeader": True}

    def _target(self, target: Target, letter: str) -> Json:
        form = "heatmap" if self.kind == "heatmap" else "table" if self.kind == "table" else "time_series"
        built: Json = {
            "refId": letter,
            "datasource": SOURCE,
            "expr": target.expr,
            "legendFormat": target.legend or ("{{le}}" if self.kind == "heatmap" else "__auto"),
            "format": form,
            "instant": target.instant,
            "range": not target.instant,
        }
        return {**built, "exemplar": True} if target.exemplar else built


@dataclass(frozen=True)
class Dashboard:
    """One dashboard.

    Args:
        uid: stays the same for ever, so that links do.
        title: its name.
        text: what question it answers.
        panels: in the order of reading.
        build_info: the metric whose labels say which jobs and instances there are.
        slots: whether it has a variable for slots.
    """

    uid: str
    title: str
    text: str
    panels: Sequence[Panel]
    build_info: str = "readmit_build_info"
    slots: bool = False

    def build(self, runbooks: str) -> Json:
        """The dashboard as Grafana reads it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["readmit"],
            "schemaVersion": 39,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-24h", "to": "now"},
            "timezone": "browser",
            "links": [{"type": "dashboards", "tags": ["readmit"], "title": "readmit", "asDropdown": True}],
            "templating": {"list": list(self._variables())},
            "annotations": {"list": [_ANNOTATION] if self.build_info == "readmit_build_info" else []},
            "panels": list(self._placed(runbooks)),
        }

    def _placed(self, runbooks: str) -> Iterable[Json]:
        x = y = row = 0
        for number, panel in enumerate(self.panels, 1):
            if x + panel.width > _COLUMNS:
                x, y, row = 0, y + row, 0
            yield panel.build(number, x, y, runbooks)
            x, row = x + panel.width, max(row, panel.height)

    def _variables(self) -> Iterable[Json]:
        yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "refresh": 1}
        yield _variable("job", f"label_values({self.build_info}, job)")
        yield _variable("instance", f'label_values({self.build_info}{{job=~"$job"}}, instance)')
        if self.slots:
            yield _variable("slot", 'label_values(readmit_slot_wanted{job=~"$job", instance=~"$instance"}, slot)')


def _variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


_ANNOTATION: Final[Json] = {
    "name": "Recoveries",
    "datasource": SOURCE,
    "enable": True,
    "iconColor": "orange",
    "expr": 'changes(readmit_recovery_started_timestamp_seconds{job=~"$job", instance=~"$instance"}[$__interval]) > 0',
    "titleFormat": "Recovery of {{slot}}",
    "textFormat": "{{instance}}",
    "step": "60s",
}

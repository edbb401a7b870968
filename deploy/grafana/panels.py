"""What the dashboards are made of: queries, panels and their common look. Every panel has a unit and says what it shows.

Limits are queries too: `limit` draws a check's setting as the daemon has it in force (`runwatch_check_setting`), so a
line in a dashboard and the check that it belongs to cannot differ, whatever a run card says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
FAST = "15s"
"""The scrape interval of `deploy/prometheus/prometheus.yml`; the dashboards refresh as often."""

GREY, GREEN, ORANGE, RED, BLUE = "text", "green", "orange", "red", "blue"
LEVELS = {-1: ("unknown", GREY), 0: ("ok", GREEN), 1: ("warning", ORANGE), 2: ("critical", RED)}
NODE_STATES = {
    0: ("quiet", GREEN),
    1: ("armed", ORANGE),
    2: ("outside window", GREY),
    3: ("firing", RED),
    4: ("blocked", "purple"),
}
"""As `run:runwatch_node_state:code` of `deploy/prometheus/runwatch_records.yml` counts them."""
TOKENS_PER_SECOND, NATS = "si:tok/s", "suffix: nats"
YES = {0: ("no", RED), 1: ("yes", GREEN)}


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its series. `look` sets that series apart (Grafana field properties)."""

    expr: str
    legend: str = "__auto"
    look: Mapping[str, Any] | None = None


def dashed(colour: str) -> dict[str, Any]:
    """The look of a limit."""
    return {
        "color": {"mode": "fixed", "fixedColor": colour},
        "custom.lineStyle": {"fill": "dash", "dash": [8, 6]},
        "custom.lineWidth": 1,
        "custom.fillOpacity": 0,
    }


def finite(expr: str) -> str:
    """Only what a graph can draw: one NaN or infinity would leave the whole graph without a scale."""
    return f"{expr} > -Inf < Inf"


def signal(name: str) -> str:
    """PromQL of the newest value of a signal of the chosen run, where it is finite."""
    return finite(f'runwatch_signal{{run="$run", signal="{name}"}}')


def setting(check: str, name: str) -> str:
    """PromQL of a check's setting, as it is in force for the chosen run."""
    return f'runwatch_check_setting{{run="$run", check="{check}", setting="{name}"}}'


def limit(check: str, name: str, legend: str, colour: str = ORANGE, factor: float = 1) -> Query:
    """The line of a limit that is `factor` times a check's setting."""
    expr = setting(check, name)
    return Query(expr if factor == 1 else f"{factor:g} * {expr}", legend, dashed(colour))


AnyPanel = TypeVar(
    "AnyPanel",
    timeseries.Panel,
    stat.Panel,
    statetimeline.Panel,
    bargauge.Panel,
    table.Panel,
)


def _common(panel: AnyPanel, title: str, text: str, size: tuple[int, int]) -> AnyPanel:
    panel.title(title).description(text).datasource(SOURCE).span(size[0]).height(size[1])
    return panel


def _add(panel: AnyPanel, queries: Sequence[Query], *, instant: bool = False, as_table: bool = False) -> AnyPanel:
    for number, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        target = target.instant() if instant else target.range()
        panel.with_target(target.format(PromQueryFormat.TABLE) if as_table else target)
        if query.look:
            panel.override_by_name(query.legend, properties(query.look))
    return panel


def properties(look: Mapping[str, Any]) -> list[DynamicConfigValue]:
    """Field properties as an override lists them."""
    return [DynamicConfigValue(id_val=name, value=value) for name, value in look.items()]


def _colours(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    thresholds = [Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(thresholds)


def _words(words: Mapping[int, tuple[str, str]]) -> list[Any]:
    results = {
        str(code): ValueMappingResult(text=text, color=colour, index=place)
        for place, (code, (text, colour)) in enumerate(words.items())
    }
    return [ValueMap(options=results)]


def graph(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    size: tuple[int, int] = (8, 8),
    logarithmic: bool = False,
    stacked: bool = False,
    most: float | None = None,
) -> timeseries.Panel:
    """Lines over time. `stacked` for shares of a whole; `most` is where the axis ends."""
    panel = _common(timeseries.Panel(), title, text, size).unit(unit).line_width(2).fill_opacity(0)
    panel.show_points(looks.VisibilityMode.NEVER).span_nulls(span_nulls=False)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
    panel.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST).show_legend(show_legend=True)
    panel.legend(legend.placement(looks.LegendPlacement.BOTTOM).calcs([]))
    if logarithmic:
        panel.scale_distribution(common.ScaleDistributionConfig().type(looks.ScaleDistribution.LOG).log(10))
    if stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A")).fill_opacity(60)
    if most is not None:
        panel.min(0).max(most)
    return _add(panel, queries)


def number(
    title: str,
    text: str,
    unit: str,
    query: Query,
    *colours: tuple[float | None, str],
    words: Mapping[int, tuple[str, str]] | None = None,
    named: bool = False,
) -> stat.Panel:
    """The newest value, large; with `words` in words, and with `named` the name of its series instead."""
    panel = _common(stat.Panel(), title, text, (3, 4)).unit(unit).graph_mode(looks.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False))
    panel.thresholds(_colours(*(colours or ((None, BLUE),))))
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    panel.color_mode(looks.BigValueColorMode.VALUE).justify_mode(looks.BigValueJustifyMode.AUTO).no_value("none")
    panel.text_mode(looks.BigValueTextMode.NAME if named else looks.BigValueTextMode.VALUE)
    if words:
        panel.mappings(_words(words))
    return _add(panel, [query], instant=True)


def timeline(
    title: str, text: str, query: Query, words: Mapping[int, tuple[str, str]], size: tuple[int, int]
) -> statetimeline.Panel:
    """A band for each series that shows its state along time, in `words`."""
    panel = _common(statetimeline.Panel(), title, text, size).unit("none").mappings(_words(words))
    panel.show_value(looks.VisibilityMode.NEVER).merge_values(merge_values=True).row_height(0.85)
    panel.fill_opacity(85).line_width(0).per_page(40)
    panel.thresholds(_colours((None, GREY)))
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST).show_legend(show_legend=True)
    panel.legend(legend.placement(looks.LegendPlacement.BOTTOM).calcs([]))
    return _add(panel, [query])


def bars(title: str, text: str, unit: str, query: Query, size: tuple[int, int]) -> bargauge.Panel:
    """A horizontal bar for each series, from 0 to 1."""
    panel = _common(bargauge.Panel(), title, text, size).unit(unit).min(0).max(1)
    panel.orientation(looks.VizOrientation.HORIZONTAL).display_mode(looks.BarGaugeDisplayMode.BASIC)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False))
    panel.thresholds(_colours((None, GREEN), (0.5, ORANGE), (1, RED)))
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    return _add(panel, [query], instant=True)


@dataclass(frozen=True)
class Cell:
    """A column of a table: its query, heading and look."""

    query: str
    title: str
    unit: str = "none"
    words: Mapping[int, tuple[str, str]] | None = None
    look: Mapping[str, Any] | None = None


def rows(
    title: str, text: str, key: str, cells: Sequence[Cell], size: tuple[int, int], kept: Mapping[str, str] | None = None
) -> table.Panel:
    """A table with a row for each value of the label `key`, in the order of the last cell where that is a time.

    Labels in `kept` become columns under that heading.
    """
    panel = _common(table.Panel(), title, text, size).unit("none").show_header(show_header=True)
    _add(panel, [Query(cell.query) for cell in cells], instant=True, as_table=True)
    names = [f"Value #{chr(ord('A') + number)}" if len(cells) > 1 else "Value" for number in range(len(cells))]
    headings = {key: key.capitalize(), **(kept or {})}
    shown = {**headings, **{name: cell.title for name, cell in zip(names, cells, strict=True) if cell.title}}
    only = {"include": {"names": list(shown)}}
    order = {"indexByName": {name: place for place, name in enumerate(shown)}, "renameByName": shown}
    if len(cells) > 1:
        panel.with_transformation(
            DataTransformerConfig(id_val="joinByField", options={"byField": key, "mode": "outer"})
        )
    panel.with_transformation(DataTransformerConfig(id_val="filterFieldsByName", options=only))
    panel.with_transformation(DataTransformerConfig(id_val="organize", options={"excludeByName": {}, **order}))
    if cells[-1].unit.startswith("dateTime"):
        panel.sort_by([common.TableSortByFieldState().display_name(cells[-1].title).desc(desc=False)])
    for cell in cells:
        look: dict[str, Any] = {"unit": cell.unit, **(cell.look or {})}
        if cell.words:
            look |= {"mappings": _words(cell.words), "custom.cellOptions": {"type": "color-text"}}
        if cell.title:
            panel.override_by_name(cell.title, properties(look))
    return panel


def board(uid: str, title: str, text: str) -> dashboard.Dashboard:
    """An empty dashboard: where the data comes from, how often it is asked, and links to the others."""
    others = dashboard.DashboardLink("runwatch").type(DashboardLinkType.DASHBOARDS).tags(["runwatch"])
    sources = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    made = dashboard.Dashboard(title).uid(uid).description(text).tags(["runwatch"]).readonly()
    made.time("now-6h", "now").refresh(FAST).timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    made.timepicker(dashboard.TimePicker().refresh_intervals(["5s", "15s", "1m", "5m"]))
    made.link(others.as_dropdown(as_dropdown=False).keep_time(keep_time=True).include_vars(include_vars=False))
    return made.with_variable(sources)


def variable(name: str, label: str, query: str, *, several: bool = False) -> dashboard.QueryVariable:
    """A choice among the values of a label. `several` may be chosen at once, and are at first."""
    one = dashboard.QueryVariable(name).label(label).query({"query": query, "refId": name}).datasource(SOURCE)
    one.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    return one.multi(multi=several).include_all(include_all=several)

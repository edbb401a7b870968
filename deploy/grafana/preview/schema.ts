// What a dashboard may say: Grafana's own types (@grafana/schema), as JSON writes them and panel by panel.
import type { AnnotationQuery, Dashboard, DataTransformerConfig, FieldConfig, Panel, VariableModel } from '@grafana/schema';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as timeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { GraphFieldConfig, TableFieldOptions } from '@grafana/schema';

/** A type as JSON has it: a member of an enum is written as its text, and nothing is changed later. */
export type Written<T> = T extends string
  ? `${T}`
  : T extends readonly (infer Item)[]
    ? readonly Written<Item>[]
    : T extends object
      ? { readonly [Key in keyof T]: Written<T[Key]> }
      : T;

/** A query of the Prometheus data source. */
export interface Target {
  readonly refId: string;
  readonly expr: string;
  readonly legendFormat: string;
  readonly instant: boolean;
  readonly range: boolean;
  readonly format?: 'table' | 'time_series';
}

/** A property of a field that an override sets: one of Grafana's, or one of the panel's own under `custom`. */
type Property<Custom> =
  | { [Key in keyof FieldConfig]-?: { readonly id: Key; readonly value: Written<FieldConfig[Key]> } }[keyof FieldConfig]
  | { [Key in keyof Custom & string]-?: { readonly id: `custom.${Key}`; readonly value: Written<Custom[Key]> } }[keyof Custom &
      string];

type Common = 'options' | 'fieldConfig' | 'targets' | 'type' | 'transformations';
type Drawn<Type extends string, Options, Custom> = Written<Omit<Panel, Common>> & {
  readonly type: Type;
  readonly targets: readonly Target[];
  readonly transformations?: readonly Written<DataTransformerConfig>[];
  readonly options: Written<Options>;
  readonly fieldConfig: {
    readonly defaults: Written<Omit<FieldConfig, 'custom'>> & { readonly custom?: Written<Custom> };
    readonly overrides: readonly {
      readonly matcher: { readonly id: 'byName'; readonly options: string };
      readonly properties: readonly Property<Custom>[];
    }[];
  };
};

export type Graph = Drawn<'timeseries', timeseries.Options, GraphFieldConfig>;
export type Stat = Drawn<'stat', Partial<stat.Options>, object>;
export type Timeline = Drawn<'state-timeline', timeline.Options, timeline.FieldConfig>;
export type Bars = Drawn<'bargauge', Partial<bargauge.Options>, object>;
export type Rows = Drawn<'table', Partial<table.Options>, TableFieldOptions>;
export type AnyPanel = Graph | Stat | Timeline | Bars | Rows;

export interface Row extends Pick<Panel, 'title' | 'id' | 'gridPos'> {
  readonly type: 'row';
  readonly collapsed: boolean;
  readonly panels: readonly AnyPanel[];
}

/** An annotation; the last three are read by the Prometheus data source. */
export type Mark = Written<Omit<AnnotationQuery, 'target'>> & {
  readonly expr: string;
  readonly titleFormat: string;
  readonly textFormat: string;
  readonly useValueForTime: boolean;
};

type Variable = Written<VariableModel> & { readonly query: string | { readonly query: string; readonly refId: string } };

export type Board = Written<Omit<Dashboard, 'panels' | 'templating' | 'annotations'>> & {
  readonly templating: { readonly list: readonly Variable[] };
  readonly annotations: { readonly list?: readonly Mark[] };
  readonly panels: readonly (AnyPanel | Row)[];
};

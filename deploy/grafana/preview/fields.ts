// What Grafana's core registers and its npm packages leave to the page: field options and transformations.
import {
  applyFieldOverrides,
  DataFrame,
  FieldConfigOptionsRegistry,
  FieldConfigPropertyItem,
  FieldConfigSource,
  FieldType,
  getDisplayProcessor,
  GrafanaTheme2,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
  TransformationApplicabilityLevels,
} from '@grafana/data';
import type { AnyPanel } from './schema';
import { filled } from './prometheus';

const STANDARD = ['unit', 'decimals', 'min', 'max', 'color', 'thresholds', 'mappings', 'links', 'noValue', 'displayName'];
const GRAPH = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  lineStyle: undefined,
  fillOpacity: 0,
  fillBelowTo: undefined,
  gradientMode: 'none',
  showPoints: 'auto',
  pointSize: 5,
  spanNulls: false,
  stacking: { mode: 'none', group: 'A' },
  scaleDistribution: { type: 'linear' },
  axisPlacement: 'auto',
  axisBorderShow: false,
  axisCenteredZero: false,
  axisColorMode: 'text',
  axisLabel: '',
  barAlignment: 0,
  hideFrom: { legend: false, tooltip: false, viz: false },
  thresholdsStyle: { mode: 'off' },
};
const TABLE = { align: 'auto', cellOptions: { type: 'auto' }, inspect: false };

function item(id: string, isCustom: boolean): FieldConfigPropertyItem<any, any, any> {
  const path = isCustom ? id.slice('custom.'.length) : id;
  const process = (value: any) => value;
  return { id, path, name: id, isCustom, process, shouldApply: () => true, editor: () => null, override: () => null, settings: {} };
}

const registry = new FieldConfigOptionsRegistry(() => [
  ...STANDARD.map((id) => item(id, false)),
  ...Object.keys({ ...GRAPH, ...TABLE }).map((id) => item(`custom.${id}`, true)),
]);

const transformers = new Map(Object.values(standardTransformers).map((one) => [one.id, one]));

standardTransformersRegistry.setInit(() =>
  [...transformers.values()].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: async () => transformation as any,
    editor: () => null,
    imageDark: '',
    imageLight: '',
    isApplicable: () => TransformationApplicabilityLevels.Applicable,
  })),
);

/** The frames after the panel's transformations. */
export function transformed(panel: AnyPanel, frames: DataFrame[]): Promise<DataFrame[]> {
  const steps = (panel.transformations ?? []).map((one) => ({ id: one.id, options: one.options }));
  return new Promise((resolve, reject) =>
    transformDataFrame(steps as any, frames).subscribe({ next: resolve, error: reject }),
  );
}

/** The frames with the panel's field options: names, colours, units, limits. */
export function configured(panel: AnyPanel, frames: DataFrame[], theme: GrafanaTheme2, variables: Record<string, string>): DataFrame[] {
  const given = structuredClone(panel.fieldConfig) as unknown as FieldConfigSource;
  const custom = panel.type === 'table' ? TABLE : panel.type === 'timeseries' ? GRAPH : {};
  const defaults = { ...given.defaults, custom: { ...custom, ...given.defaults.custom } };
  for (const step of defaults.thresholds?.steps ?? []) {
    step.value = step.value ?? -Infinity;
  }
  const replaceVariables = (text: string) => filled(text, variables);
  const fieldConfig = { ...given, defaults };
  const found = applyFieldOverrides({ data: frames, fieldConfig, theme, replaceVariables, fieldConfigRegistry: registry, timeZone: 'utc' });
  for (const field of found.flatMap((frame) => frame.fields)) {
    field.display ??= getDisplayProcessor({ field, theme });
    if (field.type === FieldType.time) {
      field.config.custom ??= {};
    }
  }
  return found;
}

// Asks a Prometheus what a panel's queries ask, with Grafana's variables put in, and gives Grafana's data frames.
import { DataFrame, Field, FieldType, toDataFrame } from '@grafana/data';
import type { AnyPanel, Board, Mark, Target } from './schema';

/** Where and when: `from` and `to` in Unix seconds, `step` in seconds; `variables` by name, several values joined by `|`. */
export interface Asked {
  readonly url: string;
  readonly from: number;
  readonly to: number;
  readonly step: number;
  readonly variables: Readonly<Record<string, string>>;
}

interface Series {
  readonly metric: Readonly<Record<string, string>>;
  readonly values?: readonly (readonly [number, string])[];
  readonly value?: readonly [number, string];
}

/** A template with `$name` and `${name}` put in. */
export function filled(template: string, variables: Asked['variables']): string {
  return template.replace(/\$(\w+)|\$\{(\w+)\}/g, (all, name, braced) => variables[name ?? braced] ?? all);
}

/** A legend such as `{{run}} p50` for one series. */
function legend(format: string, labels: Series['metric']): string {
  return format === '__auto' ? '' : format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
}

async function get(asked: Asked, path: string, parameters: Record<string, string>): Promise<any> {
  const answer = await fetch(`${asked.url}/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(`${path} ${JSON.stringify(parameters)}: ${body.error}`);
  }
  return body.data;
}

async function series(asked: Asked, expr: string, instant: boolean): Promise<Series[]> {
  const query = filled(expr, asked.variables);
  const times: Record<string, string> = instant
    ? { time: `${asked.to}` }
    : { start: `${asked.from}`, end: `${asked.to}`, step: `${asked.step}` };
  return (await get(asked, instant ? 'query' : 'query_range', { query, ...times })).result;
}

const number = (text: string) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

/** One frame a series, with gaps where Prometheus has none. */
function lines(asked: Asked, target: Target, found: readonly Series[]): DataFrame[] {
  return found.map(({ metric, values, value }) => {
    const known = new Map((values ?? [value!]).map(([time, text]) => [Math.round(time * 1000), number(text)]));
    const count = Math.floor((asked.to - asked.from) / asked.step);
    const times = target.instant
      ? [...known.keys()]
      : Array.from({ length: count + 1 }, (_, place) => Math.round((asked.from + place * asked.step) * 1000));
    const name = legend(target.legendFormat, metric);
    const drawn = {
      name: 'Value',
      type: FieldType.number,
      labels: { ...metric },
      values: times.map((time) => known.get(time) ?? null),
      config: name ? { displayNameFromDS: name } : {},
    };
    return toDataFrame({ refId: target.refId, fields: [{ name: 'Time', type: FieldType.time, values: times }, drawn] });
  });
}

/** One frame a query, a row for each series, as the Prometheus data source formats a table. */
function rows(target: Target, found: readonly Series[], several: boolean): DataFrame[] {
  const labels = [...new Set(found.flatMap(({ metric }) => Object.keys(metric)))];
  const columns = labels.map((name) => ({ name, type: FieldType.string, values: found.map(({ metric }) => metric[name] ?? '') }));
  const values = found.map(({ value }) => number(value![1]));
  const name = several ? `Value #${target.refId}` : 'Value';
  const fields = [...columns, { name, type: FieldType.number, values }];
  return found.length ? [toDataFrame({ refId: target.refId, fields })] : [];
}

/** The frames of all queries of a panel. */
export async function frames(asked: Asked, targets: readonly Target[]): Promise<DataFrame[]> {
  const answers = await Promise.all(
    targets.map(async (target) => {
      const found = await series(asked, target.expr, target.instant);
      return target.format === 'table' ? rows(target, found, targets.length > 1) : lines(asked, target, found);
    }),
  );
  return answers.flat();
}

/** An annotation where it is drawn: Unix milliseconds. */
export interface Drawn {
  readonly from: number;
  readonly to: number;
  readonly colour: string;
  readonly title: string;
}

/** Marks and regions as the Prometheus data source makes them: true values in a row are one region. */
export async function marks(asked: Asked, wanted: readonly Mark[]): Promise<Drawn[]> {
  const answers = await Promise.all(
    wanted.filter((mark) => mark.enable).map(async (mark) =>
      (await series(asked, mark.expr, false)).flatMap(({ metric, values }) => {
        const title = legend(mark.titleFormat, metric);
        const active = mark.useValueForTime
          ? [...new Set(values!.map(([, text]) => Math.floor(Number(text))))]
          : values!.filter(([, text]) => Number(text) > 0).map(([time]) => time * 1000);
        return regions(active, mark.useValueForTime ? 0 : asked.step * 1000).map(([from, to]) => ({ from, to, title, colour: mark.iconColor }));
      }),
    ),
  );
  return answers.flat();
}

function regions(times: readonly number[], step: number): [number, number][] {
  const found: [number, number][] = [];
  for (const time of times) {
    const last = found.at(-1);
    if (last && time - last[1] <= step) {
      last[1] = time;
    } else {
      found.push([time, time]);
    }
  }
  return found;
}

/** The values of the dashboard's variables: those of the page's address, else the first, or all where several may be chosen. */
export async function variables(asked: Asked, board: Board, given: URLSearchParams): Promise<Record<string, string>> {
  const found: Record<string, string> = { ...asked.variables };
  for (const one of board.templating.list) {
    if (one.type !== 'query' || typeof one.query === 'string') {
      continue;
    }
    const [, metric, label] = /^label_values\((.*), (\w+)\)$/.exec(filled(one.query.query, found))!;
    const range = { 'match[]': metric!, start: `${asked.from}`, end: `${asked.to}` };
    const values: string[] = await get(asked, `label/${label}/values`, range);
    found[one.name] = given.get(`var-${one.name}`) ?? (one.multi ? values.join('|') : values[0]!);
  }
  return found;
}

/** Whether a frame has anything to draw: a table its rows, all else a value. */
export function hasValues(panel: AnyPanel, frame: DataFrame): boolean {
  const number = (one: Field) => one.type === FieldType.number && one.values.some((value) => value !== null);
  return panel.type === 'table' ? frame.length > 0 : frame.fields.some(number);
}

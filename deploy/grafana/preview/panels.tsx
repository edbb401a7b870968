// Draws a panel with Grafana's own components; the state timeline, which is in none of its packages, is drawn here.
import { DataFrame, dateTime, Field, FieldType, getDisplayValueAlignmentFactors, getFieldDisplayName, GrafanaTheme2, TimeRange } from '@grafana/data';
import { BarGaugeDisplayMode, BarGaugeValueMode, VizOrientation } from '@grafana/schema';
import {
  BarGauge,
  BigValue,
  BigValueColorMode,
  BigValueGraphMode,
  BigValueJustifyMode,
  BigValueTextMode,
  Table,
  TimeSeries,
} from '@grafana/ui';
import type { Asked, Drawn } from './prometheus';
import type { AnyPanel } from './schema';

export interface Props {
  readonly panel: AnyPanel;
  readonly frames: DataFrame[];
  readonly marks: readonly Drawn[];
  readonly asked: Asked;
  readonly theme: GrafanaTheme2;
  readonly width: number;
  readonly height: number;
}

const values = (frames: DataFrame[]): { field: Field; frame: DataFrame }[] =>
  frames.flatMap((frame) => frame.fields.filter((field) => field.type === FieldType.number).map((field) => ({ field, frame })));

const last = (field: Field) => field.values.findLast((value) => value !== null) ?? null;

export function Drawing(props: Props) {
  switch (props.panel.type) {
    case 'timeseries':
      return <Graph {...props} />;
    case 'stat':
      return <Stat {...props} />;
    case 'state-timeline':
      return <Timeline {...props} />;
    case 'bargauge':
      return <Bars {...props} />;
    case 'table':
      return <Rows {...props} />;
  }
}

function Rows({ panel, frames, width, height }: Props) {
  const order = (panel.options as any).sortBy;
  return <Table data={frames[0]!} width={width} height={height} initialSortBy={order} enableSharedCrosshair={false} />;
}

function Graph({ panel, frames, marks, asked, theme, width, height }: Props) {
  const range = { from: dateTime(asked.from * 1000), to: dateTime(asked.to * 1000) };
  const timeRange: TimeRange = { ...range, raw: range };
  const legend = (panel.options as any).legend;
  return (
    <TimeSeries frames={frames} timeRange={timeRange} timeZone="browser" legend={legend} width={width} height={height} options={{}}>
      {(builder) => {
        builder.addHook('draw', (plot) => paint(plot, marks, theme));
        return null;
      }}
    </TimeSeries>
  );
}

/** Annotations as Grafana draws them: a dashed line with a foot, or a region. */
function paint(plot: any, marks: readonly Drawn[], theme: GrafanaTheme2) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + 8);
  ctx.clip();
  for (const mark of marks) {
    const [left, right] = [mark.from, mark.to].map((time) => plot.valToPos(time, 'x', true));
    ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(mark.colour);
    ctx.setLineDash([5, 5]);
    ctx.strokeRect(left, bbox.top, right - left, bbox.height);
    ctx.globalAlpha = 0.12;
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.globalAlpha = 1;
    ctx.fillRect(left - 3, bbox.top + bbox.height, right - left + 6, 6);
  }
  ctx.restore();
}

function Stat({ panel, frames, theme, width, height }: Props) {
  const found = values(frames)[0]!;
  const shown = found.field.display!(last(found.field));
  const named = (panel.options as any).textMode === 'name';
  const name = getFieldDisplayName(found.field, found.frame, frames);
  return (
    <BigValue
      value={named ? { ...shown, text: name, prefix: '', suffix: '' } : shown}
      width={width}
      height={height}
      theme={theme}
      colorMode={BigValueColorMode.Value}
      graphMode={BigValueGraphMode.None}
      justifyMode={BigValueJustifyMode.Auto}
      textMode={BigValueTextMode.Value}
    />
  );
}

function Bars({ frames, theme, width, height }: Props) {
  const found = values(frames);
  const shown = found.map((one) => ({ ...one.field.display!(last(one.field)), title: label(one, frames) }));
  const alignmentFactors = getDisplayValueAlignmentFactors(shown.map((display) => ({ display }) as any));
  return (
    <>
      {found.map(({ field }, place) => {
        return (
          <BarGauge
            key={place}
            value={shown[place]!}
            alignmentFactors={alignmentFactors}
            display={field.display}
            field={field.config}
            theme={theme}
            width={width}
            height={height / found.length - 4}
            itemSpacing={4}
            orientation={VizOrientation.Horizontal}
            displayMode={BarGaugeDisplayMode.Basic}
            valueDisplayMode={BarGaugeValueMode.Color}
          />
        );
      })}
    </>
  );
}

/** A band for each series; values in a row that look the same are one piece. */
function Timeline({ frames, asked, theme, width, height }: Props) {
  const found = values(frames).toSorted((one, other) => label(one, frames).localeCompare(label(other, frames)));
  const names = 150;
  const band = (height - 26) / found.length;
  const scale = (width - names) / (asked.to - asked.from);
  const words = new Map(found.flatMap(({ field }) => field.values.filter((value) => value !== null).map((value) => {
    const shown = field.display!(value);
    return [shown.text, shown.color] as const;
  })));
  return (
    <svg width={width} height={height} style={{ font: '12px sans-serif' }}>
      {found.map((one, place) => (
        <g key={place} transform={`translate(0 ${place * band})`}>
          <text x={names - 8} y={band / 2 + 4} textAnchor="end" fill={theme.colors.text.secondary}>
            {label(one, frames)}
          </text>
          {pieces(one.field).map(({ from, to, colour }) => (
            <rect
              key={from}
              x={names + (one.frame.fields[0]!.values[from] / 1000 - asked.from) * scale}
              width={(to - from) * asked.step * scale + 0.5}
              y={band * 0.08}
              height={band * 0.84}
              fill={colour}
              fillOpacity={0.85}
            />
          ))}
        </g>
      ))}
      <g transform={`translate(${names} ${height - 8})`}>
        {[...words].map(([word, colour], place) => (
          <g key={word} transform={`translate(${place * 110} 0)`}>
            <rect y={-8} width={14} height={4} fill={colour} />
            <text x={20} fill={theme.colors.text.primary}>
              {word}
            </text>
          </g>
        ))}
      </g>
    </svg>
  );
}

const label = (one: { field: Field; frame: DataFrame }, frames: DataFrame[]) => getFieldDisplayName(one.field, one.frame, frames);

function pieces(field: Field): { from: number; to: number; colour: string }[] {
  const found: { from: number; to: number; colour: string; value: unknown }[] = [];
  field.values.forEach((value, place) => {
    const before = found.at(-1);
    if (before && before.to === place && before.value === value) {
      before.to = place + 1;
    } else if (value !== null) {
      found.push({ from: place, to: place + 1, colour: field.display!(value).color!, value });
    }
  });
  return found;
}

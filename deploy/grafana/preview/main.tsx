// A dashboard over a live Prometheus: /?board=run&prometheus=http://localhost:9090&minutes=10&var-run=demo&theme=light
import { createTheme, DataFrame, ThemeContext } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { daemon, fleet, run } from './boards.gen';
import { configured, transformed } from './fields';
import { Drawing } from './panels';
import { Asked, Drawn, filled, frames, hasValues, marks, variables } from './prometheus';
import type { AnyPanel, Board, Row } from './schema';

const BOARDS: Record<string, Board> = { run, fleet, daemon };
const CELL = 30;
const GAP = 8;

interface Answered {
  readonly panel: AnyPanel;
  readonly frames: DataFrame[];
  readonly error?: string;
}

const given = new URLSearchParams(location.search);
const board = BOARDS[given.get('board') ?? 'run']!;
const theme = createTheme({ colors: { mode: given.get('theme') === 'light' ? 'light' : 'dark' } });
const width = Number(given.get('width') ?? 1600);
const unfolded = given.has('unfolded');

/** Everything that is drawn, folded rows only where the address says so; a repeated panel once for each value. */
function drawn(values: Record<string, string>): { rows: Row[]; panels: AnyPanel[] } {
  const rows = board.panels.filter((one): one is Row => one.type === 'row');
  const open = board.panels.filter((one): one is AnyPanel => one.type !== 'row');
  const folded = rows.flatMap((row) => (unfolded ? row.panels.flatMap((panel) => repeated(panel, values)) : []));
  return { rows, panels: [...open, ...folded] };
}

function repeated(panel: AnyPanel, values: Record<string, string>): AnyPanel[] {
  const { h, w, y } = panel.gridPos!;
  return (values[panel.repeat!] ?? '').split('|').map((value, place) => {
    const along = Math.floor(24 / w);
    const gridPos = { h, w, x: (place % along) * w, y: y + Math.floor(place / along) * h };
    const only = { ...values, [panel.repeat!]: value };
    const targets = panel.targets.map((target) => ({ ...target, expr: filled(target.expr, only) }));
    return { ...panel, title: filled(panel.title!, only), id: panel.id! * 1000 + place, gridPos, targets } as AnyPanel;
  });
}

async function answered(panel: AnyPanel, asked: Asked): Promise<Answered> {
  try {
    const found = await transformed(panel, await frames(asked, panel.targets));
    return { panel, frames: configured(panel, found, theme, asked.variables).filter((frame) => hasValues(panel, frame)) };
  } catch (error) {
    return { panel, frames: [], error: String(error) };
  }
}

function Page() {
  const [known, setKnown] = useState<{ asked: Asked; panels: Answered[]; marks: Drawn[]; rows: Row[] }>();
  useEffect(() => {
    void ask().then(setKnown);
  }, []);
  useEffect(() => {
    document.body.dataset.state = known ? 'drawn' : 'asking';
  }, [known]);
  if (!known) {
    return null;
  }
  const title = `${board.title}${known.asked.variables['run']?.includes('|') ? '' : `: ${known.asked.variables['run']}`}`;
  return (
    <main style={{ width, position: 'relative', background: theme.colors.background.canvas, minHeight: '100vh' }}>
      <h1 style={{ padding: `${GAP * 2}px ${GAP}px ${GAP}px`, margin: 0, fontSize: 20 }}>{title}</h1>
      <div style={{ position: 'relative', height: bottom(known.panels) * CELL }}>
        {known.rows.map((row) => (
          <Cell key={`row ${row.id}`} at={row.gridPos!}>
            <h2 style={{ fontSize: 15, lineHeight: `${CELL - GAP}px` }}>{row.collapsed && !unfolded ? '▸' : '▾'} {row.title}</h2>
          </Cell>
        ))}
        {known.panels.map((one) => (
          <Cell key={one.panel.id} at={one.panel.gridPos!}>
            <Framed {...one} asked={known.asked} marks={known.marks} />
          </Cell>
        ))}
      </div>
    </main>
  );
}

const bottom = (panels: readonly Answered[]) => Math.max(...panels.map(({ panel }) => panel.gridPos!.y + panel.gridPos!.h)) + 1;

function Cell({ at, children }: { at: { x: number; y: number; w: number; h: number }; children: React.ReactNode }) {
  const column = width / 24;
  const box = { left: at.x * column + GAP / 2, top: at.y * CELL, width: at.w * column - GAP, height: at.h * CELL - GAP };
  return <div style={{ position: 'absolute', ...box }}>{children}</div>;
}

function Framed({ panel, frames: found, error, asked, marks: wanted }: Answered & { asked: Asked; marks: readonly Drawn[] }) {
  const outer = { width: (panel.gridPos!.w * width) / 24 - GAP, height: panel.gridPos!.h * CELL - GAP };
  return (
    <section data-panel={panel.title} data-empty={found.length === 0} data-error={error ?? ''}>
      <PanelChrome {...outer} title={panel.title} description={panel.description}>
        {(inner: number, tall: number) =>
          found.length ? (
            <Drawing panel={panel} frames={found} marks={wanted} asked={asked} theme={theme} width={inner} height={tall} />
          ) : (
            <p style={{ padding: 12, color: theme.colors.text.secondary }}>{error ?? panel.fieldConfig.defaults.noValue ?? 'No data'}</p>
          )
        }
      </PanelChrome>
    </section>
  );
}

async function ask() {
  const to = Number(given.get('to') ?? Math.floor(Date.now() / 1000));
  const from = to - 60 * Number(given.get('minutes') ?? 15);
  const scrape = Number(given.get('scrape') ?? 15);
  const step = Math.max(scrape, Math.ceil((to - from) / 600));
  const asked = { url: given.get('prometheus') ?? 'http://localhost:9090', from: Math.floor(from / step) * step, to, step };
  const rate = { __rate_interval: `${Math.max(4 * scrape, step + scrape)}s` };
  const known: Asked = { ...asked, variables: await variables({ ...asked, variables: rate }, board, given) };
  const { rows, panels } = drawn({ ...known.variables });
  const [answers, found] = await Promise.all([
    Promise.all(panels.map((panel) => answered(panel, known))),
    marks(known, board.annotations.list ?? []),
  ]);
  return { asked: known, panels: answers, marks: found, rows };
}

createRoot(document.getElementById('page')!).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <Page />
  </ThemeContext.Provider>,
);
